"""The posterior of Zanella-Beguelin et al. 2022, for any trade-off (paper, section 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from scipy import special

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._question import Kind, Question
from dpaudit.stats._search import last_positive
from dpaudit.stats._types import FloatArray, IntArray
from dpaudit.stats.inference._base import CountInference
from dpaudit.stats.inference._surrogate import surrogate
from dpaudit.stats.tradeoffs import TradeOff

__all__ = ["Posterior"]

_NODES = 200


@dataclass(frozen=True)
class Posterior(CountInference):
    """The largest parameter whose region of error rates holds at most half the error of the posterior.

    Jeffreys priors on both rates. A statement about that posterior, not a confidence bound: it reports
    some leak for any data at all.
    """

    kind: ClassVar[Kind] = Kind.CREDIBLE

    def parameter(self, counts: ErrorCounts, question: Question) -> float:
        fp, fn = np.asarray(counts.false_positives), np.asarray(counts.false_negatives)
        # what chance alone makes of data without a leak, if the stand-in sees none
        least = 0.05 / math.sqrt(min(counts.num_absent, counts.num_present))
        guess = max(float(self.rank(fp, fn, counts, question)), least)
        mass = _RegionMass(counts, question.tradeoff)
        return last_positive(lambda p: question.error / 2 - mass(p), guess, tolerance=1e-6)

    def rank(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        return surrogate(false_positives, false_negatives, sizes, question.tradeoff, question.error / 2)


class _RegionMass:
    """Posterior probability of {f(fpr) <= fnr <= 1 - f(1 - fpr)}, as an integral over one rate.

    In quantile space the outer rate has density one, so that Gauss-Legendre nodes need no weights of
    their own, and nothing is lost where the density is infinite (no errors at all). The region is
    symmetric, so either rate may be the outer one; the one with the narrower posterior makes the
    integrand smooth.
    """

    def __init__(self, counts: ErrorCounts, tradeoff: TradeOff) -> None:
        one = (counts.false_positives, counts.num_absent)
        other = (counts.false_negatives, counts.num_present)
        if _probit_variance(*one) > _probit_variance(*other):
            one, other = other, one
        nodes, self._weights = _quantile_nodes()
        self._tradeoff = tradeoff
        self._outer = special.betaincinv(one[0] + 0.5, one[1] - one[0] + 0.5, nodes)
        self._outer_rest = special.betaincinv(one[1] - one[0] + 0.5, one[0] + 0.5, 1 - nodes)
        self._inner = (other[0] + 0.5, other[1] - other[0] + 0.5)

    def __call__(self, parameter: float) -> float:
        low = self._tradeoff.fnr(parameter, self._outer)
        high = self._tradeoff.fnr(parameter, self._outer_rest)  # from the top: 1 - fnr is this
        a, b = self._inner
        inside = 1 - special.betainc(a, b, low) - special.betainc(b, a, high)
        return float(self._weights @ np.maximum(inside, 0.0))


def _probit_variance(errors: int, trials: int) -> float:
    rate = (errors + 0.5) / (trials + 1)
    height = math.exp(-(float(special.ndtri(rate)) ** 2) / 2)
    return rate * (1 - rate) / (trials * height**2)


@lru_cache(maxsize=1)
def _quantile_nodes() -> tuple[FloatArray, FloatArray]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return (nodes + 1) / 2, weights / 2
