"""The recorder of an observer: its claim is read from the training that it observes.

A recorder that gives no verdict on canaries that never arrived. Whether the canaries that joined a training
are to be seen in what it released. Noise of a training that a library makes: some coordinates of every step.
A training whose noise cannot be tested.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dpaudit._types import IntArray, ScoreArray
from dpaudit.accounting import Claim
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._tests import HeadTailBuffer
from dpaudit.errors import InputError
from dpaudit.observers._claims import Claims, Facts, Terms, require_terms
from dpaudit.recording import Recorder
from dpaudit.stats import Betting, Inference, Result

_ROUNDING = 1e-3  # of a clipping norm
_FEW, _SURELY = 10, 6.0  # scores, and standard errors, from which on a missing canary is certain


class ArrivalError(InputError):
    """Canaries that joined are not to be seen."""

    def __init__(self, message: str, gap: float = 0.0) -> None:
        super().__init__(message)
        self.gap = gap


class Side:
    """Count, mean and variance of the scores of one side, step by step."""

    def __init__(self, scores: ScoreArray | None = None) -> None:
        self.count, self._sum, self._squares = 0, 0.0, 0.0
        if scores is not None:
            self.add(scores)

    def add(self, scores: ScoreArray) -> None:
        """Some more of them."""
        self.count += scores.size
        self._sum += float(scores.sum())
        self._squares += float((scores * scores).sum())

    @property
    def mean(self) -> float:
        """Of all so far."""
        return self._sum / self.count

    @property
    def error(self) -> float:
        """The variance of the mean."""
        return max(self._squares / self.count - self.mean**2, 0.0) / self.count


def arrives(present: Side, absent: Side, signal: float) -> bool:
    """Whether canaries score what clipped ones do, as far as can be told."""
    gap, spread = present.mean - absent.mean, math.sqrt(present.error + absent.error)
    return abs(gap - signal) <= max(_SURELY * spread, _ROUNDING)


def require_arrival(present: Side, absent: Side, signal: float) -> None:
    """A training that drops the canaries hides what it does with the examples."""
    if min(present.count, absent.count) < _FEW:
        return
    gap, spread = present.mean - absent.mean, math.sqrt(present.error + absent.error)
    if gap + _SURELY * spread < signal / 2:
        raise ArrivalError(
            f"Expected scores to rise by {signal:g} where a canary is present, got {gap:.2g}: what "
            "is released does not have the canaries in it that joined the sum, or they were clipped together "
            "with others and not one by one (replay_step shows that), or it is a mean where a sum is "
            "expected. Scores say nothing of it.",
            gap,
        )


class ArrivingRecorder(Recorder, ABC):
    """A :class:`dpaudit.Recorder` of canaries that score ``signal`` or more where they are present.

    ``facts`` are what is known of the training when somebody asks.
    """

    def __init__(
        self, *, signal: float = 1.0, facts: Callable[[], Facts] | None = None, **options: Any
    ) -> None:
        self._signal, self._facts = signal, facts
        super().__init__(**options)

    @property
    def facts(self) -> Facts | None:
        """What is known of the training besides its claim."""
        return None if self._facts is None else self._facts()

    def audit(self, **method: Any) -> Result:
        seen = self.observations
        require_arrival(Side(seen.with_canary), Side(seen.without_canary), self._signal)
        return super().audit(**method)

    @abstractmethod
    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Tests of the noise of all steps against a noise multiplier; refused where they cannot be made."""


class UntestedError(InputError):
    """There is no noise to test, or its tests would not have the error rate that they say."""


_MOST = 1024  # coordinates: a few microseconds a step
_ROUNDED = 8.0  # how many roundings of the largest number a difference of sums may be off


