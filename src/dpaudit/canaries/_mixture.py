"""The default gradient canary: concentrated and spread ones of several lengths, in every named parameter.

A clipping norm that is computed for the wrong thing (each value, row or parameter), over too little, or with
a limited range, treats some of these canaries like correct code does and others not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy import linalg

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.canaries._gradients import (
    SHAPES,
    CanaryLabels,
    Directions,
    GradientCanary,
    ParameterLayout,
    SharedPlaces,
)

_PERIOD, _WITHOUT, _SHORT_ONLY = 16, 7, 15  # steps; which of them have no canary, and only short ones
_SHORT, _JUST_SHORTER = 0.5, 0.95  # in clipping norms
_JUST_LONGER, _LONG, _HUGE = 1.5, 1e3, 1e6
_MAX_SPREAD = 64  # canaries; also the places of each in one parameter, so that their cost is bounded
_SHARE_SPREAD, _SHARE_SHORT = 4, 6  # every fourth canary is spread, every sixth of these is short
_SINGLE, _DENSE, _BLOCK, _ROW = range(len(SHAPES))
_FEW = 2**14  # coordinates, all of which can be shuffled


@dataclass(frozen=True)
class Mixture(GradientCanary):
    """Canaries on single coordinates and spread ones, shorter, just longer and much longer than the norm.

    Three of four are on a single coordinate, at least one in every named parameter. The others are spread
    over all parameters, over one of them, or over a row of one; their signs make them exactly orthogonal.
    Lengths are 1.5, ``scale``, 1,000 and 1,000,000 clipping norms, or as much as the data type allows. There
    are 12 sets of directions, which steps take in turn.

    With ``short``, some have 0.5 or 0.95 clipping norms: they reveal gradients that are scaled up. One step
    of 16 then has no canary, and one only some of 0.5, which reveals noise that depends on the longest
    gradient. Neither short canaries nor these steps count for the bound.

    >>> found = Mixture().directions(64, 1000, np.random.default_rng(0))
    >>> matrix = found.dense()
    >>> bool(np.allclose(matrix @ matrix.T, np.eye(64)))
    True
    >>> found.lengths[[0, 1, 2, 3, -1]].tolist()
    [10.0, 1.5, 10.0, 1000.0, 0.95]
    """

    short: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _validate.at_least("scale", self.scale, _JUST_LONGER)

    @property
    def places_per_canary(self) -> int:
        return 2

    @property
    def num_variants(self) -> int:
        # a multiple of the number of spread shapes
        return 12

    def num_excluded(self, num_canaries: int) -> int:
        return round(_num_spread(num_canaries) / _SHARE_SHORT) if self.short else 0

    def is_counted(self, index: int) -> bool:
        return not self.short or index % _PERIOD not in (_WITHOUT, _SHORT_ONLY)

    def num_counted(self, num_steps: int) -> int:
        whole, rest = divmod(num_steps, _PERIOD)
        return whole * super().num_counted(_PERIOD) + super().num_counted(rest)

    def eligible(self, index: int, num_canaries: int) -> BoolArray | None:
        if self.is_counted(index):
            return None
        may = np.zeros(num_canaries, dtype=np.bool_)
        if index % _PERIOD == _SHORT_ONLY:
            may[num_canaries - self.num_excluded(num_canaries) :] = True
        return may

    def _directions(self, num_canaries: int, num_parameters: int, rng: np.random.Generator) -> Directions:
        return self._placed(num_canaries, ParameterLayout.of([num_parameters]), rng, 0)

    def _placed(
        self, num_canaries: int, layout: ParameterLayout, rng: np.random.Generator, variant: int
    ) -> Directions:
        spread = _num_fitting(num_canaries, layout)
        places, parameters = _single_places(
            num_canaries - spread, layout, rng, variant, is_crowded=not spread
        )
        values, single = np.ones((1, places.size)), places[None, :]
        shared, labels = None, CanaryLabels(np.full(places.size, _SINGLE), parameters)
        if spread:
            shape = (_DENSE, _BLOCK, _ROW)[variant % 3]
            shared, wide = _spread(spread, np.sort(places), layout, shape, rng)
            labels = CanaryLabels(
                np.concatenate([labels.shapes, wide.shapes]),
                np.concatenate([labels.parameters, wide.parameters]),
            )
        lengths = np.minimum(self._lengths(num_canaries, spread, variant), layout.largest)
        return Directions(values, single, layout.num_parameters, shared, lengths, labels)

    def _lengths(self, num_canaries: int, num_spread: int, variant: int) -> FloatArray:
        """Return the length of each canary; those of one number differ between variants."""
        usual = (self.scale, _JUST_LONGER, self.scale, _LONG, self.scale, _HUGE)
        wide = (_JUST_LONGER, self.scale, _LONG, _HUGE, self.scale)
        numbers = np.arange(num_canaries - num_spread) + variant
        wide_numbers = np.arange(num_spread) + variant // 3
        lengths: FloatArray = np.concatenate(
            [np.array(usual)[numbers % len(usual)], np.array(wide)[wide_numbers % len(wide)]]
        )
        # steps that have short ones only are odd, and so are their variants
        short = _SHORT if variant % 2 else _JUST_SHORTER
        lengths[num_canaries - self.num_excluded(num_canaries) :] = short
        return lengths


def _num_spread(num_canaries: int) -> int:
    return _power_of_two(min(_MAX_SPREAD, num_canaries // _SHARE_SPREAD))


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is at most ``number``; 0 below 1."""
    return 1 << (number.bit_length() - 1) if number >= 1 else 0


