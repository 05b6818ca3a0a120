"""One training of a black-box audit, before it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

__all__ = ["Group", "Scorer", "Trial"]

_BRANCH = 2  # of the run's seed; the first is the audit's own


@dataclass(frozen=True)
class Trial:
    """What a training needs to know of itself; everything else of it follows from its seed."""

    number: int
    seed: int
    """128 bits: all chance of this trial comes from it."""
    present: bool
    """Whether the canary is in its data: in every second trial, so that any share of them is balanced."""

    @classmethod
    def of(cls, seed: int, number: int) -> Trial:
        """The trial of this number in a run with this seed.

        >>> Trial.of(1, 0).present, Trial.of(1, 1).present, Trial.of(1, 0) == Trial.of(1, 0)
        (False, True, True)
        """
        words = np.random.SeedSequence(seed, spawn_key=(_BRANCH, number)).generate_state(4, np.uint32)
        return cls(number, int.from_bytes(words.astype("<u4").tobytes(), "little"), number % 2 == 1)


Group: TypeAlias = tuple[Trial, ...]


class Scorer(Protocol):
    """Trains a model for each trial and gives the canary's score in each of them."""

    def __call__(self, trials: Sequence[Trial], /) -> Sequence[float]: ...
