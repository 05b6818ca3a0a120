"""Which coordinates of a gradient are looked at, and which leaf each belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpaudit import _validate
from dpaudit.diagnostics._exact import chance
from dpaudit.errors import InputError
from dpaudit.stats._types import IntArray

__all__ = ["Layout", "Leaves"]

Leaves = Mapping[str, int] | Sequence[int]

_MOST = 2**20  # coordinates that are kept of a large model
_PREFIX = 256  # coordinates of each leaf that are compared with those of other leaves
_COMPARED = 64  # leaves that are compared
_SKETCH = 512  # coordinates of which every step is kept


@dataclass(frozen=True, eq=False)
class Layout:
    """All coordinates of a small model; of a large one the first of each leaf and a random choice."""

    num_parameters: int
    leaves: tuple[tuple[str, int], ...]
    kept: IntArray | None
    """Which coordinates of the gradient; None: all."""
    names: tuple[str, ...]
    starts: IntArray
    """Where each leaf begins among the kept coordinates."""
    sizes: IntArray
    """How many of each leaf are kept."""
    sketch: IntArray
    """Where those coordinates are of which every step is kept."""
    compared: IntArray
    """Leaves that are compared with each other."""
    heads: IntArray
    """Where their first coordinates are: leaves x places, -1 behind the end of a short leaf."""

    @classmethod
    def of(cls, num_parameters: int, leaves: Leaves | None) -> Layout:
        """For gradients of this length, cut into these leaves; without them, the gradient is one."""
        named = _named(leaves, num_parameters)
        lengths = np.array([size for _, size in named], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        kept = _choose(offsets, lengths)
        places = np.arange(num_parameters) if kept is None else kept
        starts = np.searchsorted(places, offsets)
        sizes = np.diff(np.append(starts, places.size))
        compared = np.unique(np.linspace(0, len(named) - 1, min(len(named), _COMPARED)).astype(np.int64))
        sketch = chance(1).permutation(places.size)[:_SKETCH]
        return cls(
            num_parameters=num_parameters,
            leaves=named,
            kept=kept,
            names=tuple(name for name, _ in named),
            starts=starts,
            sizes=sizes,
            sketch=np.sort(sketch),
            compared=compared,
            heads=_heads(starts[compared], sizes[compared]),
        )

    def is_like(self, leaves: Leaves) -> bool:
        """Whether these are the leaves."""
        return _named(leaves, self.num_parameters) == self.leaves


def _named(leaves: Leaves | None, num_parameters: int) -> tuple[tuple[str, int], ...]:
    if leaves is None:
        return (("all", num_parameters),)
    pairs = leaves.items() if isinstance(leaves, Mapping) else ((str(i), n) for i, n in enumerate(leaves))
    named = tuple((name, _validate.whole(f"the size of leaf {name}", size, 0)) for name, size in pairs)
    total = sum(size for _, size in named)
    if total != num_parameters:
        raise InputError(f"Expected leaves of {num_parameters} coordinates together, got {total}.")
    return tuple((name, size) for name, size in named if size > 0)


def _choose(offsets: IntArray, lengths: IntArray) -> IntArray | None:
    total = int(lengths.sum())
    if total <= _MOST:
        return None
    most = max(1, min(_PREFIX, _MOST // (2 * lengths.size)))
    firsts = [np.arange(start, start + min(size, most)) for start, size in zip(offsets, lengths, strict=True)]
    others = chance(2).choice(total, size=_MOST // 2, replace=False, shuffle=False)
    return np.unique(np.concatenate([*firsts, others]))


def _heads(starts: IntArray, sizes: IntArray) -> IntArray:
    width = int(min(_PREFIX, sizes.max()))
    steps = np.arange(width)
    return np.where(steps < sizes[:, None], starts[:, None] + steps, -1)
