"""Going through all thresholds without looking at each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Question
from dpaudit.stats._types import BoolArray, IntArray, ScoreArray
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
        search = _Search(self, inference, question)
        places = np.unique(np.linspace(0, self.absent.size - 1, _FIRST).astype(np.int64))
        starts, ends = places[:-1], places[1:]
        search.look_at(places)
        while starts.size:
            keep = search.could_be_better(ends, starts) & (ends - starts > 1)
            cuts = _cut(starts[keep], ends[keep])
            starts, ends = cuts[:, :-1].reshape(-1), cuts[:, 1:].reshape(-1)
            search.look_at(np.unique(cuts[:, 1:-1]))
        return search.place


class _Search:
    """The best place so far."""

    def __init__(self, stairs: Staircase, inference: CountInference, question: Question) -> None:
        self._stairs, self._inference, self._question = stairs, inference, question
        self.place, self._value = stairs.absent.size - 1, -np.inf

    def look_at(self, places: IntArray) -> None:
        """Take the best of these places, if it is better. Ranks are dear: only of those in question."""
        if not places.size:
            return
        fp, fn = self._stairs.errors(places)
        limits = self._inference.limit(fp, fn, self._stairs.sizes, self._question)
        for chosen in (limits == limits.max(), limits > self._value):
            # the first choice, which is small, raises the bar for the second
            self._rank(places[chosen & (limits > self._value)])

    def _rank(self, places: IntArray) -> None:
        if not places.size:
            return
        errors = self._stairs.errors(places)
        values = self._inference.rank(*errors, self._stairs.sizes, self._question)
        top = int(values.argmax())
        if values[top] > self._value:
            self.place, self._value = int(places[top]), float(values[top])

    def could_be_better(self, fewest_fp: IntArray, fewest_fn: IntArray) -> BoolArray:
        """Whether a block with these ends may hold a better place than the best."""
        fp, fn = self._stairs.errors(fewest_fp)[0], self._stairs.errors(fewest_fn)[1]
        limits = self._inference.limit(fp, fn, self._stairs.sizes, self._question)
        return np.asarray(limits > self._value)


def _cut(starts: IntArray, ends: IntArray) -> IntArray:
    """The ends of the parts of each block, a row a block; short blocks repeat an end."""
    shares = np.arange(_SPLIT + 1)
    return starts[:, None] + (ends - starts)[:, None] * shares // _SPLIT
