"""The scores of all canaries in every step, those that count for the bound, and what arrived of each canary.

Canaries that are shorter than the clipping norm, and steps that have no others, do not count for the bound:
they are compared with the rest by the tests in ``diagnostics/_clipping_checks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import SHAPES, Directions, GradientCanary, ParameterLayout
from dpaudit.diagnostics import CheckResults, ClaimedStep
from dpaudit.diagnostics._clipping_causes import CanaryBatch
from dpaudit.diagnostics._clipping_checks import (
    CanaryScoreTable,
    StepArrivals,
    arrival_results,
)
from dpaudit.diagnostics._data_tests import StepEnergies
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import FrozenValue
from dpaudit.recording._signal_check import LengthMoments, require_resumable
from dpaudit.stats import as_mask


@dataclass(frozen=True, eq=False)
class ObservedCanaries:
    """The gradient canaries of a run, for tests of what arrives of them.

    ``directions`` returns those of a step, ``layout`` the parameters that they are in. ``eps`` is the
    relative precision of gradients. Scores are in units of ``reach`` clipping norms. ``num_others`` returns
    the number of rows of a step besides those of present canaries, if it is known.
    """

    canary: GradientCanary
    directions: Callable[[int], Directions]
    layout: Callable[[], ParameterLayout]
    eps: Callable[[], float] = lambda: 0.0
    reach: float = 1.0
    num_others: Callable[[int], int] | None = None

    def frozen(self, steps: Sequence[int], num_steps: int) -> ObservedCanaries:
        """Return the canaries of ``steps`` alone, without the training run; none if there are no steps."""
        others = self.num_others
        return ObservedCanaries(
            self.canary,
            {step: self.directions(step) for step in steps}.__getitem__,
            FrozenValue(self.layout() if steps else ParameterLayout((), ())),
            FrozenValue(self.eps() if steps else 0.0),
            self.reach,
            None if others is None else [others(step) for step in range(num_steps)].__getitem__,
        )


class ScoreLog:
    """Scores and presence of all canaries, by step; with ``canaries``, some may not count for the bound."""

    def __init__(self, canaries: ObservedCanaries | None = None) -> None:
        self._canaries = canaries
        self.clear()

    def clear(self) -> None:
        """Forget all steps."""
        self.scores: list[FloatArray] = []
        self.present: list[BoolArray] = []
        self.counted_scores: list[FloatArray] = []
        self.counted_present: list[BoolArray] = []
        self._joined: tuple[FloatArray, BoolArray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._canaries is None:
            return dict(vars(self))
        firsts = [steps[0] for steps in self._steps_by_variant().values()] if self.is_tested else []
        return {**vars(self), "_canaries": self._canaries.frozen(firsts, len(self)), "_joined": None}

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, scores: FloatArray, present: BoolArray) -> None:
        """Add a step."""
        if self._is_counted(len(self)):
            counted = slice(scores.size - self._num_uncounted(scores.size))
            self.counted_scores.append(scores[counted])
            self.counted_present.append(present[counted])
        self.scores.append(scores)
        self.present.append(present)

    def load(self, scores: Sequence[FloatArray], present: Sequence[BoolArray]) -> None:
        """Replace all steps."""
        self.clear()
        for values, mask in zip(scores, present, strict=True):
            self.add(values, mask)

    @property
    def is_tested(self) -> bool:
        """Whether what arrives of canaries is tested."""
        return self._canaries is not None and self._canaries.canary.num_variants > 1

    def num_counted(self, num_steps: int) -> int:
        """Return how many of the first steps count for the bound."""
        if self._canaries is None:
            return num_steps
        return self._canaries.canary.num_counted(num_steps)

    def step_numbers(self) -> list[int]:
        """Return the number of steps up to and including each step that counts."""
        return [index + 1 for index in range(len(self)) if self._is_counted(index)]

    def _is_counted(self, index: int) -> bool:
        return self._canaries is None or self._canaries.canary.is_counted(index)

    def _num_uncounted(self, num_canaries: int) -> int:
        return 0 if self._canaries is None else self._canaries.canary.num_excluded(num_canaries)

    def moments(self) -> list[LengthMoments]:
        """Return the moments of present and absent scores, for each length of canaries apart."""
        scores, present = self._stacked()
        if self._canaries is None or not self.is_tested:
            return [LengthMoments.of(scores, present)]
        lengths = self._lengths()
        return [
            LengthMoments.of(scores[chosen], present[chosen], min(float(length), 1.0))
            for length in np.unique(lengths)
            for chosen in (lengths == length,)
        ]

    def counted(self) -> tuple[FloatArray, BoolArray]:
        """Return scores and presence that count for the bound, steps x canaries."""
        return np.stack(self.counted_scores), np.stack(self.counted_present)

    def counted_moments(self) -> list[LengthMoments]:
        """Return the moments of the scores that count for the bound."""
        return [LengthMoments.of(*self.counted())]

    def _lengths(self) -> FloatArray:
        """Return the length of each canary, steps x canaries."""
        assert self._canaries is not None
        lengths = np.empty((len(self), self.scores[0].size))
        for steps in self._steps_by_variant().values():
            lengths[steps] = self._canaries.directions(steps[0]).lengths
        return lengths

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the tests of what arrived, given the claimed noise multiplier."""
        if self._canaries is None or not self.is_tested or not self.scores:
            return CheckResults()
        canaries, std = self._canaries, claimed.noise_multiplier / self._canaries.reach
        arrived = [self._arrived(steps) for steps in self._steps_by_variant().values()]
        return arrival_results(
            CanaryScoreTable.joined(arrived),
            self._energies(),
            self._step_arrivals(),
            std=std,
            eps=canaries.eps(),
            shapes=SHAPES,
            names=canaries.layout().names,
            is_vector=np.array([len(shape) <= 1 for shape in canaries.layout().shapes]),
            batches=self._batches,
        )

    def _stacked(self) -> tuple[FloatArray, BoolArray]:
        """Return scores and presence, steps x canaries; copying them takes longer than most tests."""
        if self._joined is None or len(self._joined[0]) != len(self):
            self._joined = np.stack(self.scores), np.stack(self.present)
        return self._joined

    def _steps_by_variant(self) -> dict[int, list[int]]:
        assert self._canaries is not None
        steps_by_variant: dict[int, list[int]] = {}
        for index in range(len(self)):
            steps_by_variant.setdefault(self._canaries.canary.variant(index), []).append(index)
        return steps_by_variant

    def _arrived(self, steps: list[int]) -> CanaryScoreTable:
        assert self._canaries is not None
        directions = self._canaries.directions(steps[0])
        assert directions.lengths is not None
        assert directions.labels is not None
        scores, present = self._stacked()
        return CanaryScoreTable.of(
            scores[steps],
            present[steps],
            shapes=directions.labels.shapes,
            lengths=directions.lengths,
            parameters=directions.labels.parameters,
        )

    def _step_arrivals(self) -> StepArrivals | None:
        assert self._canaries is not None
        if self._canaries.num_others is None:
            return None
        scores, present = self._stacked()
        others = map(self._canaries.num_others, range(len(self)))
        rows = present.sum(axis=1) + np.fromiter(others, dtype=np.int64)
        return StepArrivals.of(scores, present, self._lengths(), rows)

    def _energies(self) -> StepEnergies:
        assert self._canaries is not None
        canary, num_canaries = self._canaries.canary, self.scores[0].size
        kinds = np.zeros(len(self), dtype=np.int64)
        for index in range(len(self)):
            eligible = canary.eligible(index, num_canaries)
            kinds[index] = 0 if eligible is None else 2 if eligible.any() else 1
        return StepEnergies.of(*self._stacked(), kinds)

    def _batches(self) -> list[CanaryBatch]:
        """Return all canaries, by variant, in a form to which other kinds of clipping can be applied."""
        assert self._canaries is not None
        layout, batches = self._canaries.layout(), []
        for steps in self._steps_by_variant().values():
            directions = self._canaries.directions(steps[0])
            batches += _batches_of(directions, layout)
        return batches


