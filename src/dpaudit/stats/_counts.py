"""Errors of an attack: counts at a threshold, counts per step, and guesses without a threshold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import ArrayLike, BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.errors import InputError
from dpaudit.stats._observations import Observations, as_mask, chunks, plain_array, require_finite
from dpaudit.stats._presence import as_ids, joined_presence, require_fair_share

_Errors = TypeVar("_Errors")


@dataclass(frozen=True, kw_only=True)
class ErrorCounts:
    """Errors of the rule "present if score > threshold".

    >>> counts = ErrorCounts(false_positives=3, num_absent=100, false_negatives=8, num_present=200)
    >>> counts.fpr, counts.fnr
    (0.03, 0.04)
    """

    false_positives: int
    num_absent: int
    false_negatives: int
    num_present: int

    def __post_init__(self) -> None:
        for errors, of in (("false_positives", "num_absent"), ("false_negatives", "num_present")):
            number = _validate.integer(of, getattr(self, of))
            if _validate.integer(errors, getattr(self, errors), low=0) > number:
                raise InputError(f"{errors} must be at most {of}={number}, got {getattr(self, errors)}.")

    @classmethod
    def perfect(cls, num_absent: int, num_present: int) -> ErrorCounts:
        """Return the counts of an attack without errors."""
        return cls(false_positives=0, num_absent=num_absent, false_negatives=0, num_present=num_present)

    def exchanged(self) -> ErrorCounts:
        """Return the counts with the two sides exchanged."""
        return ErrorCounts(
            false_positives=self.false_negatives,
            num_absent=self.num_present,
            false_negatives=self.false_positives,
            num_present=self.num_absent,
        )

    @property
    def fpr(self) -> float:
        """The false positive rate: the fraction of scores without the canary that were called present."""
        return self.false_positives / self.num_absent

    @property
    def fnr(self) -> float:
        """The false negative rate: the fraction of scores with the canary that were called absent."""
        return self.false_negatives / self.num_present

    def to_dict(self) -> dict[str, int]:
        """Return plain values for JSON."""
        return asdict(self)


def _once_per_file(
    count: Callable[[Observations, float], _Errors],
) -> Callable[[Observations, float], _Errors]:
    """Count the errors in files only once for several methods; arrays in memory may change."""
    cached = lru_cache(maxsize=2)(count)

    def choose(observations: Observations, threshold: float) -> _Errors:
        return (cached if observations.has_files else count)(observations, threshold)

    return choose


@_once_per_file
def count(observations: Observations, threshold: float) -> ErrorCounts:
    """Count the errors at one threshold in a single pass with bounded memory."""
    if observations.with_canary.ndim == 2:
        return step_errors(observations, threshold).total()
    absent, present = observations.without_canary, observations.with_canary
    return ErrorCounts(
        false_positives=_count_above("without_canary", absent, threshold),
        num_absent=absent.size,
        false_negatives=present.size - _count_above("with_canary", present, threshold),
        num_present=present.size,
    )


def _count_above(name: str, scores: ScoreArray, threshold: float) -> int:
    # A Python float keeps float32 scores in float32, without a copy in double precision. The threshold is
    # then rounded to float32 as well, the precision of the scores.
    above = 0
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        with np.errstate(over="ignore"):  # a threshold above the range of float32
            above += int(np.count_nonzero(piece > threshold))
    return above


@_once_per_file
def step_errors(observations: Observations, threshold: float) -> StepErrors:
    """Count the errors of steps x canaries in each step, like :func:`count`."""
    absent, present = observations.without_canary, observations.with_canary
    sizes = [np.full(len(side), side.shape[1]) for side in (absent, present)]
    false_positives = _count_above_per_step("without_canary", absent, threshold)
    false_negatives = sizes[1] - _count_above_per_step("with_canary", present, threshold)
    return StepErrors(false_positives, sizes[0], false_negatives, sizes[1], by_coin=False)


def _count_above_per_step(name: str, scores: ScoreArray, threshold: float) -> IntArray:
    num_steps, num_canaries = scores.shape
    above = np.zeros(num_steps, dtype=np.int64)
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        first = start // num_canaries
        indices = start + np.flatnonzero(piece > threshold)
        step_counts = np.bincount(indices // num_canaries - first)
        above[first : first + step_counts.size] += step_counts
    return above


@dataclass(frozen=True)
class StepScores:
    """Scores of both sides, ordered by step.

    One-dimensional observations become min(sizes) steps: the larger side is distributed evenly over them,
    so that every score is used.
    """

    absent: ScoreArray
    absent_step: IntArray
    present: ScoreArray
    present_step: IntArray
    num_steps: int
    by_coin: bool

    @classmethod
    def of(cls, observations: Observations) -> StepScores:
        """Return the scores of ``observations`` of any shape by step."""
        observations = observations.in_memory()
        absent, present = observations.without_canary, observations.with_canary
        steps, count = observations.steps, observations.num_steps
        if steps is not None:
            return cls(absent, steps.without_canary, present, steps.with_canary, count, by_coin=True)
        return cls(
            absent.reshape(-1),
            _deal(absent.size, count),
            present.reshape(-1),
            _deal(present.size, count),
            count,
            by_coin=False,
        )

    @classmethod
    def outside(
        cls, scores: FloatArray, present: BoolArray, interval: tuple[float, float], *, by_coin: bool
    ) -> StepScores:
        """Return only the scores, steps x canaries, at most at the low or above the high end."""
        low, high = interval
        outside = np.nonzero((scores <= low) | (scores > high))
        scores, is_present, step = scores[outside], present[outside], outside[0]
        is_absent = ~is_present
        sides = (scores[is_absent], step[is_absent], scores[is_present], step[is_present])
        return cls(*sides, len(present), by_coin)

    def before(self, step: int) -> tuple[ScoreArray, ScoreArray]:
        """Return the absent and present scores of all steps before ``step``."""
        first, second = (int(np.searchsorted(steps, step)) for steps in (self.absent_step, self.present_step))
        return self.absent[:first], self.present[:second]

    def errors(self, threshold: FloatArray | float) -> StepErrors:
        """Return the errors in each step at that step's threshold, or at one for all."""
        limits: tuple[FloatArray | float, FloatArray | float] = (threshold, threshold)
        if isinstance(threshold, np.ndarray):
            limits = threshold[self.absent_step], threshold[self.present_step]
        above, below = self.absent > limits[0], self.present <= limits[1]
        return StepErrors(
            np.bincount(self.absent_step[above], minlength=self.num_steps),
            np.bincount(self.absent_step, minlength=self.num_steps),
            np.bincount(self.present_step[below], minlength=self.num_steps),
            np.bincount(self.present_step, minlength=self.num_steps),
            self.by_coin,
        )


