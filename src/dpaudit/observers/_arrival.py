"""Whether the canaries that joined a training are to be seen in what it released."""

from __future__ import annotations

import math

from dpaudit.errors import InputError
from dpaudit.stats._types import ScoreArray

__all__ = ["ArrivalError", "Side", "arrives", "require_arrival"]

_ROUNDING = 1e-3  # of a clipping norm
_FEW, _SURELY = 10, 6.0  # scores, and standard errors, from which on a missing canary is certain


class ArrivalError(InputError):
    """Canaries that joined are not to be seen."""

    def __init__(self, message: str, gap: float = 0.0) -> None:
        super().__init__(message)
        self.gap = gap


class Side:
    """Count, mean and variance of the scores of one side, step by step."""

    def __init__(self, scores: ScoreArray | None = None) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0
        if scores is not None:
            self.add(scores)

    def add(self, scores: ScoreArray) -> None:
        """Some more of them."""
        self.count += scores.size
        self._sum += float(scores.sum())
        self._squares += float((scores * scores).sum())

    @property
    def mean(self) -> float:
        """Of all so far."""
        return self._sum / self.count

    @property
    def error(self) -> float:
        """The variance of the mean."""
        return max(self._squares / self.count - self.mean**2, 0.0) / self.count


def arrives(present: Side, absent: Side, signal: float) -> bool:
    """Whether canaries score what clipped ones do, as far as can be told."""
    gap, spread = present.mean - absent.mean, math.sqrt(present.error + absent.error)
    return abs(gap - signal) <= max(_SURELY * spread, _ROUNDING)


def require_arrival(present: Side, absent: Side, signal: float) -> None:
    """A training that drops the canaries hides what it does with the examples."""
    if min(present.count, absent.count) < _FEW:
        return
    gap, spread = present.mean - absent.mean, math.sqrt(present.error + absent.error)
    if gap + _SURELY * spread < signal / 2:
        raise ArrivalError(
            f"Expected scores to rise by {signal:g} where a canary is present, got {gap:.2g}: what "
            "is released does not have the canaries in it that joined the sum, or they were clipped together "
            "with others and not one by one (replay_step shows that), or it is a mean where a sum is "
            "expected. Scores say nothing of it.",
            gap,
        )
