"""Some numbers of every step, in bounded memory."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from dpaudit.stats._types import IntArray

__all__ = ["KeptSteps"]

_HALF = 2048


class KeptSteps:
    """The rows of the first and of the last 2,048 steps; of all steps, if there are no more."""

    def __init__(self) -> None:
        self._head: list[npt.NDArray[Any]] = []
        self._tail: deque[npt.NDArray[Any]] = deque(maxlen=_HALF)
        self.num_seen = 0

    def add(self, row: npt.NDArray[Any]) -> None:
        """The row of the next step."""
        if len(self._head) < _HALF:
            self._head.append(row)
        else:
            self._tail.append(row)
        self.num_seen += 1

    @property
    def steps(self) -> IntArray:
        """The number of the step of each row."""
        first = self.num_seen - len(self._tail)
        return np.concatenate([np.arange(len(self._head)), np.arange(first, self.num_seen)])

    @property
    def rows(self) -> npt.NDArray[Any]:
        """All that is kept: steps x numbers."""
        return np.stack([*self._head, *self._tail])

    def state_dict(self) -> dict[str, Any]:
        """What is kept, in few arrays, which are written fast; give it to ``load_state_dict``."""
        return {"head": np.asarray(self._head), "tail": np.asarray(self._tail), "num_seen": self.num_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self._head = list(state["head"])
        self._tail = deque(state["tail"], maxlen=_HALF)
        self.num_seen = state["num_seen"]
