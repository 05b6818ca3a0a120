"""Signal of the observed steps: a check that canaries reach the release, and the parts that test a run.

A training run that drops the canaries does not show how it treats examples, so :func:`check_signal` raises
instead of allowing a verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics import RunCheck
from dpaudit.errors import InputError
from dpaudit.stats import AuditDesign, GuessDesign

_Check = TypeVar("_Check")
_ROUNDING = 1e-3  # in clipping norms
Z_LIKELY = 3.0  # standard errors
MIN_SCORES_PER_SIDE, Z_CERTAIN = 10, 6.0  # scores and standard errors that prove a missing canary
_MUCH_LESS = 0.5  # of the claimed noise: the noise is scaled down like the canaries
_LENGTH_CLASSES = 1000
_LENGTHS = 100  # quantiles that stand for the lengths of all canaries


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

    @property
    def mean(self) -> float:
        """The mean of all scores so far."""
        return self.total / self.count

    @property
    def error(self) -> float:
        """The variance of the mean."""
        return max(self.squares / self.count - self.mean**2, 0.0) / self.count


def sum_moments(parts: Iterable[RunningMoments]) -> RunningMoments:
    """Return the moments of all scores together."""
    total = RunningMoments()
    for moments in parts:
        total.count += moments.count
        total.total += moments.total
        total.squares += moments.squares
    return total


class CanaryLengths:
    """How often clipped canaries had which length over all steps, for the power of an audit.

    Lengths are in units of ``reach`` clipping norms, and present canaries have a mean score of ``signal``.
    """

    def __init__(self, *, signal: float = 1.0, reach: float = 1.0) -> None:
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
        abs(group.gap - signal * group.expected) <= max(Z_CERTAIN * group.spread, _ROUNDING)
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
    joined = LengthMoments(
        sum_moments(group.present for group in long), sum_moments(group.absent for group in long)
    )
    if joined.fewest < MIN_SCORES_PER_SIDE or any(
        group.fewest >= MIN_SCORES_PER_SIDE
        and group.gap - Z_LIKELY * group.spread > signal * group.expected / 2
        for group in groups
    ):
        return
    gap = joined.gap
    if gap + Z_CERTAIN * joined.spread < signal / 2:
        raise MissingCanaryError(
            f"Expected scores to increase by {signal:g} where a canary is present, got {gap:.2g}: "
            f"{_cause_of_loss(joined, claimed_noise)}. No verdict can be based on these scores.",
            gap,
        )


def _cause_of_loss(moments: LengthMoments, claimed_noise: float | None) -> str:
    """Return what makes canaries arrive at a fraction of their length: a smaller sum, with or without noise.

    A sum that is clipped again, or a noisy sum that is clipped, may be as private as claimed, so it is not a
    finding; but its canaries do not show that it is.
    """
    is_part = moments.gap > max(Z_LIKELY * moments.spread, _ROUNDING)
    if claimed_noise is None or not is_part:
        return (
            "the release does not contain the canaries that were added to the sum, or they were clipped "
            "together with other gradients instead of one by one (check with replay()), or the release is "
            "a mean instead of a sum"
        )
    ratio = math.sqrt(moments.absent.error * moments.absent.count) / claimed_noise
    if ratio < _MUCH_LESS:
        return (
            f"the release is scaled down together with its noise, which is {ratio:.2g} of the claim, so the "
            "noisy sum is clipped (noise is added before clipping), or the release is a mean instead of a sum"
        )
    return (
        "the sum is scaled down before the noise, so it is clipped again after its rows were added, or "
        "gradients are clipped together instead of one by one (check with replay()), or the sum is divided"
    )


def require_alike(scores: FloatArray, present: BoolArray, *, step: int, first: FloatArray) -> None:
    """Raise if the scores are not finite, or differ in number from those of the ``first`` step."""
    expected = first.shape if first.ndim == 1 else (first.size,)
    if scores.size == 0 or scores.shape != present.shape or scores.shape != expected:
        raise InputError(
            f"Expected a score and a presence flag for each of {expected[0] or 'some'} canaries in step "
            f"{step}, got shapes {scores.shape} and {present.shape}."
        )
    if not np.isfinite(scores).all():
        index = int(np.flatnonzero(~np.isfinite(scores))[0])
        overflow = ", or does a norm overflow, as in half precision, for canaries of 1e6 clipping norms"
        raise InputError(
            f"Expected finite scores in step {step}, got scores[{index}]={scores[index]}: did training "
            f"diverge{overflow if step == 0 else ''}?"
        )


def require_resumable(scores: Sequence[Any] | FloatArray, num_canaries: int | None) -> None:
    """Raise if a recorded state, steps x canaries, is not of ``num_canaries`` canaries."""
    if num_canaries is not None and len(scores) and len(scores[0]) != num_canaries:
        raise InputError(
            f"Expected a state with num_canaries={num_canaries}, as many as this observer has, got one with "
            f"{len(scores[0])}: pass num_canaries={len(scores[0])} to the observer."
        )


@runtime_checkable
class LiveCheck(Protocol):
    """A check that reads the objects of a training run, which a copy of its recorder must not contain."""

    def frozen(self, sample_rate: float | None) -> RunCheck:
        """Return a check with the same results, given the claimed sample rate, without these objects."""


def first_of(checks: Sequence[RunCheck], kind: type[_Check]) -> _Check | None:
    """Return the first check of a kind."""
    return next((check for check in checks if isinstance(check, kind)), None)
