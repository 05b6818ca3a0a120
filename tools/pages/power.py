"""Simulate how often audits detect the leak that they state for 80 %, for every default design.

    python tools/pages/power.py [--repetitions 1000] [--only WORD]

Prints rows of docs/data/power.csv. Each takes the leak that an audit of this size states, simulates
mechanisms with exactly this leak, and counts how many the same audit refutes. A design that may miss twice
the claimed epsilon is marked: the verdict of a correct run is then UNDERPOWERED.
"""

from __future__ import annotations

import argparse
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import dpaudit
from dpaudit import stats
from dpaudit.accounting import SubsampledGaussian
from dpaudit.recording import PerStep, Recorder, WholeRun
from dpaudit.stats import too_many_correct, unrefuted

DELTA = 1e-5
Draw = Callable[[float, np.random.Generator], dpaudit.Result]  # audits a mechanism with this parameter


@dataclass(frozen=True)
class Design:
    """One size and shape of observations, audited by default."""

    name: str
    claimed: float
    draw: Draw

    def leak(self) -> float:
        """Return the parameter of the leak that the audit states."""
        return self.draw(self.claimed, np.random.default_rng(0)).power.parameter

    def is_underpowered(self) -> bool:
        """Return whether the audit may miss twice the claimed epsilon."""
        result = self.draw(self.claimed, np.random.default_rng(0))
        return unrefuted(result.power, result.claim.epsilon, self.claimed) is dpaudit.Verdict.UNDERPOWERED

    def share_detected(self, parameter: float, repetitions: int) -> float:
        """Return the share of audits of mechanisms with this parameter that refute the claim."""
        if not math.isfinite(parameter):
            return 0.0
        seed = int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16)
        rngs = (np.random.default_rng([seed, number]) for number in range(repetitions))
        return sum(bool(self.draw(parameter, rng).refuted) for rng in rngs) / repetitions


def gaussian_claim(mu: float) -> dpaudit.Claim:
    return dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=DELTA)


def independent(mu: float, size: int, *, normalized: bool) -> Draw:
    """Audit independent scores of the Gaussian mechanism."""

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        absent, present = rng.standard_normal(size) / parameter, 1 + rng.standard_normal(size) / parameter
        scores = dpaudit.Observations(with_canary=present, without_canary=absent, normalized=normalized)
        return dpaudit.audit(scores, claim=gaussian_claim(mu))

    return draw


def generic(epsilon: float, size: int, *, normalized: bool) -> Draw:
    """Audit Gaussian scores against a claim of (epsilon, delta)-DP; the parameter is epsilon."""
    claim = dpaudit.Claim.approximate_dp(epsilon=epsilon, delta=DELTA)

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        mu = dpaudit.Gaussian().with_epsilon(parameter, DELTA)
        absent, present = rng.standard_normal(size) / mu, 1 + rng.standard_normal(size) / mu
        scores = dpaudit.Observations(with_canary=present, without_canary=absent, normalized=normalized)
        return dpaudit.audit(scores, claim=claim)

    return draw


def steps(mu: float, num_steps: int, num_canaries: int, *, normalized: bool) -> Draw:
    """Audit steps with several canaries, each present by a fair coin."""

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        present = rng.random((num_steps, num_canaries)) < 0.5
        values = present + rng.standard_normal(present.shape) / parameter
        scores = dpaudit.Observations.from_presence(values, present, normalized=normalized)
        return dpaudit.audit(scores, claim=gaussian_claim(mu))

    return draw


def groups(mu: float, num_steps: int, num_canaries: int) -> Draw:
    """Audit steps with several canaries, as many present as absent."""
    size = num_steps, num_canaries

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        absent, present = rng.standard_normal(size) / parameter, 1 + rng.standard_normal(size) / parameter
        scores = dpaudit.Observations(with_canary=present, without_canary=absent, normalized=True)
        return dpaudit.audit(scores, claim=gaussian_claim(mu))

    return draw


def recorded(mu: float, num_steps: int, num_canaries: int, length: float = 1.0) -> Draw:
    """Record steps with canaries of this length, in clipping norms, scored in units of their length."""

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        recorder = Recorder(claim=gaussian_claim(mu), num_steps=num_steps)
        for _ in range(num_steps):
            present = rng.random(num_canaries) < 0.5
            scores = present + rng.standard_normal(num_canaries) / (parameter * length)
            recorder.record(scores, present, lengths=np.full(num_canaries, length))
        return recorder.audit()

    return draw


def pairs(mu: float, num_steps: int, rate: float = 1.0) -> Draw:
    """Record pairs of steps without and with the canary, which the second contains with probability rate."""
    tradeoff = None if rate == 1 else SubsampledGaussian(rate, 1)
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1 / mu, sample_rate=0.01, num_steps=num_steps, delta=DELTA)

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        recorder = Recorder(claim=claim, num_steps=num_steps, scorer=PerStep(paired=True, tradeoff=tradeoff))
        means = np.stack([np.zeros(num_steps), rng.random(num_steps) < rate], axis=1)
        for scores in means + rng.standard_normal(means.shape) / parameter:
            recorder.record(scores, [False, True])
        return recorder.audit()

    return draw