@dataclass(frozen=True, eq=False)
class Places:
    """Which coordinates are looked at: all of a small model; of a large one the same ones of each parameter.

    The first ones, because generators that start anew for each parameter give these the same noise; and some
    that lie further and further behind.
    """

    indices: IntArray
    leaves: tuple[int, ...]
    """How many of each parameter."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Places:
        """For a gradient that is made of parameters of these sizes, one after another."""
        offsets = np.cumsum([0, *sizes])[:-1]
        if sum(sizes) <= _MOST:
            return cls(np.arange(sum(sizes)), tuple(sizes))
        inside = _inside(max(1, _MOST // len(sizes)), max(sizes))
        chosen = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _MOST)).astype(np.int64))
        parts = [offsets[leaf] + inside[inside < sizes[leaf]] for leaf in chosen]
        return cls(np.concatenate(parts), tuple(part.size for part in parts))


def _inside(count: int, size: int) -> IntArray:
    """So many places in a parameter: a half at its beginning, the others at growing distances."""
    first = np.arange(-(-count // 2))
    rest = np.geomspace(first.size, max(size - 1, first.size), count - first.size)
    return np.unique(np.concatenate([first, rest.astype(np.int64)]))


class KeptNoise:
    """The noise of the first and the last 2,048 steps in clipping norms; what is claimed is known later."""

    def __init__(self) -> None:
        self._rows = HeadTailBuffer()
        self._leaves: tuple[int, ...] = ()
        self._rounding = 0.0

    def observe(self, released: Any, known: Any, leaves: tuple[int, ...], *, norm: float, eps: float) -> None:
        """What was released and the sum that went into it, canaries and all, at the same coordinates.

        ``norm`` is the clipping norm, ``eps`` the relative precision of both.
        """
        found, sums = np.asarray(released, dtype=np.float64), np.asarray(known, dtype=np.float64)
        self._leaves = leaves
        self._rounding = max(self._rounding, _ROUNDED * eps * float(np.abs(sums).max(initial=0.0)) / norm)
        self._rows.add(((found - sums) / norm).astype(np.float32))

    def diagnose(self, *, noise_multiplier: float, confidence: float) -> Diagnosis:
        """The tests; refused without any noise that could be tested."""
        if self._rows.num_seen == 0:
            raise UntestedError("Expected the noise of at least one step, got none: did the training run?")
        tests = Diagnostics()
        for row in self._rows.rows:
            tests.observe_noise(
                row / noise_multiplier, self._leaves, rounding=self._rounding / noise_multiplier
            )
        return tests.diagnose(confidence)


_SOME_STEPS = 1000  # what the bets prepare for if nobody says how long the training will be
_SELDOM = 50  # an epsilon for every other number of steps is not cheap


class ObserverRecorder(ArrivingRecorder):
    """A :class:`dpaudit.Recorder` that learns from ``read`` what the training claims.

    What is ``given`` counts more. Without a number of steps, the claim is of those that were recorded. A
    present canary scores ``signal`` or more. ``not_covered`` says in sentences which parts of the training
    the canaries do not go through.
    """

    def __init__(
        self,
        read: Callable[[], Terms],
        given: Terms,
        *,
        not_covered: tuple[str, ...] = (),
        every: int | None = None,
        **options: Any,
    ) -> None:
        self._claims = Claims(read, given)
        self.not_covered = not_covered
        self.noise = KeptNoise()
        planned = given.num_steps
        super().__init__(
            claim=None,  # not known yet: see the property
            num_steps=_SOME_STEPS if planned is None else planned,
            every=_SELDOM if planned is None and every is None else every,
            **options,
        )

    @property
    def claim(self) -> Claim:
        return self._claims.claim(Terms(), self.num_done)

    @property
    def _is_over(self) -> bool:
        """Without a number of steps that was given, nobody knows before the recorder is closed."""
        return self._closed or self.num_done == self._claims.given.num_steps

    def audit(
        self,
        *,
        inference: Inference | None = None,
        claim: Claim | None = None,
        noise_multiplier: float | None = None,
        sample_rate: float | None = None,
        num_steps: int | None = None,
        delta: float | None = None,
        **method: Any,
    ) -> Result:
        """The verdict on the claim, any part of which can be given here; other keywords as for ``audit``."""
        require_terms(method)
        asked = Terms(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        )
        if inference is None and self._claims.given.num_steps is None and not self._looked:
            inference = Betting()  # nobody could have stopped the run because of what it showed
        self.observations  # noqa: B018  # a training that did not run has no claim either
        result = super().audit(
            inference=inference, claim=claim or self._claims.claim(asked, self.num_done), **method
        )
        return replace(result, not_covered=self.not_covered + self._claims.remarks(asked))

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Tests of the noise of all steps; refused if there is none, or if it may have ended the run.

        Their error rate is that of a number of steps that nobody chose by what the noise showed.
        """
        self._require_fixed_length()
        self._shown = True
        asked = Terms(noise_multiplier=noise_multiplier)
        claimed = self._claims.terms(asked, self.num_done).known("noise_multiplier")["noise_multiplier"]
        return self.noise.diagnose(noise_multiplier=claimed, confidence=confidence)

    def _require_fixed_length(self) -> None:
        planned = self._claims.given.num_steps
        if not self._looked or self.num_done == planned:
            return
        ends = "a run of no planned length" if planned is None else f"{self.num_done} of {planned} steps"
        raise UntestedError(
            f"Expected the number of steps not to depend on what they showed, got {ends} whose bound was "
            "looked at before the end: tests of the noise would have another error rate than they say. Pass "
            "num_steps= to the observer and make all of them, or look only after the end."
        )
