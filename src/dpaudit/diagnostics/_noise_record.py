"""Statistics of the noise of all steps that the noise tests need, in bounded memory.

``NoiseRecord`` holds them; its ``Layout`` defines which coordinates of a gradient are kept, and to which leaf
(parameter) each belongs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics._p_values import RESOLUTION, HeadTailBuffer, fixed_rng, sure_signs
from dpaudit.errors import InputError

Leaves = Mapping[str, int] | Sequence[int]
"""The sizes of the parameters that a gradient consists of, in order, with their names if they have any."""

_MAX_COORDINATES = 2**20  # coordinates kept for a large model
_PREFIX = 256  # leading coordinates of each leaf that are compared with those of other leaves
_MAX_COMPARED = 64  # leaves that are compared with each other
_SKETCH = 512  # coordinates that are kept for every step
# attributes of a record that its state holds unchanged
_SUMS = ("energies", "step_energies", "sum_energy", "agreeing", "differing", "resolution")


class NoiseRecord:
    """Summary of the noise of a training run: sums over all steps, and a few coordinates of every step.

    It needs no more memory than a few gradients.
    """

    def __init__(self) -> None:
        self.layout: Layout
        self.energies: FloatArray
        """The sum of squares of each coordinate."""
        self.step_energies: list[float] = []
        """The sum of squares of each step."""
        self.sum_energy = 0.0
        """The squared sum of signs of each leaf in each step, over the leaf's size, summed."""
        self.agreeing: FloatArray
        """For each pair of leaves, how many signs of their leading coordinates agree."""
        self.differing: FloatArray
        """For each pair of leaves, how many differ; the remaining numbers are too small to have a sign."""
        self.resolution = RESOLUTION
        """The largest rounding error of a number."""
        self.sketches = HeadTailBuffer()

    @property
    def num_steps(self) -> int:
        """The number of observed steps."""
        return len(self.step_energies)

    @property
    def count(self) -> int:
        """The number of noise values in ``energy``."""
        return self.num_steps * self.energies.size

    @property
    def energy(self) -> float:
        """The sum of all squares."""
        return float(sum(self.step_energies))

    def observe(self, residual: Any, leaves: Leaves | None = None, rounding: float = 0.0) -> None:
        """Add the noise of one step and its rounding error, in claimed standard deviations."""
        vector = np.asarray(residual)
        self._require_consistent(vector, leaves)
        if self.num_steps == 0:
            self._start(Layout.of(vector.size, leaves))
        layout = self.layout
        noise = np.asarray(vector if layout.kept is None else vector[layout.kept], dtype=np.float64)
        squares = noise * noise
        energy = float(squares.sum())
        if not np.isfinite(energy):
            index = int(np.argmax(~np.isfinite(squares)))
            raise InputError(
                f"Expected finite noise in step {self.num_steps}, got {noise[index]} at coordinate "
                f"{layout.coordinate(index)}: did training diverge?"
            )
        self.resolution = max(self.resolution, rounding)
        self.energies += squares
        self.step_energies.append(energy)
        signs = sure_signs(noise, max(RESOLUTION, rounding))
        self._add_sums(signs)
        self._add_pairs(signs)
        self.sketches.add(noise[layout.sketch].astype(np.float32))

    def _require_consistent(self, vector: Any, leaves: Leaves | None) -> None:
        expected = self.layout.num_parameters if self.num_steps else vector.size
        if vector.ndim != 1 or vector.size != expected or vector.size == 0 or vector.dtype.kind not in "fiu":
            raise InputError(
                f"Expected the noise of step {self.num_steps} as a vector of {expected or 'some'} numbers, "
                f"got shape {vector.shape} of {vector.dtype}."
            )
        if self.num_steps and leaves is not None and not self.layout.is_like(leaves):
            raise InputError(f"Expected the same leaves in step {self.num_steps} as in the first step.")

    def _start(self, layout: Layout) -> None:
        self.layout = layout
        self.energies = np.zeros(int(layout.sizes.sum()))
        self.agreeing = np.zeros((layout.compared.size, layout.compared.size))
        self.differing = self.agreeing.copy()

    def _add_sums(self, signs: FloatArray) -> None:
        starts, sizes = self.layout.starts, self.layout.sizes
        unsure = sizes - np.add.reduceat(np.abs(signs), starts)
        sums = np.maximum(np.abs(np.add.reduceat(signs, starts)) - unsure, 0.0)
        self.sum_energy += float((sums**2 / sizes).sum())

    def _add_pairs(self, signs: FloatArray) -> None:
        if self.layout.compared.size > 1:
            heads = self.layout.heads
            values = np.where(heads >= 0, signs[heads], 0.0)
            sure, product = np.abs(values) @ np.abs(values).T, values @ values.T
            self.agreeing += (sure + product) / 2
            self.differing += (sure - product) / 2

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        if self.num_steps == 0:
            return {}
        return {
            "num_parameters": self.layout.num_parameters,
            "leaves": dict(self.layout.leaves),
            **{name: copy(getattr(self, name)) for name in _SUMS},
            "sketches": self.sketches.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        if not state:
            return
        self._start(Layout.of(state["num_parameters"], state["leaves"]))
        for name in _SUMS:
            setattr(self, name, copy(state[name]))
        self.sketches.load_state_dict(state["sketches"])


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept coordinates: all, or for a large model the first of each leaf and a random sample."""

    num_parameters: int
    leaves: tuple[tuple[str, int], ...]
    kept: IntArray | None
    """The coordinates of the gradient that are kept; None for all."""
    starts: IntArray
    """The start of each leaf among the kept coordinates."""
    sizes: IntArray
    """The number of kept coordinates of each leaf."""
    sketch: IntArray
    """The coordinates, among those kept, that are kept for every step."""
    compared: IntArray
    """The leaves that are compared with each other."""
    heads: IntArray
    """Their leading kept coordinates: leaves x coordinates, -1 beyond the end of a short leaf."""

    @classmethod
    def of(cls, num_parameters: int, leaves: Leaves | None) -> Layout:
        """Lay out gradients of this length, split into these leaves; None means a single leaf."""
        named = _named(leaves, num_parameters)
        lengths = np.array([size for _, size in named], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        kept = _choose(offsets, lengths)
        coordinates = np.arange(num_parameters) if kept is None else kept
        starts = np.searchsorted(coordinates, offsets)
        sizes = np.diff(np.append(starts, coordinates.size))
        compared = np.unique(np.linspace(0, len(named) - 1, min(len(named), _MAX_COMPARED)).astype(np.int64))
        sketch = fixed_rng(1).permutation(coordinates.size)[:_SKETCH]
        return cls(
            num_parameters=num_parameters,
            leaves=named,
            kept=kept,
            starts=starts,
            sizes=sizes,
            sketch=np.sort(sketch),
            compared=compared,
            heads=_heads(starts[compared], sizes[compared]),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves."""
        return tuple(name for name, _ in self.leaves)

    def coordinate(self, index: int) -> int:
        """Return the coordinate of the gradient that is kept at this index."""
        return index if self.kept is None else int(self.kept[index])

    def is_like(self, leaves: Leaves) -> bool:
        """Return whether gradients with these leaves have this layout."""
        return _named(leaves, self.num_parameters) == self.leaves


def _named(leaves: Leaves | None, num_parameters: int) -> tuple[tuple[str, int], ...]:
    if leaves is None:
        return (("all", num_parameters),)
    pairs = leaves.items() if isinstance(leaves, Mapping) else ((str(i), n) for i, n in enumerate(leaves))
    named = tuple((name, _validate.whole(f"the size of leaf {name}", size, 0)) for name, size in pairs)
    total = sum(size for _, size in named)
    if total != num_parameters:
        raise InputError(f"Expected leaves with {num_parameters} coordinates in total, got {total}.")
    return tuple((name, size) for name, size in named if size > 0)


def _choose(offsets: IntArray, lengths: IntArray) -> IntArray | None:
    total = int(lengths.sum())
    if total <= _MAX_COORDINATES:
        return None
    most = max(1, min(_PREFIX, _MAX_COORDINATES // (2 * lengths.size)))
    firsts = [np.arange(start, start + min(size, most)) for start, size in zip(offsets, lengths, strict=True)]
    others = fixed_rng(2).choice(total, size=_MAX_COORDINATES // 2, replace=False, shuffle=False)
    return np.unique(np.concatenate([*firsts, others]))


def _heads(starts: IntArray, sizes: IntArray) -> IntArray:
    width = int(min(_PREFIX, sizes.max()))
    steps = np.arange(width)
    return np.where(steps < sizes[:, None], starts[:, None] + steps, -1)
