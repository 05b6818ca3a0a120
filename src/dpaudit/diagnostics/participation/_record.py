"""What is kept of the batches of all steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.diagnostics._exact import chance
from dpaudit.diagnostics._kept_steps import KeptSteps
from dpaudit.errors import InputError
from dpaudit.stats._types import IntArray

__all__ = ["ParticipationRecord"]

_WATCHED = 1024  # examples of which every step is kept


class ParticipationRecord:
    """Batch sizes, how often each example took part, overlaps, and who of some examples was in each step."""

    def __init__(self) -> None:
        self.num_examples = 0
        self.sizes: list[int] = []
        self.counts: IntArray
        """In how many batches each example was."""
        self.num_repeated = 0
        """How often an example was in one batch more than once."""
        self.overlaps: list[int] = []
        """How many examples of each batch were in the one before, too."""
        self.watched: IntArray
        self.presences = KeptSteps()
        self._last: IntArray | None = None

    @property
    def num_steps(self) -> int:
        """How many batches were observed."""
        return len(self.sizes)

    @property
    def has_members(self) -> bool:
        """Whether it is known who was in the batches, not only how many."""
        return self._last is not None

    def observe(self, indices: Any, num_examples: int) -> None:
        """The places, from 0 on, of the examples of one batch in a data set of so many."""
        if self.num_steps and not self.has_members:
            raise InputError("Expected the size of the batch, as in the steps before, got its examples.")
        members = _members(indices, self._require_same(num_examples))
        is_in = np.zeros(self.num_examples, dtype=np.bool_)  # a mask is faster than sets are
        is_in[members] = True
        unique = np.flatnonzero(is_in)
        if self._last is None:
            self._start()
        else:
            self.overlaps.append(int(np.count_nonzero(is_in[self._last])))
        self.num_repeated += members.size - unique.size
        self.counts[unique] += 1
        self.sizes.append(unique.size)
        self.presences.add(is_in[self.watched])
        self._last = unique

    def observe_size(self, size: int, num_examples: int) -> None:
        """The size of one batch, where nothing else is known."""
        if self.has_members:
            raise InputError("Expected the examples of the batch, as in the steps before, got its size.")
        largest = self._require_same(num_examples)
        if _validate.whole("size", size, 0) > largest:
            raise InputError(f"Expected size={size} to be at most num_examples={largest}.")
        self.sizes.append(int(size))

    def _require_same(self, num_examples: int) -> int:
        _validate.whole("num_examples", num_examples)
        if self.num_steps and num_examples != self.num_examples:
            raise InputError(
                f"Expected num_examples={num_examples} to be {self.num_examples}, as in the steps before."
            )
        self.num_examples = int(num_examples)
        return self.num_examples

    def _start(self) -> None:
        self.counts = np.zeros(self.num_examples, dtype=np.int64)
        self.watched = np.sort(chance(3).permutation(self.num_examples)[:_WATCHED])

    def state_dict(self) -> dict[str, Any]:
        """All that was kept."""
        state = {
            "num_examples": self.num_examples,
            "sizes": list(self.sizes),
            "has_members": self.has_members,
        }
        if not self.has_members:
            return state
        return state | {
            "counts": self.counts.copy(),
            "num_repeated": self.num_repeated,
            "overlaps": list(self.overlaps),
            "presences": self.presences.state_dict(),
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self.num_examples = state["num_examples"]
        self.sizes = list(state["sizes"])
        if not state["has_members"]:
            return
        self._start()
        self.counts = state["counts"].copy()
        self.num_repeated = state["num_repeated"]
        self.overlaps = list(state["overlaps"])
        self.presences.load_state_dict(state["presences"])
        self._last = state["last"]


def _members(indices: Any, num_examples: int) -> IntArray:
    members = np.asarray(indices)
    if members.ndim != 1 or (members.size and members.dtype.kind not in "iu"):
        raise InputError(
            f"Expected indices as a vector of whole numbers, got shape {members.shape} of {members.dtype}."
        )
    outside = (members < 0) | (members >= num_examples)
    if outside.any():
        raise InputError(
            f"Expected indices from 0 to {num_examples - 1}, got {members[int(np.argmax(outside))]}."
        )
    return members.astype(np.int64)
