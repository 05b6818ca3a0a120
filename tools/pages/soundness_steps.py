"""Simulated audits of steps with many canaries, for docs/soundness.md: bets, tails, overlap, adaptation."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from scipy import special, stats
from simulated_coverage import Coverage, tally

import dpaudit
from dpaudit.recording import PerStep, Recorder
from dpaudit.stats.inference import BoundQuery

DELTA = 1e-5
MUS = (0.1, 0.39, 1.0, 3.0)
MIDDLE = (0.39, 1.0)
QUERY = BoundQuery(dpaudit.Gaussian(), DELTA, 0.05)
Rng = np.random.Generator


@dataclass(frozen=True)
class Trial:
    """Repeated audits of one simulated mechanism: a cell of a table."""

    row: tuple[str, ...]
    column: str
    truth: float
    repetitions: int
    once: Callable[..., float]  # returns the bound of one audit, given an RNG, the truth and ``options``
    options: tuple[tuple[str, Any], ...] = ()
    is_covered: bool = (
        True  # whether at most 5 % may exceed; otherwise, the cell shows why, or what is detected
    )

    @property
    def key(self) -> str:
        return f"{self.once.__name__}({self.truth:.9g}, {dict(self.options)}) x {self.repetitions}"

    def run(self) -> Coverage:
        options = dict(self.options)
        same = {name: value for name, value in options.items() if name != "method"}  # methods share the data
        seed_text = f"{self.once.__name__} {self.truth:.9g} {same}"
        seed = int(hashlib.sha256(seed_text.encode()).hexdigest()[:8], 16)
        return tally(lambda rng: self.once(rng, self.truth, **options), self.truth, self.repetitions, seed)


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table of the data."""

    title: str
    head: tuple[str, ...]  # what the entries of ``row`` are
    trials: tuple[Trial, ...]
    has_ratio: bool = True  # whether the mean of bound / truth is shown


def trial(
    once: Callable[..., float],
    row: tuple[str, ...],
    mu: float,
    repetitions: int,
    *,
    is_covered: bool = True,
    **options: Any,
) -> Trial:
    """Return the trial of this row in the column of this mu."""
    return Trial(row, f"mu = {mu:g}", mu, repetitions, once, tuple(options.items()), is_covered)


def gaussian_claim(mu: float) -> dpaudit.Claim:
    return dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=DELTA)


def total_variation(mu: float) -> float:
    return float(2 * special.ndtr(mu / 2) - 1)


# Numbers of right guesses: the main bet depends on nothing else.


def independent(rng: Rng, steps: int, coins: int, mu: float) -> np.ndarray:
    return rng.binomial(coins, special.ndtr(mu / 2), steps)


def total_reveal(rng: Rng, steps: int, coins: int, mu: float) -> np.ndarray:
    """Reveal every coin with the probability of the total variation, and otherwise nothing.

    One draw of noise for all canaries of a step gives the same numbers: guesses are all right if the noise is
    small; otherwise either the present or the absent ones are, as many as pure guessing.
    """
    reveals = rng.random(steps) < total_variation(mu)
    return np.where(reveals, coins, rng.binomial(coins, 0.5, steps))


def shared_draw(rng: Rng, steps: int, coins: int, mu: float) -> np.ndarray:
    """Add the same noise to every canary of a step."""
    heads, noise = rng.binomial(coins, 0.5, steps), rng.standard_normal(steps)
    return heads * (noise > -mu / 2) + (coins - heads) * (noise < mu / 2)


def correlated(rng: Rng, steps: int, coins: int, mu: float) -> np.ndarray:
    """Correlate the noise of any two canaries of a step by 0.5."""
    shared = math.sqrt(0.5) * rng.standard_normal(steps)
    heads, own = rng.binomial(coins, 0.5, steps), math.sqrt(0.5)
    right = rng.binomial(heads, special.ndtr((mu / 2 + shared) / own))
    return right + rng.binomial(coins - heads, special.ndtr((mu / 2 - shared) / own))


def shared_distance(rng: Rng, steps: int, coins: int, mu: float) -> np.ndarray:
    """Share the distance from the threshold in a step: some steps are near-certain for all canaries.

    The distance and which side it is on are a Gaussian score, so each canary has exactly the Gaussian curve.
    """
    distance = np.abs(rng.standard_normal(steps) + mu / 2)
    return rng.binomial(coins, special.expit(mu * distance))


MECHANISMS = {
    "independent": independent,
    "one shared draw": shared_draw,
    "total reveal": total_reveal,
    "correlation 0.5": correlated,
    "shared distance": shared_distance,
}


def bets(rng: Rng, mu: float, *, mechanism: str, coins: int, steps: int, planned: bool) -> float:
    """Bet on numbers of right guesses with all of the error probability."""
    betting = dpaudit.Betting(horizon=steps if planned else None, expected=mu)
    placed = betting.start(coins, QUERY, by_coin=True, with_tails=False)
    placed.extend(2 * MECHANISMS[mechanism](rng, steps, coins, mu) / coins - 1)
    return placed.parameter()


