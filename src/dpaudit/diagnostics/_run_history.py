"""The earlier phases of a training run: what they left behind, in this process or in a state.

A training run may be observed in several ``with`` blocks, with several optimizers, or be resumed. Its phases
are recognized by their weights: one that begins exactly where another ended, after updates, continues it.
Code that is run again with the same random seed begins elsewhere, and is another training run, whose noise
may be the same. :class:`RunHistory` compares noise across phases, and hands on what observers leave.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.diagnostics._p_values import CheckResults, Finding
from dpaudit.diagnostics._step import ClaimedStep, ObservedStep

_MOST_PHASES, _MOST_ROWS = 64, 1024  # that are remembered
_END_STEPS, _WIDTH = 64, 64  # of a phase: how many steps at each end, and coordinates of their noise
# Directions of independent noise at 16 coordinates have a larger cosine with probability 1e-21, so that any
# of 1,024 rows and 100,000 steps do with probability 1e-13; the same noise in bfloat16 has more than 0.9999.
_SAME, _FEWEST = 0.999, 16

_Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class _Phase:
    """The end of a run and of those that it continues: directions of noise, and what observers left."""

    noise: _Rows
    left: tuple[Any, ...]


class RunHistory:
    """The noise of earlier phases of the same training run, which this phase must not repeat.

    A phase that seeds the random numbers like an earlier one has its noise, although its sums differ: the
    difference of two releases then has none.
    """

    _phases: ClassVar[dict[bytes, _Phase]] = {}  # of this process, by digests of their last weights

    def __init__(self) -> None:
        self.earlier: tuple[Any, ...] = ()
        """What observers of earlier phases passed to :meth:`end`."""
        self._noise: _Rows = np.zeros((0, 0), np.float32)  # of earlier phases
        self._first, self._last = list[_Rows](), deque[_Rows](maxlen=_END_STEPS)
        self._num_steps, self._repeated = 0, list[int]()
        self._start: bytes | None = None

    def observe(self, step: ObservedStep) -> None:
        """Compare the noise of a step with that of earlier phases."""
        if self._start is None and step.weights is not None:
            self._start = _digest(step.weights)
            if (phase := self._phases.get(self._start)) is not None:
                self.earlier, self._noise = phase.left, _joined(self._noise, phase.noise)
        if step.noise is not None:
            self._compare(np.asarray(step.noise, dtype=np.float64))
        self._num_steps += 1

    def _compare(self, noise: FloatArray) -> None:
        chosen = noise[:: max(1, noise.size // _WIDTH)][:_WIDTH]
        length = float(np.linalg.norm(chosen))
        if chosen.size < _FEWEST or not 0 < length < np.inf:
            return
        row = (chosen / length).astype(np.float32)
        if self._noise.shape[1] == row.size and (np.abs(self._noise @ row) > _SAME).any():
            self._repeated.append(self._num_steps)
        (self._first if len(self._first) < _END_STEPS else self._last).append(row)

    def end(self, weights: Any, left: Any = None) -> None:
        """End the run with these weights; ``left`` is handed on to a run that continues it.

        ``weights`` are at the coordinates, and in the units, of those of the steps.
        """
        end = _digest(weights)
        if self._start in (None, end):  # nothing was trained
            return
        self._phases.pop(end, None)
        self._phases[end] = _Phase(self._rows(), (*self.earlier, left))
        while len(self._phases) > _MOST_PHASES:
            del self._phases[next(iter(self._phases))]

    def _rows(self) -> _Rows:
        rows = [*self._first, *self._last]
        return _joined(self._noise, np.stack(rows)) if rows else self._noise

    def state_dict(self) -> dict[str, Any]:
        """Return the noise so far, for a run that continues this one in another process."""
        return {
            "noise": self._rows(),
            "num_steps": self._num_steps,
            "repeated": list(self._repeated),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the run of a ``state_dict``."""
        with _validate.state_dict_errors("the noise of earlier phases", state):
            self._noise = np.array(state["noise"], dtype=np.float32)
            self._first, self._last = [], deque(maxlen=_END_STEPS)
            self._num_steps = _validate.integer("num_steps", state["num_steps"], low=0)
            self._repeated = list(map(int, state["repeated"]))

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return a finding if noise was seen before."""
        del claimed
        if not self._repeated:
            return CheckResults()
        sentence = (
            f"{len(self._repeated)} of {self._num_steps} steps, the first of them step {self._repeated[0]}, "
            "have noise of an earlier phase of this training run."
        )
        return CheckResults(certain=(Finding.certain("earlier-noise", sentence),))


def _joined(noise: _Rows, more: _Rows) -> _Rows:
    """Return the latest rows of both; rows of another number of coordinates are dropped."""
    if noise.shape[1] != more.shape[1]:
        return more
    return np.concatenate([noise, more])[-_MOST_ROWS:]


def _digest(weights: Any) -> bytes:
    return hashlib.blake2b(np.asarray(weights, dtype=np.float64).tobytes(), digest_size=16).digest()