def whole_run(noise: float, rate: float, num_steps: int, num_canaries: int) -> Draw:
    """Record a whole run: one log-likelihood ratio per canary."""

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        present = rng.random(num_canaries) < 0.5
        recorder = Recorder(
            claim=dpaudit.Claim.dpsgd(
                noise_multiplier=noise, sample_rate=rate, num_steps=num_steps, delta=DELTA
            ),
            num_steps=num_steps,
            scorer=WholeRun(present),
        )
        for _ in range(num_steps):
            joined = present & (rng.random(num_canaries) < rate)
            recorder.record(joined + rng.standard_normal(num_canaries) / parameter)
        return recorder.audit()

    return draw


def many_runs(noise: float, rate: float, num_steps: int, size: int) -> Draw:
    """Audit one score per training run, against the curve of the whole run."""
    claim = dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=rate, num_steps=num_steps, delta=DELTA)
    curve = SubsampledGaussian(rate, num_steps)

    def draw(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        absent = _log_ratios(parameter, rate, (num_steps, size), rng, joins=0.0)
        present = _log_ratios(parameter, rate, (num_steps, size), rng, joins=rate)
        scores = dpaudit.Observations(with_canary=present, without_canary=absent)
        return dpaudit.audit(scores, claim=claim, tradeoff=curve)

    return draw


def _log_ratios(
    parameter: float, rate: float, shape: tuple[int, int], rng: np.random.Generator, *, joins: float
) -> np.ndarray:
    """Draw log-likelihood ratios of runs in which the canary joins each step with probability joins."""
    num_steps, size = shape
    total = np.zeros(size)
    for _ in range(num_steps):
        scores = (rng.random(size) < joins) + rng.standard_normal(size) / parameter
        total += np.log1p(rate * np.expm1((2 * scores - 1) * parameter**2 / 2))
    return total


# Steps, canaries and mu, from very few steps to the paper's number.
SIZES = (
    (3, 1024, 1.0),
    (3, 1024, 0.1),
    (5, 256, 1.0),
    (6, 4096, 0.3),
    (8, 512, 0.5),
    (10, 64, 1.0),
    (10, 1024, 0.5),
    (15, 64, 1.0),
    (20, 16, 1.0),
    (20, 256, 0.3),
    (25, 1024, 1.0),
    (29, 128, 1.0),
    (30, 128, 1.0),
    (40, 64, 1.0),
    (60, 8, 2.0),
    (60, 1024, 0.2),
    (100, 32, 3.0),
    (200, 4, 1.0),
    (1000, 16, 0.5),
    (2500, 64, 1.0),
)


def designs() -> Iterator[Design]:
    yield Design("normalized, 40 scores per side", 1.0, independent(1.0, 40, normalized=True))
    yield Design("normalized, 120 scores per side, mu 2", 2.0, independent(2.0, 120, normalized=True))
    yield Design("normalized, 1,000 scores per side", 0.39, independent(0.39, 1000, normalized=True))
    yield Design("raw, 9 scores per side, mu 0.05", 0.05, independent(0.05, 9, normalized=False))
    yield Design("raw, 40 scores per side", 1.0, independent(1.0, 40, normalized=False))
    yield Design("raw, 200 scores per side", 1.0, independent(1.0, 200, normalized=False))
    yield Design("raw, 1,000 scores per side", 1.0, independent(1.0, 1000, normalized=False))
    yield Design("(eps, delta), normalized, 1,000 per side", 1.0, generic(1.0, 1000, normalized=True))
    yield Design("(eps, delta), raw, 1,000 per side", 1.0, generic(1.0, 1000, normalized=False))
    yield Design("(eps, delta), raw, 1,000 per side, eps 4", 4.0, generic(4.0, 1000, normalized=False))
    yield Design("(eps, delta), raw, 10,000 per side", 1.0, generic(1.0, 10_000, normalized=False))
    yield Design("(eps, delta), raw, 20,000 per side", 1.0, generic(1.0, 20_000, normalized=False))
    yield Design("pairs, 300 steps", 1.0, pairs(1.0, 300))
    yield Design("pairs, 1,000 steps, canary rate 0.5", 1.0, pairs(1.0, 1000, 0.5))
    yield Design("coins, 100 steps x 64", 0.39, steps(0.39, 100, 64, normalized=True))
    yield Design("coins, 300 steps x 8", 1.0, steps(1.0, 300, 8, normalized=True))
    yield Design("coins, 300 steps x 256", 1.0, steps(1.0, 300, 256, normalized=True))
    for num_steps, num_canaries, mu in SIZES:
        name = f"coins, {num_steps:,} steps x {num_canaries:,}" + ("" if mu == 1 else f", mu {mu:g}")
        yield Design(name, mu, steps(mu, num_steps, num_canaries, normalized=True))
    yield Design("groups, 100 steps x 8 per side", 1.0, groups(1.0, 100, 8))
    yield Design("groups, 10 steps x 8 per side", 1.0, groups(1.0, 10, 8))
    yield Design("raw coins, 25 steps x 256", 1.0, steps(1.0, 25, 256, normalized=False))
    yield Design("raw coins, 100 steps x 64", 1.0, steps(1.0, 100, 64, normalized=False))
    yield Design("raw coins, 300 steps x 8", 1.0, steps(1.0, 300, 8, normalized=False))
    yield Design("recorder, 200 steps x 32", 1.0, recorded(1.0, 200, 32))
    yield Design("input canaries of 0.5 C, 200 x 32", 1.0, recorded(1.0, 200, 32, 0.5))
    yield Design("input canaries of 0.1 C, 200 x 32", 1.0, recorded(1.0, 200, 32, 0.1))
    yield Design("whole run, 2,000 canaries", 1.0, whole_run(1.0, 0.1, 50, 2000))
    yield Design("whole run, 500 canaries", 0.5, whole_run(2.0, 0.05, 200, 500))
    yield Design("many runs, 1,000 per side", 1.0, many_runs(1.0, 0.1, 50, 1000))


@dataclass(frozen=True)
class GuessDesign:
    """Guesses of the membership of all or some canaries in one training run, by log-likelihood ratios."""

    name: str
    noise: float
    rate: float
    num_steps: int
    num_canaries: int
    num_guesses: int

    @property
    def claimed(self) -> float:
        return 1 / self.noise

    @property
    def curve(self) -> SubsampledGaussian:
        return SubsampledGaussian(self.rate, self.num_steps)

    def guesses(self, num_correct: int) -> dpaudit.Guesses:
        return dpaudit.Guesses(
            num_canaries=self.num_canaries, num_guesses=self.num_guesses, num_correct=num_correct
        )

    def leak(self) -> float:
        guesses = self.guesses(self.num_guesses // 2)
        return stats.GuessDesign(guesses, self.curve, DELTA, 1 - 0.95).smallest_leak(self.claimed)

    def is_underpowered(self) -> bool:
        settings = {"noise_multiplier": self.noise, "sample_rate": self.rate, "num_steps": self.num_steps}
        claim = dpaudit.Claim.dpsgd(**settings, delta=DELTA)
        power = stats.Power.of(self.leak(), claim.hypothesis(self.curve), 0.8)
        return unrefuted(power, claim.epsilon, self.claimed) is dpaudit.Verdict.UNDERPOWERED

    def share_detected(self, parameter: float, repetitions: int) -> float:
        refutes = [
            too_many_correct(self.guesses(count), self.curve, self.claimed, 0.05)
            for count in range(self.num_guesses + 1)
        ]
        rng = np.random.default_rng(0)
        return float(np.mean([refutes[self._num_correct(parameter, rng)] for _ in range(repetitions)]))

    def _num_correct(self, parameter: float, rng: np.random.Generator) -> int:
        present = rng.random(self.num_canaries) < 0.5
        shape, ratios = (self.num_steps, self.num_canaries), np.empty(self.num_canaries)
        for number, joins in enumerate((0.0, self.rate)):
            side = present == bool(number)
            ratios[side] = _log_ratios(parameter, self.rate, shape, rng, joins=joins)[side]
        return dpaudit.Guesses.from_scores(ratios, present, num_guesses=self.num_guesses).num_correct


def guess_designs() -> Iterator[GuessDesign]:
    yield GuessDesign("one run, all of 500 canaries guessed", 1.0, 0.1, 50, 500, 500)
    yield GuessDesign("one run, 100 of 500 canaries guessed", 1.0, 0.1, 50, 500, 100)


def all_designs() -> tuple[Design | GuessDesign, ...]:
    return (*designs(), *guess_designs())


def row(design: Design | GuessDesign, repetitions: int, ratio: float, share: float) -> list[str]:
    """Return a row of docs/data/power.csv."""
    leak, detected = (f"{ratio:.4g}", f"{100 * share:.0f}") if math.isfinite(ratio) else ("none", "")
    return [design.name, str(repetitions), leak, detected, "UNDERPOWERED" if design.is_underpowered() else ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    for design in all_designs():
        if arguments.only in design.name:
            leak = design.leak()
            share = design.share_detected(leak, arguments.repetitions)
            print(*row(design, arguments.repetitions, leak / design.claimed, share), sep=",", flush=True)


if __name__ == "__main__":
    main()