@dataclass(frozen=True)
class StepErrors:
    """Error counts per step."""

    false_positives: IntArray
    num_absent: IntArray
    false_negatives: IntArray
    num_present: IntArray
    by_coin: bool

    @classmethod
    def of(cls, scores: FloatArray, present: BoolArray, threshold: float, *, by_coin: bool) -> StepErrors:
        """Count the errors in scores, steps x canaries."""
        above = scores > threshold
        num_present, num_above = present.sum(axis=1), above.sum(axis=1)
        true_positives = (above & present).sum(axis=1)
        return cls(
            false_positives=num_above - true_positives,
            num_absent=scores.shape[1] - num_present,
            false_negatives=num_present - true_positives,
            num_present=num_present,
            by_coin=by_coin,
        )

    def balanced(self) -> FloatArray:
        """Return one number in [0, 1] per step with mean (fpr + fnr) / 2.

        Under fair coins this is the fraction of wrong guesses, whatever the outcome of the coins; for fixed
        groups it is the average of the two error rates.
        """
        if self.by_coin:
            wrong = self.false_positives + self.false_negatives
            return wrong / (self.num_absent + self.num_present)
        return (self.false_positives / self.num_absent + self.false_negatives / self.num_present) / 2

    def after_first(self) -> StepErrors:
        """Return the errors without the first step."""
        counts = self.false_positives, self.num_absent, self.false_negatives, self.num_present
        fp, absent, fn, present = (column[1:] for column in counts)
        return StepErrors(fp, absent, fn, present, self.by_coin)

    def total(self) -> ErrorCounts:
        """Return the counts summed over all steps."""
        return ErrorCounts(
            false_positives=int(self.false_positives.sum()),
            num_absent=int(self.num_absent.sum()),
            false_negatives=int(self.false_negatives.sum()),
            num_present=int(self.num_present.sum()),
        )


