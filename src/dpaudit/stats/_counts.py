"""How often an attack was wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._chunks import chunks, require_finite
from dpaudit.stats._observations import Observations
from dpaudit.stats._types import ScoreArray

__all__ = ["ErrorCounts", "count"]


@dataclass(frozen=True, kw_only=True)
class ErrorCounts:
    """Errors of the rule "present if score > threshold".

    >>> counts = ErrorCounts(false_positives=3, num_absent=100, false_negatives=8, num_present=200)
    >>> counts.fpr, counts.fnr
    (0.03, 0.04)
    """

    false_positives: int
    num_absent: int
    false_negatives: int
    num_present: int

    def __post_init__(self) -> None:
        for errors, of in (("false_positives", "num_absent"), ("false_negatives", "num_present")):
            number = _validate.whole(of, getattr(self, of))
            if _validate.whole(errors, getattr(self, errors), low=0) > number:
                raise InputError(f"Expected {errors}={getattr(self, errors)} to be at most {of}={number}.")

    @classmethod
    def perfect(cls, num_absent: int, num_present: int) -> ErrorCounts:
        """What an attack that is never wrong would count."""
        return cls(false_positives=0, num_absent=num_absent, false_negatives=0, num_present=num_present)

    @property
    def fpr(self) -> float:
        """The share of absent scores that were called present."""
        return self.false_positives / self.num_absent

    @property
    def fnr(self) -> float:
        """The share of present scores that were called absent."""
        return self.false_negatives / self.num_present

    def to_dict(self) -> dict[str, int]:
        """Plain values for JSON."""
        return asdict(self)


def count(observations: Observations, threshold: float) -> ErrorCounts:
    """Count the errors at one threshold, in one pass and in bounded memory."""
    absent, present = observations.without_canary, observations.with_canary
    return ErrorCounts(
        false_positives=_above("without_canary", absent, threshold),
        num_absent=absent.size,
        false_negatives=present.size - _above("with_canary", present, threshold),
        num_present=present.size,
    )


def _above(name: str, scores: ScoreArray, threshold: float) -> int:
    # A Python float keeps float32 scores float32: no copy in double precision. The threshold is then
    # rounded to float32 as well, to the scores' own precision.
    above = 0
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        above += int(np.count_nonzero(piece > threshold))
    return above
