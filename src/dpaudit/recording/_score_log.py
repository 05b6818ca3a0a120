"""The scores of all canaries in every step: those that count for the bound, and what arrives of each canary.

Canaries that are shorter than the clipping norm, and steps that have no others, do not count for the bound:
they are compared with the rest by the tests in ``diagnostics/_clipping_checks.py``. A training run that drops
the canaries does not show how it treats examples, so :func:`check_signal` raises instead of allowing a
verdict.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.canaries import SHAPES, Dirac, Directions, GradientCanary, ParameterLayout
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
from dpaudit.stats import AuditDesign, GuessDesign, as_mask

_ROUNDING = 1e-3  # in clipping norms
_Z_LIKELY = 3.0  # standard errors
_MIN_SCORES_PER_SIDE, _Z_CERTAIN = 10, 6.0  # scores and standard errors that prove a missing canary
_MUCH_LESS = 0.5  # of the claimed noise: the noise is scaled down like the canaries
_LENGTH_CLASSES = 1000
_LENGTHS = 100  # quantiles that stand for the lengths of all canaries


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
        self._canary = Dirac() if canaries is None else canaries.canary  # all are alike, and all count
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
        """Add a step; raise if its scores are not finite, or differ in number from those of the first."""
        expected = (self.scores[0] if self.scores else scores).shape
        if scores.size == 0 or scores.ndim != 1 or not scores.shape == present.shape == expected:
            raise InputError(
                f"Step {len(self)} needs a score and a presence flag for each of {expected[0] or 'some'} "
                f"canaries, got shapes {scores.shape} and {present.shape}."
            )
        if not np.isfinite(scores).all():
            index = int(np.flatnonzero(~np.isfinite(scores))[0])
            overflow = ", or does a norm overflow, as in half precision, for canaries of 1e6 clipping norms"
            raise InputError(
                f"Scores must be finite, got scores[{index}]={scores[index]} in step {len(self)}. Did "
                f"training diverge{'' if self.scores else overflow}?"
            )
        if self._canary.is_counted(len(self)):
            counted = slice(scores.size - self._canary.num_excluded(scores.size))
            self.counted_scores.append(scores[counted])
            self.counted_present.append(present[counted])
        self.scores.append(scores)
        self.present.append(present)

    def load(self, scores: Any, present: Any, num_canaries: int | None) -> None:
        """Add the steps of a stored state, after checking them."""
        values, mask = (np.asarray(array) for array in (scores, present))
        if not values.size and not mask.size:
            return
        if values.ndim != 2 or values.dtype.kind != "f" or not np.isfinite(values).all():
            raise InputError(
                f"The state must have finite scores of steps x canaries, got shape {values.shape} of type "
                f"{values.dtype!s:.60}."
            )
        require_resumable(values.shape[1], num_canaries)
        for row, flags in zip(values, as_mask(mask, values.shape), strict=True):
            self.add(row, flags)

    @property
    def is_tested(self) -> bool:
        """Whether what arrives of canaries is tested."""
        return self._canary.num_variants > 1

    def num_counted(self, num_steps: int) -> int:
        """Return how many of the first steps count for the bound."""
        return self._canary.num_counted(num_steps)

    def step_numbers(self) -> list[int]:
        """Return the number of steps up to and including each step that counts."""
        return [index + 1 for index in range(len(self)) if self._canary.is_counted(index)]

    def moments(self) -> list[LengthMoments]:
        """Return the moments of present and absent scores, for each length of canaries apart."""
        scores, present = self._stacked()
        if not self.is_tested:
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
        steps_by_directions = [
            (canaries.directions(steps[0]), steps) for steps in self._steps_by_variant().values()
        ]
        layout = canaries.layout()
        return arrival_results(
            CanaryScoreTable.joined([self._arrived(*each) for each in steps_by_directions]),
            self._energies(),
            self._step_arrivals(canaries.num_others),
            std=std,
            eps=canaries.eps(),
            shapes=SHAPES,
            names=layout.names,
            is_vector=np.array([len(shape) <= 1 for shape in layout.shapes]),
            # all canaries in a form to which other kinds of clipping can be applied
            batches=lambda: [
                batch for directions, _ in steps_by_directions for batch in _batches_of(directions, layout)
            ],
        )

    def _stacked(self) -> tuple[FloatArray, BoolArray]:
        """Return scores and presence, steps x canaries; copying them takes longer than most tests."""
        if self._joined is None or len(self._joined[0]) != len(self):
            self._joined = np.stack(self.scores), np.stack(self.present)
        return self._joined

    def _steps_by_variant(self) -> dict[int, list[int]]:
        steps_by_variant: dict[int, list[int]] = {}
        for index in range(len(self)):
            steps_by_variant.setdefault(self._canary.variant(index), []).append(index)
        return steps_by_variant

    def _arrived(self, directions: Directions, steps: list[int]) -> CanaryScoreTable:
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

    def _step_arrivals(self, num_others: Callable[[int], int] | None) -> StepArrivals | None:
        if num_others is None:
            return None
        scores, present = self._stacked()
        rows = present.sum(axis=1) + np.fromiter(map(num_others, range(len(self))), dtype=np.int64)
        return StepArrivals.of(scores, present, self._lengths(), rows)

    def _energies(self) -> StepEnergies:
        kinds = np.zeros(len(self), dtype=np.int64)
        for index in range(len(self)):
            eligible = self._canary.eligible(index, self.scores[0].size)
            kinds[index] = 0 if eligible is None else 2 if eligible.any() else 1
        return StepEnergies.of(*self._stacked(), kinds)


def _batches_of(directions: Directions, layout: ParameterLayout) -> list[CanaryBatch]:
    assert directions.lengths is not None
    apart, shared = directions.num_apart, directions.shared
    values = directions.values * directions.lengths[:apart]
    batches = [_batch(directions.explicit_coordinates.T, values.T, layout)]
    if shared is not None:
        values = shared.values * directions.lengths[apart:]
        batches.append(_batch(shared.places[None, :], values.T, layout))
    return batches


def _batch(coordinates: np.ndarray, values: np.ndarray, layout: ParameterLayout) -> CanaryBatch:
    """Return canaries with the parameter of each coordinate, and a number for its row in all parameters."""
    sizes = layout.sizes
    owners = np.searchsorted(np.cumsum(sizes), coordinates, side="right")
    counts = np.array([shape[0] if len(shape) > 1 else 1 for shape in layout.shapes])
    inside = coordinates - (np.cumsum(sizes) - sizes)[owners]
    rows = (np.cumsum(counts) - counts)[owners] + inside // np.maximum(sizes // counts, 1)[owners]
    return CanaryBatch(coordinates=coordinates, values=values, parameters=owners, rows=rows)


def require_resumable(num_recorded: int, num_canaries: int | None) -> None:
    """Raise if a recorded state has another number of canaries."""
    if num_canaries not in (None, num_recorded):
        raise InputError(
            f"The state has {num_recorded} canaries, but this observer has {num_canaries}; pass "
            f"num_canaries={num_recorded} to the observer."
        )


class MissingCanaryError(InputError):
    """Inserted canaries are missing from the release; ``gap`` is the increase of their mean score."""

    def __init__(self, message: str, gap: float = 0.0) -> None:
        super().__init__(message)
        self.gap = gap


@dataclass
class RunningMoments:
    """Count, sum and sum of squares of scores, accumulated step by step."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, scores: ScoreArray) -> RunningMoments:
        """Add scores, and return the moments."""
        self.count += scores.size
        self.total += float(scores.sum())
        self.squares += float((scores * scores).sum())
        return self

    def __add__(self, other: RunningMoments) -> RunningMoments:
        return RunningMoments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float:
        """The mean of all scores so far."""
        return self.total / self.count

    @property
    def error(self) -> float:
        """The variance of the mean."""
        return max(self.squares / self.count - self.mean**2, 0.0) / self.count


