"""Which coordinates of a gradient are kept for the tests of its noise, and to which leaf each belongs.

A leaf is one parameter tensor. Of a large model, only some coordinates are kept, and of these, only a sketch
for every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.diagnostics._p_values import fixed_rng
from dpaudit.errors import InputError, quoted

Leaves = Mapping[str, int] | Sequence[int]
"""The sizes of the parameters that a gradient consists of, in order, with their names if they have any."""

SKETCH = 1024  # coordinates that are kept for every step
_MAX_COORDINATES = 2**20  # coordinates kept for a large model
_PREFIX = 256  # leading coordinates of each leaf that are compared with those of other leaves
MAX_SAMPLED = 1024  # coordinates that an observer reads, which takes a few microseconds per step


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept coordinates: all, or for a large model the first of each leaf and a random sample."""

    num_parameters: int
    leaves: tuple[tuple[str, int], ...]
    chosen: IntArray | None
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
    """Their leading coordinates in the sketch: leaves x coordinates, -1 beyond the last of a leaf."""

    @classmethod
    def of(cls, num_parameters: int, leaves: Leaves | None) -> Layout:
        """Lay out gradients of this length, split into these leaves; None means a single leaf."""
        named = _named(leaves, num_parameters)
        lengths = np.array([size for _, size in named], dtype=np.int64)
        offsets = np.cumsum(lengths) - lengths
        chosen = _choose(offsets, lengths)
        coordinates = np.arange(num_parameters) if chosen is None else chosen
        starts = np.searchsorted(coordinates, offsets)
        sizes = np.diff(np.append(starts, coordinates.size))
        max_compared = 64  # leaves that are compared with each other
        compared = np.unique(np.linspace(0, len(named) - 1, min(len(named), max_compared)).astype(np.int64))
        sketch = _sketched(starts, sizes, min(SKETCH, coordinates.size))
        return cls(
            num_parameters=num_parameters,
            leaves=named,
            chosen=chosen,
            starts=starts,
            sizes=sizes,
            sketch=sketch,
            compared=compared,
            heads=_heads(sketch, starts[compared], sizes[compared]),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the leaves."""
        return tuple(name for name, _ in self.leaves)

    @property
    def sketch_sizes(self) -> list[int]:
        """The number of coordinates of each leaf that are kept for every step."""
        ends = np.searchsorted(self.sketch, np.append(self.starts, self.sizes.sum()))
        sizes: list[int] = np.diff(ends).tolist()
        return sizes

    def coordinate(self, index: int) -> int:
        """Return the coordinate of the gradient that is kept at this index."""
        return index if self.chosen is None else int(self.chosen[index])

    def is_like(self, leaves: Leaves) -> bool:
        """Return whether gradients with these leaves have this layout."""
        return _named(leaves, self.num_parameters) == self.leaves


def _named(leaves: Leaves | None, num_parameters: int) -> tuple[tuple[str, int], ...]:
    if leaves is None:
        return (("all", num_parameters),)
    if not isinstance(leaves, Iterable):
        raise InputError(f"Expected leaves=... as the sizes of parameters, got {quoted(leaves)}.")
    pairs = leaves.items() if isinstance(leaves, Mapping) else ((str(i), n) for i, n in enumerate(leaves))
    named = tuple((name, _validate.integer(f"the size of leaf {name}", size, 0)) for name, size in pairs)
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


def _sketched(starts: IntArray, sizes: IntArray, count: int) -> IntArray:
    """Choose coordinates that are kept for every step: all, or half of them at the beginning of leaves.

    Noise that is shared at an offset shows only where neighboring coordinates are kept.
    """
    total = int(sizes.sum())
    if total <= count:
        return np.arange(total)
    leaves = np.unique(np.linspace(0, sizes.size - 1, min(sizes.size, count // 2)).astype(np.int64))
    most = max(1, count // (2 * leaves.size))
    firsts = np.concatenate([starts[leaf] + np.arange(min(sizes[leaf], most)) for leaf in leaves])
    others = fixed_rng(1).permutation(total)
    return np.sort(np.concatenate([firsts, others[~np.isin(others, firsts)][: count - firsts.size]]))


def _heads(sketch: IntArray, starts: IntArray, sizes: IntArray) -> IntArray:
    """Return where the first coordinates of each leaf are in the sketch, as far as none is left out."""
    firsts = np.searchsorted(sketch, starts)
    offsets = np.arange(min(_PREFIX, int(sizes.max())))
    places = np.minimum(firsts[:, None] + offsets, sketch.size - 1)
    is_head = (sketch[places] == starts[:, None] + offsets) & (offsets < sizes[:, None])
    heads: IntArray = np.where(is_head, places, -1)
    return heads[:, : max(1, int(is_head.sum(axis=1).max()))]


@dataclass(frozen=True, eq=False)
class CoordinateSample:
    """Coordinates whose noise is logged: all for a small model, the same ones of each leaf for a large model.

    The sample includes the first coordinates of each leaf (one parameter tensor), where an RNG that is
    reseeded for each leaf repeats its noise, and some at growing distances.
    """

    indices: IntArray
    leaves: tuple[int, ...]
    """The number of coordinates in each leaf."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> CoordinateSample:
        """Choose from the concatenation of leaves with these sizes."""
        offsets = np.cumsum([0, *sizes])[:-1]
        if sum(sizes) <= MAX_SAMPLED:
            return cls(np.arange(sum(sizes)), tuple(sizes))
        inside = _inside(max(1, MAX_SAMPLED // len(sizes)), max(sizes))
        num_chosen = min(len(sizes), MAX_SAMPLED)
        chosen = np.unique(np.linspace(0, len(sizes) - 1, num_chosen).astype(np.int64))
        coordinates = [offsets[leaf] + inside[inside < sizes[leaf]] for leaf in chosen]
        return cls(np.concatenate(coordinates), tuple(inside.size for inside in coordinates))

    def named(self, names: Sequence[str]) -> Leaves:
        """Return the number of coordinates in each leaf, by name if each leaf has one of its own."""
        is_named = len(names) == len(set(names)) == len(self.leaves)
        return dict(zip(names, self.leaves, strict=True)) if is_named else self.leaves


def _inside(count: int, size: int) -> IntArray:
    """Choose coordinates within a leaf: half at its beginning, the others at growing distances."""
    first = np.arange(-(-count // 2))
    rest = np.geomspace(first.size, max(size - 1, first.size), count - first.size)
    return np.unique(np.concatenate([first, rest.astype(np.int64)]))
