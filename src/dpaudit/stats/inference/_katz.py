"""Katz's interval for a ratio of rates (Katz et al. 1978), as Lu et al. 2022 use it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import special

from dpaudit.errors import InputError
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._question import Kind, Question
from dpaudit.stats._types import FloatArray, IntArray, at_least_zero
from dpaudit.stats.inference._base import CountInference
from dpaudit.stats.tradeoffs import PureDP

__all__ = ["KatzLog"]


@dataclass(frozen=True)
class KatzLog(CountInference):
    """A normal interval for ln(tpr / fpr) and ln(tnr / fnr). Asymptotic, pure epsilon only.

    A count of zero becomes one half, or the interval would be infinite.
    """

    kind: ClassVar[Kind] = Kind.HEURISTIC

    rank_is_bound: ClassVar[bool] = True

    def check(self, question: Question) -> None:
        if not isinstance(question.tradeoff, PureDP):
            raise InputError(
                "KatzLog bounds a ratio of error rates, which only pure epsilon-DP limits: expected "
                f"tradeoff=PureDP(), got {question.tradeoff!r}."
            )
        if question.delta > 0:
            raise InputError(
                "KatzLog bounds a ratio of error rates, which (eps, delta)-DP does not limit: "
                f"expected delta=0, got delta={question.delta:g}."
            )

    def assumption(self, stepped: bool) -> str:
        return super().assumption(stepped) + ", and many (the interval is asymptotic)"

    def rank(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        z = float(-special.ndtri(question.error / 2))
        absent, present = sizes.num_absent, sizes.num_present
        forward = _log_ratio(present - false_negatives, present, false_positives, absent, z)
        backward = _log_ratio(absent - false_positives, absent, false_negatives, present, z)
        return at_least_zero(np.maximum(forward, backward))

    def limit(
        self,
        false_positives: IntArray,
        false_negatives: IntArray,
        sizes: ErrorCounts,
        question: Question,
    ) -> FloatArray:
        # Below (z / 2)^2 errors one more is better: the interval narrows more than the ratio falls.
        turn = math.ceil(float(special.ndtri(question.error / 2)) ** 2 / 4)
        best = self.rank(false_positives, false_negatives, sizes, question)
        for least in range(1, turn + 2):
            more_fp, more_fn = (np.maximum(n, least) for n in (false_positives, false_negatives))
            best = np.maximum(best, self.rank(more_fp, false_negatives, sizes, question))
            best = np.maximum(best, self.rank(false_positives, more_fn, sizes, question))
        return best


def _log_ratio(hits: IntArray, of: int, misses: IntArray, among: int, z: float) -> FloatArray:
    top, bottom = (np.maximum(n, 0.5) for n in (hits, misses))
    spread = np.sqrt(np.maximum(1 / top - 1 / of, 0) + np.maximum(1 / bottom - 1 / among, 0))
    return np.asarray(np.log(top / of) - np.log(bottom / among) - z * spread)