@dataclass(frozen=True)
class LengthMoments:
    """The moments of the scores of canaries of the same length; present ones score ``expected``."""

    present: RunningMoments
    absent: RunningMoments
    expected: float = 1.0

    @classmethod
    def of(cls, scores: FloatArray, present: BoolArray, expected: float = 1.0) -> LengthMoments:
        """Return the moments of these scores."""
        return cls(RunningMoments().add(scores[present]), RunningMoments().add(scores[~present]), expected)

    @property
    def fewest(self) -> int:
        """The smaller number of present and of absent scores."""
        return min(self.present.count, self.absent.count)

    @property
    def gap(self) -> float:
        """By how much present canaries score higher than absent ones."""
        return self.present.mean - self.absent.mean

    @property
    def spread(self) -> float:
        """The standard error of :attr:`gap`."""
        return math.sqrt(self.present.error + self.absent.error)


def has_signal(groups: Sequence[LengthMoments], signal: float) -> bool:
    """Return whether canaries score like clipped ones, up to the uncertainty caused by the noise."""
    return all(
        abs(group.gap - signal * group.expected) <= max(_Z_CERTAIN * group.spread, _ROUNDING)
        for group in groups
        if group.fewest > 0
    )


def check_signal(
    groups: Sequence[LengthMoments], signal: float, *, claimed_noise: float | None = None
) -> None:
    """Raise an :class:`MissingCanaryError` if present canaries certainly score less than half of ``signal``.

    If those of one length arrive, there is a verdict, and tests report what happens to the others. The error
    names a likely cause, which depends on how much of ``claimed_noise`` the scores have.
    """
    long = [group for group in groups if group.expected == 1.0]
    none = RunningMoments()
    joined = LengthMoments(
        sum((group.present for group in long), none), sum((group.absent for group in long), none)
    )
    if joined.fewest < _MIN_SCORES_PER_SIDE or any(
        group.fewest >= _MIN_SCORES_PER_SIDE
        and group.gap - _Z_LIKELY * group.spread > signal * group.expected / 2
        for group in groups
    ):
        return
    gap = joined.gap
    if gap + _Z_CERTAIN * joined.spread < signal / 2:
        raise MissingCanaryError(
            f"Scores must increase by {signal:g} where a canary is present, but they increase by {gap:.2g}: "
            f"{_cause_of_loss(joined, claimed_noise)}. No verdict can be based on these scores.",
            gap,
        )


