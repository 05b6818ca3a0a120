"""The sections of docs/soundness.md on early looks, whole runs, one long run, estimates and power."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import power
from scipy import special
from simulated_coverage import Coverage
from soundness_steps import (
    DELTA,
    MIDDLE,
    MUS,
    QUERY,
    Rng,
    Section,
    Trial,
    coins,
    gaussian_claim,
    same_distance,
    trial,
)

import dpaudit
from dpaudit.accounting import noise_for_epsilon
from dpaudit.diagnostics import NoiseCheck, ObservedStep
from dpaudit.recording import PerStep, Recorder, WholeRun
from dpaudit.stats import Estimate

RATE, STEPS = 4096 / 50000, 2500  # the paper's main setting
ROC_RATE = 0.1  # the false positive rate of the ROC's cells

# Looks at a run before its end.


def watched(rng: Rng, mu: float, *, planned: int | None, steps: int, canaries: int) -> float:
    """Show the bound after every step, and stop at the first violation of the true claim."""
    recorder = Recorder(claim=gaussian_claim(mu), num_steps=planned)
    for present in coins(rng, steps, canaries):
        recorder.record(present + rng.standard_normal(canaries) / mu, present)
        if recorder.live().is_violation:
            return max(recorder.audit().bound.parameter, mu * (1 + 1e-6))
    return recorder.audit().bound.parameter


def watched_pairs(rng: Rng, mu: float, *, steps: int) -> float:
    """Show the bound of pairs after every step, and audit at the end."""
    recorder = Recorder(claim=gaussian_claim(mu), num_steps=steps, scorer=PerStep(paired=True))
    for scores in rng.standard_normal((steps, 2)) / mu + [0.0, 1.0]:
        recorder.record(scores, [False, True])
        if recorder.live().is_violation:
            return max(recorder.audit().bound.parameter, mu * (1 + 1e-6))
    return recorder.audit().bound.parameter


def repeated(rng: Rng, mu: float, *, steps: int, canaries: int, every: int) -> float:
    """Audit growing data of steps x canaries again and again; return the largest bound."""
    present = coins(rng, steps, canaries)
    scores = present + rng.standard_normal(present.shape) / mu
    found = []
    for count in range(every, steps + 1, every):
        observations = dpaudit.Observations.from_presence(scores[:count], present[:count], normalized=True)
        found.append(dpaudit.audit(observations, claim=gaussian_claim(mu)).bound.parameter)
    return max(found)


def repeated_counts(rng: Rng, mu: float, *, size: int, every: int) -> float:
    """Audit a growing number of one-dimensional scores again and again; return the largest bound."""
    absent, present = rng.standard_normal(size) / mu, 1 + rng.standard_normal(size) / mu
    found = []
    for count in range(every, size + 1, every):
        observations = dpaudit.Observations(
            with_canary=present[:count], without_canary=absent[:count], normalized=True
        )
        found.append(dpaudit.audit(observations, claim=gaussian_claim(mu)).bound.parameter)
    return max(found)


def audited_twice(rng: Rng, mu: float, *, steps: int, canaries: int) -> float:
    """Audit in the middle and at the end of a planned run, with tests; return twice the truth if refuted."""
    recorder = Recorder(
        claim=gaussian_claim(mu), num_steps=steps, checks=[NoiseCheck()], scorer=PerStep(signal=1.0)
    )
    is_refuted = False
    for number in range(steps):
        noise, present = rng.standard_normal(canaries) / mu, rng.random(canaries) < 0.5
        recorder.observe(ObservedStep.of_release(noise, np.zeros(canaries), leaves=(canaries,)))
        recorder.record(present + noise, present)
        if number + 1 in (steps // 2, steps):
            is_refuted |= bool(recorder.audit().refuted)
    return 2 * mu if is_refuted else 0.0


def small_p_value(rng: Rng, mu: float, *, size: int | tuple[int, int], confidence: float) -> float:
    """Return twice the truth if the p-value of a correct mechanism is at most 5 %."""
    if isinstance(size, int):
        absent, present = rng.standard_normal(size) / mu, 1 + rng.standard_normal(size) / mu
        observations = dpaudit.Observations(with_canary=present, without_canary=absent, normalized=True)
    else:
        mask = coins(rng, *size)
        scores = mask + rng.standard_normal(size) / mu
        observations = dpaudit.Observations.from_presence(scores, mask, normalized=True)
    result = dpaudit.audit(observations, claim=gaussian_claim(mu), confidence=confidence)
    return 2 * mu if result.p_value <= 0.05 else 0.0


# One score per canary over a whole run, in which sampling draws the canaries.


def whole_run(rng: Rng, mu: float, *, rate: float, steps: int, canaries: int, one_run: bool) -> float:
    present = rng.random(canaries) < 0.5
    recorder = Recorder(
        claim=dpaudit.Claim.dpsgd(noise_multiplier=1 / mu, sample_rate=rate, num_steps=steps, delta=DELTA),
        num_steps=steps,
        scorer=WholeRun(present),
    )
    for _ in range(steps):
        is_drawn = present & (rng.random(canaries) < rate)
        recorder.record(is_drawn + rng.standard_normal(canaries) / mu)
    return (recorder.one_run_bound() if one_run else recorder.audit().bound).parameter


def dependent_guesses(rng: Rng, mu: float, *, canaries: int, num_guesses: int) -> float:
    """Guess canaries that share their distance from the threshold: all of them are near-certain, or none."""
    present = coins(rng, 1, canaries)
    scores = same_distance(rng, present, mu)[0] + 1e-9 * rng.random(canaries)
    guesses = dpaudit.Guesses.from_scores(scores, present[0], num_guesses=num_guesses)
    return dpaudit.one_run_fdp_bound(guesses, tradeoff=dpaudit.Gaussian(), delta=DELTA).parameter


# The default audit of one long run with the numbers of guesses of independent canaries, which are
# multinomial; this is as good as scores, and fast enough for thousands of canaries.


@cache
def _paper_claim(epsilon: float) -> dpaudit.Claim:
    noise = noise_for_epsilon(epsilon, sample_rate=RATE, num_steps=STEPS, delta=DELTA)
    return dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=RATE, num_steps=STEPS, delta=DELTA)


def flagship(rng: Rng, epsilon: float, *, side: int, method: str) -> float:
    """Return the bound on the epsilon of a training run of known epsilon, up to rounding of the latter."""
    hypothesis = _paper_claim(epsilon).hypothesis(None)
    found = hypothesis.epsilon(guessed(rng, hypothesis.parameter, side=side, steps=STEPS, method=method))
    return found / hypothesis.epsilon(hypothesis.parameter) * epsilon


def guessed(rng: Rng, mu: float, *, side: int, steps: int, method: str) -> float:
    """Return the bound on mu from steps with ``2 * side`` canaries."""
    if method == "JointExact":
        return _pooled(rng, mu, side * steps)
    betting = {
        "default": dpaudit.Betting(horizon=steps, expected=mu),
        "no tails": dpaudit.Betting(horizon=steps, expected=mu, tails=0.0),
        "no stop-loss": dpaudit.Betting(horizon=steps, expected=mu, stop_loss=False),
    }[method]
    far = dpaudit.Betting(expected=mu).far_guesses(QUERY)
    cuts = np.asarray([one.distance - mu / 2 for one in far])  # from the threshold, in standard deviations
    edges = np.concatenate([-cuts[::-1], [0.0], cuts])
    below = np.concatenate([[0.0], special.ndtr(edges - mu / 2), [1.0]])
    counts = rng.multinomial(2 * side, np.diff(below), steps)
    middle = cuts.size + 1
    has_tails = bool(betting.far_guesses(QUERY))
    placed = betting.start(2 * side, QUERY, by_coin=True, with_tails=has_tails)
    rates = [
        (counts[:, middle + level :].sum(axis=1) / side, counts[:, : middle - level].sum(axis=1) / side)
        for level in range(1, cuts.size + 1)
    ]
    placed.extend(counts[:, middle:].sum(axis=1) / side - 1, rates if has_tails else [])
    return placed.parameter()


def _pooled(rng: Rng, mu: float, size: int) -> float:
    num_present = int(rng.binomial(2 * size, 0.5))
    wrong = float(special.ndtr(-mu / 2))
    counts = dpaudit.ErrorCounts(
        false_positives=int(rng.binomial(2 * size - num_present, wrong)),
        num_absent=2 * size - num_present,
        false_negatives=int(rng.binomial(num_present, wrong)),
        num_present=num_present,
    )
    bound = dpaudit.lower_bound(
        counts, delta=DELTA, tradeoff=dpaudit.Gaussian(), inference=dpaudit.JointExact()
    )
    return bound.parameter


# Intervals of estimates: the trial returns 0 if the interval contains the truth, and twice the truth if not.


def estimated(rng: Rng, mu: float, *, size: int | tuple[int, int], shared: float, roc: bool) -> float:
    """Estimate noise, or the ROC, from scores of which a part of the variance is shared in a step."""
    if isinstance(size, int):
        absent, present = rng.standard_normal(size) / mu, 1 + rng.standard_normal(size) / mu
        observations = dpaudit.Observations(with_canary=present, without_canary=absent, normalized=True)
    else:
        mask = coins(rng, *size)
        noise = np.sqrt(1 - shared) * rng.standard_normal(size)
        noise += np.sqrt(shared) * rng.standard_normal((size[0], 1))
        observations = dpaudit.Observations.from_presence(mask + noise / mu, mask, normalized=True)
    estimate = Estimate.of(
        observations, tradeoff=dpaudit.Gaussian(), claimed=mu, epsilon=lambda mu: mu, confidence=0.95
    )
    if roc:
        band = estimate.roc
        place = int(np.searchsorted(band.fpr, ROC_RATE))
        truth = special.ndtr(mu + special.ndtri(ROC_RATE))
        covers = bool(band.low[place] <= truth <= band.high[place])
    else:
        interval = estimate.noise_multiplier
        covers = interval is None or interval.low <= 1 / mu <= interval.high
    return 0.0 if covers else 2 * mu


def run_sections(repetitions: int) -> list[Section]:
    """Return the sections of this chapter, given the repetitions of the fastest cells."""
    some, few = max(repetitions // 4, 1), max(repetitions // 5, 1)
    return [
        _looks(some),
        _repeated_counts(some),
        _audited_twice(some),
        _p_values(some),
        _whole_runs(few, max(repetitions // 10, 1)),
        _dependent_guesses(some),
        *_flagship(few),
        _estimates(repetitions),
    ]


def _looks(repetitions: int) -> Section:
    cells = [
        trial(watched, (name,), mu, repetitions, planned=planned, steps=count, canaries=64)
        for name, planned, count in (
            ("live bound after each of 100 steps, run stopped at a violation", 100, 100),
            ("the same without a planned number of steps", None, 100),
            ("planned for 100 steps, continued to 200", 100, 200),
        )
        for mu in MIDDLE
    ]
    cells += [
        trial(
            watched_pairs,
            ("pairs: live bound after each of 200 steps, then `audit()`",),
            mu,
            repetitions,
            steps=200,
        )
        for mu in MIDDLE
    ]
    cells += [
        trial(
            repeated,
            ("`audit()` after every 10 of 150 steps, largest bound",),
            mu,
            repetitions,
            steps=150,
            canaries=64,
            every=10,
        )
        for mu in MIDDLE
    ]
    return Section(
        title="Live bounds, early stopping and repeated audits",
        head=("looks",),
        trials=tuple(cells),
    )


def _repeated_counts(repetitions: int) -> Section:
    return Section(
        title="What is not covered: repeated audits of one-dimensional scores",
        head=("looks",),
        trials=tuple(
            trial(
                repeated_counts,
                ("20 audits of growing data",),
                mu,
                repetitions,
                is_covered=False,
                size=1000,
                every=50,
            )
            for mu in MIDDLE
        ),
    )


def _audited_twice(repetitions: int) -> Section:
    return Section(
        title="Tests of several audits",
        head=("audits",),
        trials=tuple(
            trial(audited_twice, ("after 30 and after 60 steps",), mu, repetitions, steps=60, canaries=32)
            for mu in MIDDLE
        ),
        has_ratio=False,
    )


def _p_values(repetitions: int) -> Section:
    return Section(
        title="P-values",
        head=("scores", "confidence of the audit"),
        trials=tuple(
            trial(
                small_p_value,
                (name, f"{100 * confidence:g} %"),
                mu,
                repetitions,
                size=size,
                confidence=confidence,
            )
            for name, size in (
                ("100 per side", 100),
                ("20 steps of 64", (20, 64)),
                ("100 steps of 16", (100, 16)),
            )
            for confidence in (0.8, 0.99)
            for mu in MIDDLE
        ),
        has_ratio=False,
    )


def _whole_runs(repetitions: int, fewer: int) -> Section:
    settings = ((1.0, 0.1, 50), (2.0, 0.04, 100))  # mu, sample rate, steps
    return Section(
        title="Whole runs with sampled entries",
        head=("bound", "sample rate", "steps"),
        trials=tuple(
            trial(
                whole_run,
                ("`one_run_bound()`" if one_run else "`audit()`", f"{rate:g}", str(count)),
                mu,
                fewer if one_run else repetitions,
                rate=rate,
                steps=count,
                canaries=500,
                one_run=one_run,
            )
            for one_run in (False, True)
            for mu, rate, count in settings
        ),
    )


def _dependent_guesses(repetitions: int) -> Section:
    return Section(
        title="One run with dependent canaries",
        head=("canaries",),
        trials=tuple(
            trial(dependent_guesses, ("shared distance",), mu, repetitions, canaries=1000, num_guesses=200)
            for mu in MUS
        ),
    )


_METHODS = {
    "default": "default",
    "no tails": "`Betting(tails=0)`",
    "no stop-loss": "`Betting(stop_loss=False)`",
    "JointExact": "`JointExact()`, pooled: needs independent canaries",
}


def _flagship(repetitions: int) -> Iterator[Section]:
    yield Section(
        title="One run at the paper's main setting",
        head=("inference", "canaries per side"),
        trials=tuple(
            Trial(
                (label, f"{side:,}"),
                f"epsilon = {epsilon:g}",
                epsilon,
                5 * repetitions // 2,  # means close to 1 differ by little
                flagship,
                (("side", side), ("method", method)),
            )
            for side in (512, 4096)
            for method, label in _METHODS.items()
            for epsilon in (1.0, 4.0, 8.0, 16.0)
        ),
    )
    yield Section(
        title="One short run",
        head=("inference",),
        trials=tuple(
            trial(guessed, (label,), mu, repetitions, side=64, steps=50, method=method)
            for method, label in _METHODS.items()
            for mu in MUS
        ),
    )


def _estimates(repetitions: int) -> Section:
    sizes: tuple[tuple[str, int | tuple[int, int], float], ...] = (
        ("20 per side", 20, 0.0),
        ("50 per side", 50, 0.0),
        ("1,000 per side", 1000, 0.0),
        ("10 steps of 16", (10, 16), 0.0),
        ("10 steps of 16, one shared draw", (10, 16), 1.0),
        ("30 steps of 16", (30, 16), 0.0),
        ("30 steps of 16, correlation 0.5", (30, 16), 0.5),
        ("100 steps of 64", (100, 64), 0.0),
        ("100 steps of 64, correlation 0.5", (100, 64), 0.5),
        ("100 steps of 64, one shared draw", (100, 64), 1.0),
    )
    return Section(
        title="Intervals of estimates",
        head=("estimate", "scores"),
        trials=tuple(
            trial(
                estimated,
                ("true positive rate" if roc else "effective noise", name),
                mu,
                repetitions,
                size=size,
                shared=shared,
                roc=roc,
            )
            for roc in (False, True)
            for name, size, shared in sizes
            for mu in (0.39, 1.0, 3.0)
        ),
        has_ratio=False,
    )


@dataclass(frozen=True)
class PowerTrial(Trial):
    """The share of audits that detect the leak which they state for 80 %, and that leak over the claim."""

    @property
    def key(self) -> str:
        return f"power of {self.row[0]} x {self.repetitions}"

    def run(self) -> Coverage:
        design = next(one for one in power.all_designs() if one.name == self.row[0])
        leak = design.leak()
        share = design.share_detected(leak, self.repetitions)
        return Coverage(repetitions=self.repetitions, exceeded=share, mean_ratio=leak / design.claimed)


def power_trials(repetitions: int) -> list[PowerTrial]:
    """Return a trial for each default design, given the repetitions of the fastest cells."""
    times = repetitions  # a standard error of 1.3 points
    return [
        PowerTrial((one.name,), "", one.claimed, times, float, is_covered=False)
        for one in power.all_designs()
    ]
