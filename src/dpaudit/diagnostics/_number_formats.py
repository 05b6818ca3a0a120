"""Formats of floating-point numbers and grids, recognized by the numbers themselves.

The data type of an array does not show in which precision its numbers were computed or stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpaudit._types import BoolArray, FloatArray, ScoreArray

BFLOAT16, FLOAT16, SINGLE, DOUBLE = 2.0**-7, 2.0**-10, 2.0**-23, 2.0**-52  # relative precision
GRID_ERROR = 0.75
"""The error of a number on a grid, in spacings: half of it, with a margin for the sum."""

_GRID_SAMPLE, _MIN_SAMPLE = 8192, 64  # numbers by which a grid is found
_ON_GRID = 1 / 8  # largest distance of a number from the grid, in spacings


class FormatCheck:
    """The least precise format, at each coordinate, that can hold all releases so far.

    Numbers in fixed point may fit into a floating-point format by accident, but do not use its precision: in
    a floating-point format, small numbers are more precise than large ones.
    """

    def __init__(self) -> None:
        self._is_bfloat16 = self._is_float16 = self._is_single = np.ones(0, dtype=np.bool_)
        self._largest = np.zeros(0)
        self._finest = np.zeros(0)  # the lowest bit that is set, where a format of 16 bits is possible
        self._sample = np.zeros(0)  # the first numbers, until it is decided whether they are on a grid
        self._spacing = np.full(1, np.nan)  # of the grid; not a number if undecided, 0 without a grid

    def observe_steps(self, released: Any) -> None:
        """Add releases exactly as the steps returned them, before they are multiplied by anything."""
        values = np.asarray(released, dtype=np.float64)
        for index, row in enumerate(values):
            if self._is_precise and not np.isnan(self._spacing[0]):
                self._observe_precise(values[index:])
                return
            self.observe(row)

    @property
    def _is_precise(self) -> bool:
        """Whether no coordinate has a format of 16 bits."""
        return not self.is_empty and not (self._is_float16.any() or self._is_bfloat16.any())

    def observe(self, released: Any) -> None:
        """Add the release of one step."""
        values = np.asarray(released, dtype=np.float64)
        if self._is_precise:
            self._observe_precise(values[None])
            return
        self._observe_grid(values)
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
            is_single = single == values
            is_float16 = is_single & (single.astype(np.float16) == single)
        is_bfloat16 = is_single & ((single.view(np.uint32) & 0xFFFF) == 0)
        if self.is_empty:
            self._is_single, self._is_float16, self._is_bfloat16 = is_single, is_float16, is_bfloat16
            self._largest, self._finest = np.zeros(values.size), np.full(values.size, np.inf)
        else:
            self._is_single &= is_single
            self._is_float16 &= is_float16
            self._is_bfloat16 &= is_bfloat16
        self._largest = np.maximum(self._largest, np.abs(values))
        is_possible = (self._is_float16 | self._is_bfloat16) & (values != 0)
        if is_possible.any():
            finest = _lowest_bits(values[is_possible])
            self._finest[is_possible] = np.minimum(self._finest[is_possible], finest)

    def _observe_precise(self, values: FloatArray) -> None:
        """Add releases at coordinates that have no format of 16 bits: nearly all, after one step."""
        self._observe_grid(values)
        self._largest = np.maximum(self._largest, np.abs(values).max(axis=0))
        with np.errstate(over="ignore"):
            self._is_single &= (values.astype(np.float32) == values).all(axis=0)

    def _observe_grid(self, values: FloatArray) -> None:
        if np.isnan(self._spacing[0]):
            self._sample = np.concatenate([self._sample, values.ravel()])
            if self._sample.size >= _GRID_SAMPLE:
                self._spacing[0], self._sample = _find_spacing(self._sample), np.zeros(0)
        elif self._spacing[0] > 0 and _off_grid(values, float(self._spacing[0])).any():
            self._spacing[0] = 0.0

    def grid(self, noise: ScoreArray, unit: float) -> float:
        """Return the spacing of the grid on which all releases are, in units of the noise; 0 if none.

        ``unit`` is what 1 in a release is in units of the ``noise``. If the noise is on the same grid, so is
        the sum: then there may be no other rounding than that of the noise.
        """
        spacing_found = float(self._spacing[0])
        spacing = unit * (_find_spacing(self._sample) if np.isnan(spacing_found) else spacing_found)
        coarsest = 0.07  # claimed standard deviations: a coarser grid could hide that noise is missing
        if not 0 < spacing <= coarsest:
            return 0.0
        same_grid = 1 / 64  # the same for noise, if the sum is on the grid too
        off_share = 0.01  # of the noise, below which the sum itself is on the grid
        return spacing if _off_grid(noise, spacing, same_grid).mean() > off_share else 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no release was observed."""
        return self._is_single.size == 0

    def precision(self, leaves: Sequence[int]) -> FloatArray:
        """Return the relative precision at each coordinate: that of the numbers of its whole leaf.

        A single coordinate may have no contribution other than the noise, whose own lattice would then be
        taken for that of the release.
        """
        sizes = np.asarray([size for size in leaves if size > 0])
        starts = np.cumsum(sizes) - sizes
        largest = np.maximum.reduceat(self._largest, starts)
        finest = np.minimum.reduceat(self._finest, starts)
        precisions = np.full(sizes.size, DOUBLE)
        precisions[np.logical_and.reduceat(self._is_single, starts) | (largest == 0)] = SINGLE
        finer = 16.0  # times as precise as the largest is certainly the smallest of a few hundred numbers
        subnormal = 2.0**-24  # the smallest number in float16, where it is a fixed-point format
        for flags, eps in ((self._is_float16, FLOAT16), (self._is_bfloat16, BFLOAT16)):
            spacing = eps * np.exp2(np.floor(np.log2(np.where(largest > 0, largest, 1.0))))
            is_floating = (finest < spacing / finer) | (finest <= subnormal)
            precisions[np.logical_and.reduceat(flags, starts) & is_floating] = eps
        return np.repeat(precisions, sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        return {name: value.copy() for name, value in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        vars(self).update({name: np.array(value) for name, value in state.items()})


def _find_spacing(values: FloatArray) -> float:
    """Return the spacing of the grid on which all numbers are; 0 if there is none or they are too few."""
    ordered = np.unique(np.abs(values))
    gaps = np.diff(ordered, prepend=0.0)
    gaps = gaps[gaps > SINGLE * ordered[-1:].max(initial=0.0)]  # smaller ones may be rounding errors
    if values.size < _MIN_SAMPLE or gaps.size == 0:
        return 0.0
    max_divisor = 4  # the smallest gap between two numbers may be a small multiple of the spacing
    for divisor in range(1, max_divisor + 1):
        spacing = _refined(ordered, float(gaps.min()) / divisor)
        if not _off_grid(ordered, spacing).any():
            return spacing
    return 0.0


def _refined(ordered: FloatArray, spacing: float) -> float:
    """Return the spacing that fits best: small multiples first, as a small error adds up in large ones."""
    limit = 16 * spacing
    while True:
        near = ordered[: np.searchsorted(ordered, limit)]
        multiples = np.rint(near / spacing)
        if multiples.any():
            spacing = float((near * multiples).sum() / (multiples * multiples).sum())
        if limit > ordered[-1]:
            return spacing
        limit *= 16


def _off_grid(values: ScoreArray, spacing: float, tolerance: float = _ON_GRID) -> BoolArray:
    """Return which numbers are clearly not multiples of the spacing."""
    multiples = values / spacing
    is_off: BoolArray = np.abs(multiples - np.rint(multiples)) > tolerance
    return is_off


def _lowest_bits(values: FloatArray) -> FloatArray:
    """Return the value of the lowest bit that is set in each number of at most 24 bits."""
    fractions, exponents = np.frexp(values)
    whole = np.abs(np.ldexp(fractions, 24)).astype(np.int64)
    bits: FloatArray = np.ldexp((whole & -whole).astype(np.float64), exponents - 24)
    return bits