def _cause_of_loss(moments: LengthMoments, claimed_noise: float | None) -> str:
    """Return what makes canaries arrive at a fraction of their length: a smaller sum, with or without noise.

    A sum that is clipped again, or a noisy sum that is clipped, may be as private as claimed, so it is not a
    finding; but its canaries do not show that it is.
    """
    is_part = moments.gap > max(_Z_LIKELY * moments.spread, _ROUNDING)
    if claimed_noise is None or not is_part:
        return (
            "the release does not contain the canaries that were added to the sum, or they were clipped "
            "together with other gradients instead of one by one (check with replay()), or the release is "
            "a mean instead of a sum"
        )
    ratio = math.sqrt(moments.absent.error * moments.absent.count) / claimed_noise
    if ratio < _MUCH_LESS:
        return (
            f"the release is scaled down together with its noise, which is {_validate.percent(ratio, 2)} "
            "of the claim, so the noisy sum is clipped (noise is added before clipping), or the release is a "
            "mean instead of a sum"
        )
    return (
        "the sum is scaled down before the noise, so it is clipped again after its rows were added, or "
        "gradients are clipped together instead of one by one (check with replay()), or the sum is divided"
    )


class CanaryLengths:
    """How often clipped canaries had which length over all steps, for the power of an audit.

    Lengths are in units of ``reach`` clipping norms, and present canaries have a mean score of ``signal``.
    """

    def __init__(self, *, signal: float, reach: float) -> None:
        self._signal, self._reach = signal, reach
        self.counts: IntArray = np.zeros(_LENGTH_CLASSES + 1, dtype=np.int64)

    def add(self, lengths: ScoreArray) -> None:
        """Count the lengths of all canaries of a step."""
        classes = np.rint(np.clip(lengths, 0.0, 1.0) * _LENGTH_CLASSES).astype(np.int64)
        self.counts += np.bincount(classes, minlength=self.counts.size)

    def quantiles(self) -> tuple[float, ...]:
        """Return equally frequent lengths, one if all are the same; 1 if none was counted."""
        total = int(self.counts.sum())
        if total == 0:
            return (1.0,)
        places = (np.arange(_LENGTHS) + 0.5) / _LENGTHS * total
        quantiles = np.searchsorted(np.cumsum(self.counts), places) / _LENGTH_CLASSES
        return (float(quantiles[0]),) if quantiles[0] == quantiles[-1] else tuple(quantiles.tolist())

    def in_design(self, design: AuditDesign | GuessDesign) -> AuditDesign:
        """Return the design with these lengths, in clipping norms."""
        assert isinstance(design, AuditDesign)  # scores of steps are not guessed
        lengths = tuple(self._signal * self._reach * length for length in self.quantiles())
        return replace(design, lengths=lengths, signal=self._signal)