def adaptive_bets(rng: Rng, mu: float, *, policy: str, coins: int, steps: int) -> float:
    """Bet on a mechanism that knows all earlier steps, and in one policy the wealth of the bettor."""
    placed = dpaudit.Betting(expected=mu).start(coins, QUERY, by_coin=True, with_tails=False)
    most, lead, right = total_variation(mu), 0.0, 0
    for _ in range(steps):
        if policy == "by wealth":
            book = placed._main._wealth  # what an adversary could compute from the scores
            wealth = float(book.logs(most)[-1]) if book.num_steps else 0.0
            name = "total reveal" if wealth < 0 else "shared distance" if wealth < 1.5 else "independent"
        elif policy == "by luck":
            name = "total reveal" if lead < 0 else "independent"
        else:
            name = list(MECHANISMS)[right % len(MECHANISMS)]
        right = int(MECHANISMS[name](rng, 1, coins, mu)[0])
        lead += 2 * right / coins - 1 - most
        placed.extend(np.asarray([2 * right / coins - 1]))
    return placed.parameter()


# Scores: the default audit, which also bets on tails.


def normal(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    return present + rng.standard_normal(present.shape) / mu


def same_distance(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    """Return scores with the same distance from the threshold in a step."""
    distance = np.abs(rng.standard_normal((len(present), 1)) + mu / 2)
    is_right = rng.random(present.shape) < special.expit(mu * distance)
    return 0.5 + np.where(is_right == present, 1.0, -1.0) * distance / mu


def same_noise(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    return present + rng.standard_normal((len(present), 1)) / mu


def mirrored(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    """Return scores that are all right or all wrong: the noise of a step turns around with each coin."""
    return present + np.where(present, 1.0, -1.0) * rng.standard_normal((len(present), 1)) / mu


def truncated(rng: Rng, present: np.ndarray, mu: float, at: float) -> np.ndarray:
    """Cut noise off at this number of standard deviations, and restore its variance."""
    noise = stats.truncnorm.rvs(-at, at, size=present.shape, random_state=rng)
    return present + noise / stats.truncnorm.std(-at, at) / mu


def cut_at_2(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    return truncated(rng, present, mu, 2.0)


def cut_at_3(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    return truncated(rng, present, mu, 3.0)


def unclipped(rng: Rng, present: np.ndarray, mu: float) -> np.ndarray:
    """Forget to clip canaries that are 100 times too long, in one step of fifty."""
    lengths = np.where(rng.random((len(present), 1)) < 0.02, 100.0, 1.0)
    return present * lengths + rng.standard_normal(present.shape) / mu


SCORES = {
    "independent": normal,
    "shared distance": same_distance,
    "one shared draw": same_noise,
    "all right or all wrong": mirrored,
    "cut off at 2 sd": cut_at_2,
    "cut off at 3 sd": cut_at_3,
    "unclipped in 1 of 50 steps": unclipped,
}


def coins(rng: Rng, steps: int, canaries: int) -> np.ndarray:
    return rng.random((steps, canaries)) < 0.5


def scores(
    rng: Rng,
    mu: float,
    *,
    kind: str,
    steps: int,
    canaries: int,
    tails: float = 0.1,
    coupled: bool = False,
    raw: bool = False,
) -> float:
    present = coins(rng, steps, canaries)
    values = SCORES[kind](rng, present, mu)
    observations = dpaudit.Observations.from_presence(values, present, normalized=not raw, coupled=coupled)
    betting = dpaudit.Betting(tails=tails)
    return dpaudit.audit(observations, claim=gaussian_claim(mu), inference=betting).bound.parameter


def overlapping(rng: Rng, mu: float, *, canaries: int, dimensions: int, shortest: float, steps: int) -> float:
    """Audit canaries whose gradients overlap and have different lengths, as those of examples do.

    Everything known except the canary itself is subtracted from the release before it is scored: also the
    other canaries that were present.
    """
    recorder = Recorder(claim=gaussian_claim(mu), num_steps=steps, scorer=PerStep(coupled=True))
    directions = rng.standard_normal((canaries, dimensions))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    lengths = rng.uniform(shortest, 1.0, canaries)
    gradients = lengths[:, None] * directions
    for present in coins(rng, steps, canaries):
        release = present @ gradients + rng.standard_normal(dimensions) / mu
        others = present @ gradients - present[:, None] * gradients
        recorder.record(((release - others) * directions).sum(axis=1) / lengths, present)
    return recorder.audit().bound.parameter


def half_present(rng: Rng, mu: float, *, constant: bool, steps: int, canaries: int) -> float:
    """Audit scores without any leak, half of which are always higher; half of the canaries are present."""
    half = np.arange(canaries) < canaries // 2
    present = np.asarray([half if constant else rng.permutation(half) for _ in range(steps)])
    values = half + rng.standard_normal((steps, canaries)) / (2 * mu)
    try:
        observations = dpaudit.Observations.from_presence(values, present, normalized=True)
    except dpaudit.InputError:
        return 0.0  # refused
    return dpaudit.audit(observations, claim=gaussian_claim(mu)).bound.parameter


def opposite_pairs(rng: Rng, mu: float, *, steps: int, canaries: int) -> float:
    """Audit a mechanism that reveals which of two canaries is present, in pairs that each step draws.

    For one example alone its curve is that of mu: with the probability of the total variation it reveals it.
    """
    first = rng.random((steps, canaries // 2)) < 0.5
    present = rng.permuted(np.concatenate([first, ~first], axis=1), axis=1)
    try:
        observations = dpaudit.Observations.from_presence(
            present + 1e-9 * rng.standard_normal(present.shape), present, normalized=True
        )
    except dpaudit.InputError:
        return 0.0  # refused
    return dpaudit.audit(observations, claim=gaussian_claim(mu)).bound.parameter


# Mechanisms that adapt to their past while keeping their curve given the past, recorded step by step.


def adaptive(rng: Rng, mu: float, *, policy: str, steps: int, canaries: int, planned: bool) -> float:
    """Audit a mechanism that chooses how its canaries depend on each other before each step."""
    recorder = Recorder(claim=gaussian_claim(mu), num_steps=steps if planned else None)
    lead = 0.0
    for _ in range(steps):
        present = coins(rng, 1, canaries)
        if policy == "by the live bound":
            live = recorder.live()
            is_bold = live.epsilon < 0.9 * live.claimed_epsilon
        else:
            is_bold = lead < 0
        if policy == "operating point by luck":
            values = _at_point(rng, present, mu, 0.02 if is_bold else float(special.ndtr(-mu / 2)))
        else:
            values = (same_distance if is_bold else normal)(rng, present, mu)
        recorder.record(values[0], present[0])
        lead += 2 * float(((values > 0.5) == present).mean()) - 1 - total_variation(mu)
    return recorder.audit().bound.parameter


def _at_point(rng: Rng, present: np.ndarray, mu: float, fpr: float) -> np.ndarray:
    """Return answers of 0 or 1 with this false positive rate, and the smallest false negative rate."""
    fnr = float(dpaudit.Gaussian().fnr(mu, np.asarray(fpr)))
    return (rng.random(present.shape) < np.where(present, 1 - fnr, fpr)).astype(np.float64)


_RATES = np.concatenate([[0.0], np.geomspace(1e-3, 0.5, 24), 1 - np.geomspace(0.5, 1e-3, 24)[1:], [1.0]])


@cache
def _policy_against_counts(mu: float, num_steps: int) -> np.ndarray:
    """Return, by backward induction, the false positive rate that most often misleads ``JointExact``.

    Indexed by the step and the numbers of false positives and false negatives so far.
    """
    size = num_steps + 1
    value = np.asarray([[_refutes(fp, fn, mu, num_steps) for fn in range(size)] for fp in range(size)], float)
    fnr = dpaudit.Gaussian().fnr(mu, _RATES)
    a, b = _RATES[:, None, None], fnr[:, None, None]
    policy = np.zeros((num_steps, size, size))
    for step in range(num_steps - 1, -1, -1):
        more = np.pad(value, ((0, 1), (0, 1)))
        same, fp, fn, both = more[:-1, :-1], more[1:, :-1], more[:-1, 1:], more[1:, 1:]
        after = (1 - a) * ((1 - b) * same + b * fn) + a * ((1 - b) * fp + b * both)
        policy[step], value = _RATES[after.argmax(axis=0)], after.max(axis=0)
    return policy


def _refutes(fp: int, fn: int, mu: float, num_steps: int) -> bool:
    if fp + fn > num_steps:  # as many errors as pure guessing has
        return False
    return _joint_exact(fp, fn, num_steps) > mu


def _joint_exact(fp: int, fn: int, size: int) -> float:
    counts = dpaudit.ErrorCounts(false_positives=fp, num_absent=size, false_negatives=fn, num_present=size)
    return dpaudit.lower_bound(
        counts, delta=DELTA, tradeoff=dpaudit.Gaussian(), inference=dpaudit.JointExact()
    ).parameter


def against_counts(rng: Rng, mu: float, *, num_steps: int, counted: bool) -> float:
    """Audit pairs of a mechanism that chooses its false positive rate by the errors so far."""
    policy = _policy_against_counts(mu, num_steps)
    recorder = Recorder(claim=gaussian_claim(mu), num_steps=num_steps, scorer=PerStep(paired=True))
    fp = fn = 0
    for step in range(num_steps):
        values = _at_point(rng, np.asarray([False, True]), mu, float(policy[step, fp, fn]))
        fp, fn = fp + int(values[0]), fn + 1 - int(values[1])
        recorder.record(values, [False, True])
    return _joint_exact(fp, fn, num_steps) if counted else recorder.audit().bound.parameter