def _deal(size: int, num_steps: int) -> IntArray:
    """Return the step of each of ``size`` scores, in order and as evenly as possible."""
    return np.arange(size) * num_steps // size


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """The outcome of guessing the presence of ``num_guesses`` of ``num_canaries`` canaries.

    An independent fair coin must have decided the presence of each canary.
    """

    num_canaries: int
    num_guesses: int
    num_correct: int

    def __post_init__(self) -> None:
        most = _validate.integer("num_canaries", self.num_canaries)
        for name in ("num_guesses", "num_correct"):
            value = _validate.integer(name, getattr(self, name), low=0)
            if value > most:
                raise InputError(f"{name} must be at most {most}, got {value}.")
            most = value

    @classmethod
    def at_threshold(
        cls,
        scores: ArrayLike,
        present: ArrayLike,
        *,
        threshold: float,
        ids: ArrayLike | None = None,
        present_ids: ArrayLike | None = None,
    ) -> Guesses:
        """Guess "present" for all scores above the threshold and "absent" for all others.

        ``threshold`` must be chosen before seeing the data: 0 for log-likelihood ratios. Presence is joined
        and checked as in :meth:`from_scores`.

        >>> Guesses.at_threshold([3.0, -1.0, 2.0, 0.5], [True, False, False, True], threshold=0.0)
        Guesses(num_canaries=4, num_guesses=4, num_correct=3)
        """
        values, truth = _scores_and_presence(scores, present, ids, present_ids)
        right = int(((values > _validate.finite("threshold", threshold)) == truth).sum())
        return cls(num_canaries=values.size, num_guesses=values.size, num_correct=right)

    @classmethod
    def from_scores(
        cls,
        scores: ArrayLike,
        present: ArrayLike,
        *,
        num_guesses: int,
        ids: ArrayLike | None = None,
        present_ids: ArrayLike | None = None,
    ) -> Guesses:
        """Guess "present" for the highest and "absent" for the lowest scores, half of the guesses each.

        ``num_guesses`` must be chosen before seeing the data. Ties are broken in an arbitrary order that
        depends only on the number of scores. ``ids`` and ``present_ids`` join both arrays, as in
        :meth:`Observations.from_presence`. A number of present canaries that is very unlikely under fair
        coins raises an ``InputError``.

        >>> Guesses.from_scores([3.0, 1.0, 2.0, 0.0], [True, False, False, False], num_guesses=2)
        Guesses(num_canaries=4, num_guesses=2, num_correct=2)
        """
        values, truth = _scores_and_presence(scores, present, ids, present_ids)
        if _validate.integer("num_guesses", num_guesses, low=0) > values.size:
            raise InputError(
                f"num_guesses must be at most {values.size}, the number of scores, got {num_guesses}."
            )
        # not by position: canaries are often listed by presence, which equal scores must not reveal
        shuffled = np.random.default_rng([0x71E5, values.size]).permutation(values.size)
        order = shuffled[np.argsort(values[shuffled], kind="stable")]
        low = num_guesses // 2
        high = num_guesses - low
        truth = truth[order]
        right = int((~truth[:low]).sum() + truth[truth.size - high :].sum())
        return cls(num_canaries=values.size, num_guesses=num_guesses, num_correct=right)

    def to_dict(self) -> dict[str, int]:
        """Return plain values for JSON."""
        return asdict(self)


def _scores_and_presence(
    scores: ArrayLike, present: ArrayLike, ids: ArrayLike | None, present_ids: ArrayLike | None
) -> tuple[FloatArray, BoolArray]:
    values = np.asarray(plain_array("scores", scores), dtype=np.float64)
    names = None if ids is None else as_ids("ids", ids, values.size)
    truth = np.asarray(joined_presence(plain_array("present", present), names, present_ids))
    if values.ndim != 1 or values.shape != truth.shape:
        raise InputError(
            f"scores and present must be one-dimensional and of the same length, got shapes {values.shape} "
            f"and {truth.shape}."
        )
    require_finite("scores", 0, values)
    truth = as_mask(truth, values.shape)
    require_fair_share(int(np.count_nonzero(truth)), truth.size)
    return values, truth
