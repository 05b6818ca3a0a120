"""The claim that most specimens make: that of the paper's three violations."""

from __future__ import annotations

from functools import cache

from dpaudit.accounting import Claim
from dpaudit.stats import Gaussian

__all__ = ["DELTA", "EPSILON", "NOISE", "noise_of", "papers_claim"]

DELTA = 1e-5
EPSILON = 1.27


def noise_of(epsilon: float) -> float:
    """The noise multiplier of one Gaussian step with this epsilon."""
    return 1 / Gaussian().with_epsilon(epsilon, DELTA)


NOISE = noise_of(EPSILON)


@cache
def papers_claim() -> Claim:
    """One Gaussian step with epsilon = 1.27."""
    return Claim.gaussian(noise_multiplier=NOISE, delta=DELTA)
