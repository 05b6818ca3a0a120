"""How often a bound exceeds the truth, simulated with mechanisms that attain their own curve."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpaudit import Inference, Observations, ThresholdRule, TradeOff, lower_bound


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Statistics of repeated audits of a mechanism with a known parameter."""

    repetitions: int
    exceeded: float  # the fraction of bounds above the truth
    mean_ratio: float  # the mean of bound / truth; the mean bound where the truth is 0

    @property
    def standard_error(self) -> float:
        """The standard error of ``exceeded``."""
        return math.sqrt(self.exceeded * (1 - self.exceeded) / self.repetitions)

    def is_sound(self, confidence: float) -> bool:
        """Return whether the fraction is at most 1 - confidence, up to three standard errors."""
        error = 1 - confidence
        return self.exceeded <= error + 3 * math.sqrt(error * (1 - error) / self.repetitions)


def ideal_observations(
    tradeoff: TradeOff,
    parameter: float,
    num_absent: int | tuple[int, int],
    num_present: int | tuple[int, int],
    rng: np.random.Generator,
) -> Observations:
    """Return normalized scores of the best attack on a mechanism with this curve; 1/2 is the midpoint.

    Up to its scale, the score of the best attack is the smallest false positive rate at which it
    guesses "present". For absent canaries this rate is uniform; for present ones it is at most x with
    probability 1 - f(x), so f of a uniform number has the same distribution (f is its own inverse).
    """
    middle = 0.5 + tradeoff.balanced_error(parameter)
    present = tradeoff.fnr(parameter, rng.random(num_present))
    return Observations(
        with_canary=middle - present, without_canary=middle - rng.random(num_absent), normalized=True
    )


def coverage(
    *,
    tradeoff: TradeOff,
    parameter: float,
    size: int | tuple[int, int],
    inference: Inference,
    threshold: ThresholdRule,
    delta: float = 1e-5,
    confidence: float = 0.95,
    repetitions: int = 1000,
    seed: int = 0,
) -> Coverage:
    """Audit an ideal mechanism of the family repeatedly; ``size`` is per side, or (steps, canaries)."""
    family = tradeoff.at(delta)

    def one(rng: np.random.Generator) -> float:
        observations = ideal_observations(family, parameter, size, size, rng)
        return lower_bound(
            observations,
            delta=delta,
            confidence=confidence,
            tradeoff=tradeoff,
            inference=inference,
            threshold=threshold,
        ).parameter

    return tally(one, parameter, repetitions, seed)


def tally(one: Callable[[np.random.Generator], float], truth: float, repetitions: int, seed: int) -> Coverage:
    """Repeat ``one``, each time with a separate RNG, and compare the bounds with the truth."""
    seeds = np.random.SeedSequence(seed).spawn(repetitions)
    bounds = np.asarray([one(np.random.default_rng(child)) for child in seeds])
    # a bound equal to the truth is correct, but rounding may lift it slightly above
    exceeded = float((bounds > truth * (1 + 1e-9)).mean())
    ratio = float(bounds.mean() / truth) if truth > 0 else float(bounds.mean())
    return Coverage(repetitions=repetitions, exceeded=exceeded, mean_ratio=ratio)