def _num_fitting(num_canaries: int, layout: ParameterLayout) -> int:
    """Return the number of spread canaries, 0 if the others leave too few places."""
    sizes, spread = layout.sizes, _num_spread(num_canaries)
    spread = min(spread, _power_of_two(int((sizes - _room(sizes)).max())))
    fits = num_canaries - spread <= int(_room(sizes).sum())
    return spread if fits else 0


def _room(sizes: IntArray) -> IntArray:
    """Return how many canaries on a single coordinate each parameter may contain."""
    return np.where(sizes > 1, sizes // 2, sizes)


def _single_places(
    count: int, layout: ParameterLayout, rng: np.random.Generator, variant: int, *, is_crowded: bool
) -> tuple[IntArray, IntArray]:
    """Return distinct coordinates and their parameters: one in each parameter first, then any."""
    sizes, total = layout.sizes, layout.num_parameters
    starts = np.cumsum(sizes) - sizes
    used = np.flatnonzero(sizes)
    covered = np.sort(used[(np.arange(min(count, used.size)) + variant * count) % used.size])
    first = starts[covered] + rng.integers(0, sizes[covered])
    others = rng.permutation(total) if total <= _FEW else rng.choice(total, 4 * count, shuffle=False)
    places = np.concatenate([first, others])
    places = places[np.sort(np.unique(places, return_index=True)[1])]
    owners = np.searchsorted(starts, places, side="right") - 1
    if not is_crowded:
        fits = _rank_within(owners) < _room(sizes)[owners]
        places, owners = places[fits], owners[fits]
    return places[:count], owners[:count]


def _rank_within(groups: IntArray) -> IntArray:
    """Return how many earlier entries have the same group."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    ranks = np.empty_like(groups)
    ranks[order] = np.arange(groups.size) - np.searchsorted(ordered, ordered)
    return ranks


def _spread(
    count: int, taken: IntArray, layout: ParameterLayout, shape: int, rng: np.random.Generator
) -> tuple[SharedPlaces, CanaryLabels]:
    """Return canaries of a spread shape on places that are not ``taken`` (sorted)."""
    groups = list(_groups(taken, layout, shape, count, rng))
    if shape == _ROW and sum(len(places) for _, places in groups) < count:  # too few or too short rows
        shape, groups = _BLOCK, list(_groups(taken, layout, _BLOCK, count, rng))
    order = rng.permutation(count)  # of the codes, so that canaries of any length meet all of them
    blocks, owners = [], np.full(count, -1)
    for (parameter, places), canaries in zip(groups, _assigned(groups, order, shape), strict=True):
        signs = rng.integers(0, 2, (len(places), 1)) * 2.0 - 1.0
        blocks.append(np.zeros((len(places), count)))
        blocks[-1][:, canaries] = _codes(len(places))[:, : canaries.size] * signs / len(places) ** 0.5
        owners[canaries] = -1 if shape == _DENSE else parameter
    values, places = np.concatenate(blocks), np.concatenate([group for _, group in groups])
    values /= np.linalg.norm(values, axis=0)
    chosen = np.flatnonzero(values.any(axis=1))
    chosen = chosen[np.argsort(places[chosen])]
    return SharedPlaces(places[chosen], values[chosen]), CanaryLabels(np.full(count, shape), owners)


@functools.cache  # of powers of two up to the largest number of places
def _codes(size: int) -> FloatArray:
    """Return Walsh codes, one per column."""
    codes: FloatArray = linalg.hadamard(size).astype(np.float64)
    return codes


def _assigned(groups: list[tuple[int, IntArray]], order: IntArray, shape: int) -> list[IntArray]:
    """Return the canaries with a code in each group: dense ones in all of them, others in one each."""
    if shape == _DENSE:
        return [order[: len(places)] for _, places in groups]
    room = np.array([len(places) for _, places in groups])
    rounds = np.repeat(np.arange(room.max()), len(groups)), np.tile(np.arange(len(groups)), room.max())
    turns = rounds[1][rounds[0] < room[rounds[1]]][: order.size]  # one code of each group after the other
    return [order[turns == number] for number in range(len(groups))]


def _groups(
    taken: IntArray, layout: ParameterLayout, shape: int, count: int, rng: np.random.Generator
) -> Iterator[tuple[int, IntArray]]:
    """Yield parameters with a power of two of free places in them, or in one of their rows."""
    sizes = layout.sizes
    starts = np.cumsum(sizes) - sizes
    numbers = rng.permutation(np.flatnonzero(sizes > 1))
    if shape != _ROW:
        # more parameters would take longer in every step
        for number in numbers[:64]:
            yield int(number), _free(starts[number], int(sizes[number]), taken, rng)
        return
    matrices = [number for number in numbers if len(layout.shapes[number]) > 1][:count]
    for number in matrices:
        rows = layout.shapes[number][0]
        width = int(sizes[number]) // rows
        num_rows = min(rows, -(-count // len(matrices)))
        for row in rng.choice(rows, num_rows, replace=False) if width > 1 else ():
            places = _free(starts[number] + row * width, width, taken, rng)
            if len(places) > 1:
                yield int(number), places


def _free(first: int, size: int, taken: IntArray, rng: np.random.Generator) -> IntArray:
    """Draw free places from a range of coordinates: as many as possible, but a power of two."""
    if size > _FEW:  # most are free
        places = np.unique(first + rng.integers(0, size, 4 * _MAX_SPREAD))
    else:
        places = np.arange(first, first + size)
    inside = taken[np.searchsorted(taken, first) : np.searchsorted(taken, first + size)]
    places = rng.permutation(np.setdiff1d(places, inside, assume_unique=True))
    return np.sort(places[: _power_of_two(min(places.size, _MAX_SPREAD))])
