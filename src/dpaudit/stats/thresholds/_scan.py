"""Going through all thresholds without looking at each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Question
from dpaudit.stats._types import FloatArray, IntArray, ScoreArray
from dpaudit.stats.inference import CountInference

__all__ = ["Staircase"]

_FIRST = 256  # places of the first look
_SPLIT = 8  # parts into which a block that may hold the best threshold is cut


@dataclass(frozen=True)
class Staircase:
    """The errors at every threshold that is an absent score; no other threshold can be better.

    (Between two absent scores a higher threshold only adds false negatives.)
    """

    absent: ScoreArray
    present: ScoreArray
    sizes: ErrorCounts

    @classmethod
    def of(cls, observations: Observations) -> Staircase:
        """Sort both sides, once."""
        observations = observations.in_memory()
        absent = np.sort(observations.without_canary, axis=None)
        present = np.sort(observations.with_canary, axis=None)
        return cls(absent, present, ErrorCounts.perfect(absent.size, present.size))

    def errors(self, places: IntArray) -> tuple[IntArray, IntArray]:
        """False positives and false negatives at the absent scores of these ranks."""
        thresholds = self.absent[places]
        return (
            self.absent.size - np.searchsorted(self.absent, thresholds, side="right"),
            np.searchsorted(self.present, thresholds, side="right"),
        )

    def best(self, inference: CountInference, question: Question) -> int:
        """The rank of the best threshold, by branch and bound.

        Along the staircase false positives fall and false negatives grow, so a block of thresholds is
        no better than the fewest of both at its ends. Blocks that cannot beat the best are dropped.
        """
        places = np.unique(np.linspace(0, self.absent.size - 1, _FIRST).astype(np.int64))
        best_place, best_value = int(places[-1]), -np.inf
        starts, ends = places[:-1], places[1:]
        fresh = places
        while True:
            values = self._rank(fresh, fresh, inference, question)
            top = int(values.argmax())
            if values[top] > best_value:
                best_place, best_value = int(fresh[top]), float(values[top])
            keep = ends - starts > 1
            starts, ends = starts[keep], ends[keep]
            keep = self._rank(ends, starts, inference, question) > best_value
            starts, ends = starts[keep], ends[keep]
            if not starts.size:
                return best_place
            cuts = _cut(starts, ends)
            starts, ends = cuts[:, :-1].reshape(-1), cuts[:, 1:].reshape(-1)
            fresh = np.unique(cuts[:, 1:-1])

    def _rank(
        self,
        fewest_fp: IntArray,
        fewest_fn: IntArray,
        inference: CountInference,
        question: Question,
    ) -> FloatArray:
        if not fewest_fp.size:
            return np.empty(0)
        fp, fn = self.errors(fewest_fp)[0], self.errors(fewest_fn)[1]
        return inference.rank(fp, fn, self.sizes, question)


def _cut(starts: IntArray, ends: IntArray) -> IntArray:
    """The ends of the parts of each block, a row a block; short blocks repeat an end."""
    shares = np.arange(_SPLIT + 1)
    return starts[:, None] + (ends - starts)[:, None] * shares // _SPLIT
