"""A search for noise, whose answer is accounted again."""

from __future__ import annotations

import numpy as np

from dpaudit.accounting import Claim, noise_for_epsilon
from dpaudit.accounting._pld import epsilon_below
from dpaudit.zoo._evidence import Evidence, Replay
from dpaudit.zoo.specimens._claim import DELTA

__all__ = ["calibration"]

_RATE, _STEPS = 0.01, 1000


def _too_small(epsilon: float) -> float:
    """Halves an interval until it is short, and returns the end that has too little noise."""
    low, high = 0.3, 10.0
    while high - low > 0.02:
        middle = (low + high) / 2
        claim = Claim.dpsgd(noise_multiplier=middle, sample_rate=_RATE, num_steps=_STEPS, delta=DELTA)
        low, high = (middle, high) if claim.epsilon > epsilon else (low, middle)
    return low


def calibration(is_broken: bool, seed: int) -> Evidence:
    """Noise for some epsilon from 1 to 4, and the epsilon that it has."""
    asked = round(float(np.random.default_rng(seed).uniform(1, 4)), 3)
    if is_broken:
        noise = _too_small(asked)
    else:
        noise = noise_for_epsilon(asked, sample_rate=_RATE, num_steps=_STEPS, delta=DELTA)
    found = epsilon_below(noise, _RATE, _STEPS, DELTA)
    replay = Replay(
        f"Asked for epsilon = {asked:g}, a noise multiplier of {noise:.4g} was found, which has {found:.4g}.",
        found > asked,
    )
    return Evidence(claim=Claim.approximate_dp(epsilon=asked, delta=DELTA), num_steps=1, replay=replay)
