"""Batches that were drawn wait in line for the step that uses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import IntArray

__all__ = ["Line"]


@dataclass(frozen=True, eq=False)
class _Batch:
    canaries: IntArray
    size: int  # how many examples


class Line:
    """Finds the batches of a step by the sizes of its backward passes.

    A step may use several batches, and a batch may be split into several passes; only an empty batch makes
    an empty pass. Processes that load examples draw up to ``ahead`` batches that are perhaps never used. With
    ``filled``, an empty batch becomes one of a single made-up example.
    """

    def __init__(self, ahead: int, filled: bool) -> None:
        self._ahead, self._fewest = ahead, int(filled)
        self._waiting: deque[_Batch] = deque()
        self._passes: list[int] = []
        self._ended = True

    def begin(self, pending: list[int]) -> None:
        """An epoch begins, while gradients of ``pending`` passes wait for the next step."""
        self.require_used(pending)
        kept = self._num_used(self._passes + pending) or 0
        self._waiting = deque(list(self._waiting)[:kept])  # the others were drawn, but the loop ended
        self._ended = False

    def add(self, canaries: IntArray, size: int) -> None:
        """One more batch was drawn."""
        self._waiting.append(_Batch(canaries, max(size, self._fewest)))

    def end(self) -> None:
        """The epoch is over; the loop did not break it off."""
        self._ended = True

    def used(self, passes: Iterable[int]) -> None:
        """Backward passes that are clipped now, for this step or a later one."""
        self._passes += passes

    def of_step(self, index: int) -> IntArray:
        """The canaries of all batches that were used since the last step."""
        passes, self._passes = self._passes, []
        if not passes or not self._waiting:
            raise InputError(
                f"Expected a batch of the loader before step {index}, got none: give the loader that the "
                "loop goes over as loader=..., and begin the loop inside of the with block."
            )
        count = self._num_used(passes)
        if count is None:
            raise InputError(
                f"Expected step {index} to use the next batch that the loader drew, of "
                f"{self._waiting[0].size} examples, got gradients of {' + '.join(map(str, passes))}: with "
                "sampling=True the loop has to make a step of every batch, also of an empty one."
            )
        return np.concatenate([self._waiting.popleft().canaries for _ in range(count)])

    def require_used(self, pending: list[int]) -> None:
        """Every batch became part of a step, but for those at the end of a loop that was broken off."""
        left = len(self._waiting) - (self._num_used(self._passes + pending) or 0)
        if left > self._ahead + (not self._ended):
            raise InputError(
                "Expected the loop to make a step of every batch that the loader drew, also of an empty one, "
                f"got {left} batches without: canaries in them did not join any step."
            )

    def _num_used(self, passes: list[int]) -> int | None:
        """How many batches, from the first on, make up exactly these passes; None if none do."""
        rest, count = deque(passes), 0
        for batch in self._waiting:
            if not rest:
                break
            if (batch.size == 0) != (rest[0] == 0):
                return None
            left = batch.size - rest.popleft()
            while left > 0 and rest and rest[0] > 0:
                left -= rest.popleft()
            if left != 0:
                return None
            count += 1
        return None if rest else count