def _batches_of(made: Directions, layout: ParameterLayout) -> list[CanaryBatch]:
    assert made.lengths is not None
    apart, where = made.num_apart, made.explicit_coordinates
    batches = [
        CanaryBatch(
            coordinates=where.T,
            values=(made.values * made.lengths[:apart]).T,
            parameters=_owners(where, layout).T,
            rows=_rows(where, layout).T,
        )
    ]
    if made.shared is not None:
        places = made.shared.places
        batches.append(
            CanaryBatch(
                coordinates=places[None, :],
                values=(made.shared.values * made.lengths[apart:]).T,
                parameters=_owners(places, layout)[None, :],
                rows=_rows(places, layout)[None, :],
            )
        )
    return batches


def _owners(coordinates: np.ndarray, layout: ParameterLayout) -> np.ndarray:
    """Return the parameter of each coordinate."""
    return np.searchsorted(np.cumsum(layout.sizes), coordinates, side="right")


def _rows(coordinates: np.ndarray, layout: ParameterLayout) -> np.ndarray:
    """Return a number for each coordinate that is the same for those in one row of one parameter."""
    sizes = layout.sizes
    counts = np.array([shape[0] if len(shape) > 1 else 1 for shape in layout.shapes])
    owners = _owners(coordinates, layout)
    inside = coordinates - (np.cumsum(sizes) - sizes)[owners]
    first = np.cumsum(counts) - counts
    rows: np.ndarray = first[owners] + inside // np.maximum(sizes // counts, 1)[owners]
    return rows


def recorded_steps(
    scores: Any, present: Any, num_canaries: int | None
) -> tuple[list[FloatArray], list[BoolArray]]:
    """Return scores and presence of each step from a stored state, after checking them."""
    values, mask = (np.asarray(array) for array in (scores, present))
    if not values.size and not mask.size:
        return [], []
    if values.ndim != 2 or values.dtype.kind != "f" or not np.isfinite(values).all():
        raise InputError(
            f"Expected scores of steps x canaries in the state, all finite, got shape {values.shape} of type "
            f"{values.dtype!s:.60}."
        )
    require_resumable(values, num_canaries)
    return list(values), list(as_mask(mask, values.shape))
