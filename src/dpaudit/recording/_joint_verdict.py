"""One verdict from bound and tests: their shares of the error rate, what is not covered, and likely causes.

:class:`RunTests` are the tests of a recorder, and :class:`ShownBounds` says whether the run may have ended
because of its bound. :class:`ScoreSummary` estimates noise and signal, as clues to the cause of a violation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import scipy

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary
from dpaudit.diagnostics import (
    CheckResults,
    ClaimedStep,
    Diagnosis,
    NoiseCheck,
    ObservedStep,
    RunCheck,
    StepCheck,
    finding_kinds,
    share_error,
)
from dpaudit.diagnostics._step import UNTESTED_WITHOUT
from dpaudit.errors import InputError, quoted
from dpaudit.recording._claim_source import ReadClaim, TrainingInfo, UntestedError, claimed_noise
from dpaudit.stats import Betting, Fixed, Inference, Predictable, Result, ThresholdRule

MAY_HAVE_STOPPED = (
    "The run may have ended because of a bound that was shown before its end, which an estimate of the noise "
    "does not account for."
)
REPLAY = "recorder.replay(train_step)"
"""The call that decides whether a fact is innocent."""
_MIN_STEPS = 30  # needed to decide whether the signal depends on the number of present canaries
_CERTAIN = 6.0  # standard errors
_UNTESTED = "the noise is not tested: "
_STOPPED = "a bound was shown before the end, so the run may have ended because of its noise"
_SPENT = "an earlier audit of this run has spent the error rate of the tests"
_NO_LOG = "only the scores of this run were recorded"
_INTERIM = (
    "this audit is before the planned end of the run: its tests have half of the error rate that is left for "
    "tests, a later audit has the rest"
)
_DRAWN = "how batches are drawn"
_COUPLED = (
    "gradients that depend on other examples (through the loss, the inputs, weights, the choice of rows, or "
    "rows that are clipped together): use replay()"
)
_DIRECTIONS = (
    "the noise is tested per coordinate, per parameter tensor, in a few directions and against the sums of "
    "the last 16 steps; it may be smaller in other directions, or contain a part of an older sum"
)
_NEVER_COVERED = (
    "people with several rows; privacy is tested per row",
    "noise or batches that can be predicted from a seed",
    "what is published besides the noisy gradients of the observed steps, such as later steps, buffers, "
    "metrics, or the updates of a second optimizer",
    "what was computed from the data before training (encodings, a vocabulary, normalization), and earlier "
    "phases of training",
)


@runtime_checkable
class LiveCheck(Protocol):
    """A check that reads the objects of a training run, which a copy of its recorder must not contain."""

    def frozen(self, sample_rate: float | None) -> RunCheck:
        """Return a check with the same results, given the claimed sample rate, without these objects."""


class SupportsDiagnose(Protocol):
    """Tests on data added by the developer, such as ``dpaudit.Diagnostics``."""

    def diagnose(self, confidence: float = ...) -> Diagnosis:
        """Run the tests."""


def has_more_tests(tests: SupportsDiagnose | bool | None) -> bool:
    """Return whether ``tests`` of ``audit()`` adds tests; True and None are the default, False skips all."""
    if tests is None or isinstance(tests, bool):
        return False
    if not hasattr(tests, "diagnose"):
        raise InputError(
            "tests must be False, which skips the tests, or tests of the same run such as "
            f"dpaudit.Diagnostics(), got {quoted(tests)}."
        )
    return True


def is_test_of_noise(check: RunCheck) -> bool:
    """Return whether a check tests the noise of steps."""
    return bool(getattr(check, "tests_noise", False))


class RunTests:
    """The tests of a run besides its bound, with which they share one error rate.

    The shares are set before the first step, because the live bound has its share from the beginning: a run
    without anything to test, or with ``tests=False``, gives the whole error rate to the bound.
    ``has_signal`` returns whether canaries score as expected.
    """

    def __init__(
        self, checks: Sequence[RunCheck], claims: ReadClaim, has_signal: Callable[[], bool], *, wanted: bool
    ) -> None:
        self.checks, self._claims, self._has_signal = tuple(checks), claims, has_signal
        self._step_checks = [check for check in checks if isinstance(check, StepCheck)]
        self.is_wanted = _validate.flag("tests", wanted)
        self._shares: dict[int, float] = {}  # of the tests' error rate, by number of steps
        self._is_replayed = False

    @property
    def spent(self) -> float:
        """The share of the tests' error rate that audits have spent so far."""
        return sum(self._shares.values())

    @spent.setter
    def spent(self, share: float) -> None:
        self._shares = {-1: share} if share else {}

    def share(self, num_done: int, *, is_last: bool) -> float:
        """Return the share of the tests' error rate for an audit after this many steps.

        An audit that may be followed by another, on more steps, has half of what is left, and the last one
        all of it: together, they have their error rate once. The same steps again are the same test.
        """
        if num_done not in self._shares:
            left = max(1 - self.spent, 0.0)
            self._shares[num_done] = left if is_last else left / 2
        return self._shares[num_done]

    def __getstate__(self) -> dict[str, Any]:
        rate = self._claims.sample_rate()
        checks = [check.frozen(rate) if isinstance(check, LiveCheck) else check for check in self.checks]
        return {**vars(self), "checks": tuple(checks)}

    def observe(self, step: ObservedStep) -> None:
        """Pass a step to all checks."""
        if self.is_wanted:
            for check in self._step_checks:
                check.observe(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all checks that have one."""
        return {type(check).__name__: check.state_dict() for check in self._step_checks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume the checks from the states of all that had one."""
        for check in self._step_checks:
            if type(check).__name__ in state:
                check.load_state_dict(state[type(check).__name__])

    @property
    def noise(self) -> NoiseCheck | None:
        """The check of the noise, if there is one."""
        return next((check for check in self.checks if isinstance(check, NoiseCheck)), None)

    @property
    def has_tests(self) -> bool:
        """Whether there is anything to test, against a claim about Gaussian noise."""
        return bool(self.checks) and self._claims.is_gaussian

    def levels(self, confidence: float, *, has_more: bool = False) -> tuple[float, float | None]:
        """Return the confidence of the bound and of the tests, None if there are none."""
        has_tests = has_more or (self.is_wanted and self.has_tests)
        bound, tests = share_error(1 - confidence, has_bound=True, has_tests=has_tests)
        return bound, tests if has_tests else None

    def diagnose(
        self, noise_multiplier: float | None, confidence: float, claim: Claim | None = None
    ) -> Diagnosis:
        """Run all tests against the noise multiplier, by default the claimed one."""
        if not self.checks:
            raise UntestedError(
                "This recorder has no noise to test: only those of observers log it. Pass the noise to "
                "Diagnostics() instead."
            )
        claimed = self._claimed(noise_multiplier, confidence, claim)
        if self.noise is not None and self.noise.num_steps == 0:
            if not self.is_wanted:
                raise UntestedError("There is no noise to test, because the audit was made with tests=False.")
            raise UntestedError("No step was recorded, so there is no noise to test. Did training run?")
        gaps = () if any(map(is_test_of_noise, self.checks)) else (_UNTESTED + _NO_LOG,)
        return Diagnosis.of((), confidence=confidence, not_covered=gaps).joined(
            *self._results(self.checks, claimed)
        )

    def add_replay(self, replay: RunCheck) -> None:
        """Add the comparison of a replayed step, which decides facts that are to check."""
        self.checks, self._is_replayed = (*self.checks, replay), True

    def _results(self, checks: Sequence[RunCheck], claimed: ClaimedStep) -> list[CheckResults]:
        """Return what the checks show; what a replay has decided is a note."""
        results = [check.results(claimed) for check in checks]
        if not self._is_replayed:
            return results
        kinds, decided = finding_kinds(), list[str]()
        for number, result in enumerate(results):
            is_open = [kinds[fact.name].decided_by != REPLAY for fact in result.to_check]
            facts = list(zip(result.to_check, is_open, strict=True))
            decided += [
                f"decided by the replay, if its step does it: {fact.sentence}"
                for fact, is_left in facts
                if not is_left
            ]
            left = tuple(fact for fact, is_left in facts if is_left)
            results[number] = replace(result, to_check=left)
        return [*results, CheckResults(notes=tuple(decided))]

    def _claimed(self, noise_multiplier: float | None, confidence: float, claim: Claim | None) -> ClaimedStep:
        return ClaimedStep(
            noise_multiplier=self._claims.noise_multiplier(noise_multiplier),
            sample_rate=self._claims.sample_rate(),
            confidence=confidence,
            has_signal=self._has_signal,
            claim=claim,
        )

    def _certain(self, claim: Claim | None, confidence: float) -> Diagnosis | None:
        """Return facts, which need no statistics and hold whenever the run ended; None if there are none."""
        noise_multiplier = claimed_noise(claim)
        if noise_multiplier is None:
            return None
        claimed = self._claimed(noise_multiplier, confidence, claim)
        others = [check for check in self.checks if not is_test_of_noise(check)]
        results = self._results(others, claimed)
        facts = [CheckResults(certain=result.certain, to_check=result.to_check) for result in results]
        diagnosis = Diagnosis.of((), confidence=confidence).joined(*facts)
        return diagnosis if diagnosis.findings or diagnosis.to_check else None

    def join(
        self,
        result: Result,
        confidence: float | None,
        *,
        more: SupportsDiagnose | bool | None,
        num_done: int,
        is_last: bool,
        may_have_stopped: bool,
        covers_sampling: bool,
    ) -> Result:
        """Return the result with the tests at this confidence, and with what is not covered.

        ``more`` are tests that the user adds, or False to skip all tests. Audits after different numbers of
        steps share the error rate of the tests, see :meth:`share`. If the run ``may_have_stopped`` because of
        its bound, only findings without statistics hold.
        """
        diagnosis, gaps = None, list(result.not_covered)
        claim = result.claim if isinstance(result.claim, Claim) else None
        if confidence is None or more is False:
            gaps.append(_UNTESTED + self._why_untested(is_skipped=confidence is not None))
        elif may_have_stopped or not (share := self.share(num_done, is_last=is_last)):
            diagnosis = self._certain(claim, confidence)
            gaps.append(_UNTESTED + (_STOPPED if may_have_stopped else _SPENT))
        else:
            result = replace(result, notes=(*result.notes, _INTERIM)) if not is_last else result
            try:
                diagnosis = self._tested(claim, 1 - share * (1 - confidence), more)
            except UntestedError as error:
                gaps.append(f"{_UNTESTED}{error}")
        if diagnosis is not None:
            gaps += diagnosis.not_covered
        result = replace(result, diagnosis=result.claim.diagnosed(diagnosis))
        general = self._general_gaps(gaps, diagnosis, covers_sampling=covers_sampling)
        not_covered = tuple(dict.fromkeys([*gaps, *general, *_NEVER_COVERED]))
        specific = dict.fromkeys(gap for gap in gaps if gap not in UNTESTED_WITHOUT.values())
        return replace(result, not_covered=not_covered, specific=tuple(specific))

    def _general_gaps(
        self, gaps: Sequence[str], diagnosis: Diagnosis | None, *, covers_sampling: bool
    ) -> Iterator[str]:
        """Yield what runs of this kind do not cover, besides the gaps of this run."""

        def is_stated(beginning: str) -> bool:
            return any(gap.startswith(beginning) for gap in gaps)

        covers_sampling = covers_sampling or (diagnosis is not None and diagnosis.tests_sampling)
        if not covers_sampling and not is_stated(_DRAWN):
            yield (
                f"{_DRAWN}: the claim assumes Poisson sampling, and scores of single steps do not "
                "depend on it"
            )
        if diagnosis is not None and not is_stated(_UNTESTED):
            yield _DIRECTIONS
        if not any(getattr(check, "tests_coupling", False) for check in self.checks):  # as a replay does
            yield _COUPLED

    def _why_untested(self, *, is_skipped: bool) -> str:
        if is_skipped:
            return "audit() was called with tests=False, and the bound keeps its share of the error rate"
        if not self.checks:
            return _NO_LOG
        if not self._claims.is_gaussian:
            return "the claim is not about Gaussian noise"
        if not self.is_wanted:
            return "the audit was set up with tests=False"
        return "the resumed run began with the whole error rate for the bound"

    def _tested(
        self, claim: Claim | None, confidence: float, more: SupportsDiagnose | bool | None
    ) -> Diagnosis:
        added = None if more is None or isinstance(more, bool) else more.diagnose(confidence)
        if not (self.is_wanted and self.has_tests) and added is not None:
            return added
        noise_multiplier = claimed_noise(claim)
        if noise_multiplier is None:
            raise UntestedError(f"The claim must be about Gaussian noise, got {claim}.")
        diagnosis = self.diagnose(noise_multiplier, confidence, claim)
        if added is None:
            return diagnosis
        names = {check.name for check in diagnosis.checks}  # the same data may be passed twice
        new = tuple(check for check in added.checks if check.name not in names)
        return diagnosis.joined(
            CheckResults(
                checks=new, to_check=added.to_check, notes=added.notes, not_covered=added.not_covered
            )
        )


def remaining_level(bound: float, joint: float) -> float | None:
    """Return the confidence of tests whose error rate a bound leaves; None if it leaves nothing."""
    return None if bound <= joint else 1 - (bound - joint)


@dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """Noise and signal in clipping norms, estimated from the scores; the bound does not rest on them."""

    noise: float
    low: float  # lower end of the interval for the noise
    high: float
    signal: float
    is_crowded: bool
    facts: TrainingInfo | None

    @classmethod
    def of(cls, scores: FloatArray, present: BoolArray, facts: TrainingInfo | None) -> ScoreSummary:
        """Summarize all scores of a run, steps x canaries."""
        absent = scores[~present]
        square, count = float(np.mean(absent**2)), absent.size
        levels = 0.9995, 0.0005  # the interval is wide to avoid false hints
        low, high = (math.sqrt(square * count / scipy.stats.chi2.ppf(level, count)) for level in levels)
        return cls(
            noise=math.sqrt(square),
            low=low,
            high=high,
            signal=_signal(scores, present, facts),
            is_crowded=_is_crowded(scores, present),
            facts=facts,
        )

    def known(self, claimed: float | None) -> dict[str, Any]:
        """Return keyword arguments for ``likely_causes``. Too much noise causes no leak."""
        clues: dict[str, Any] = {"signal": self.signal, "is_crowded": self.is_crowded}
        if self.facts is not None:
            clues["canary_scale"] = self.facts.canary_scale
            clues["batch_size"], clues["max_grad_norm"] = self.facts.batch_size, self.facts.max_grad_norm
        if self.noise == 0:
            clues["noise_ratio"] = 0.0
        elif claimed is not None:
            clues["noise_multiplier"] = claimed
            if self.high < claimed:
                clues["noise_ratio"] = self.noise / claimed
                clues["interval"] = self.low / claimed, self.high / claimed
        return clues


def _signal(scores: FloatArray, present: BoolArray, facts: TrainingInfo | None) -> float:
    """Return the mean score excess of the present canaries that are not short."""
    if facts and isinstance(facts.canary, GradientCanary):
        counted = scores.shape[1] - facts.canary.num_excluded(scores.shape[1])
        scores, present = scores[:, :counted], present[:, :counted]
    if present.all() or not present.any():
        return math.nan
    return float(scores[present].mean() - scores[~present].mean())


def _is_crowded(scores: FloatArray, present: BoolArray) -> bool:
    """Return whether the signal depends on the number of present canaries, as if clipped together."""
    numbers = present.sum(axis=1)
    some = (numbers > 0) & (numbers < present.shape[1])
    if np.count_nonzero(some) < _MIN_STEPS or np.ptp(numbers[some]) == 0:
        return False
    counts = numbers[some].astype(np.float64)
    means = np.where(present, scores, 0.0).sum(axis=1)[some] / counts
    fit = scipy.stats.linregress(counts, means)
    change = abs(fit.slope) * counts.mean()  # if the number of present canaries doubles
    return bool(abs(fit.slope) > _CERTAIN * fit.stderr and change > 0.2 * abs(means.mean()))


class ShownBounds:
    """Whether bounds of a run were shown, and whether the run may have ended because of one."""

    def __init__(self, planned: int | None) -> None:
        self._planned = planned
        self.is_closed = False  # whether the run was marked as over
        self.any = False
        self.early = False  # whether one was shown before the end

    def note_step(self) -> None:
        """Note that the run continues: if a bound was shown, it was before the end, and may be the reason."""
        self.early, self.is_closed = self.early or self.any, False

    def note(self, num_done: int) -> None:
        """Note that a bound is shown; unless the run is over, it may be ended because of that."""
        self.any = True
        self.early = self.early or not self.is_over(num_done)

    def is_over(self, num_done: int) -> bool:
        """Return whether the run has ended."""
        return self.is_closed or num_done == self._planned

    def is_last(self, num_done: int) -> bool:
        """Return whether no audit with tests can follow, on more steps; a run that is over may continue."""
        return self._planned is None or num_done > self._planned or self.is_over(num_done)

    def may_have_stopped(self, num_done: int) -> bool:
        """Return whether the number of steps may depend on the scores."""
        return self.early and num_done != self._planned

    def require_stoppable(
        self, inference: Inference | None, rule: ThresholdRule | None, num_done: int
    ) -> None:
        """Raise on a method that needs a number of steps that does not depend on the scores."""
        if not self.may_have_stopped(num_done):
            return
        is_inference = not isinstance(inference, Betting | None)
        if is_inference or not isinstance(rule, Fixed | Predictable | None):
            method = inference if is_inference else rule
            problem = f"{method!r} would not have its stated error rate. Use Betting(), pass"
            raise InputError(self.stopped(problem, num_done))

    def stopped(self, problem: str, num_done: int) -> str:
        """Return the message of an error: what the possible end because of a bound makes impossible."""
        planned = self._planned
        ends = "a run of unplanned length" if planned is None else f"{num_done} of {planned} steps"
        return (
            f"The number of steps must not depend on the scores, but after {ends} a bound was shown before "
            f"the end: {problem} num_steps= to the observer and run all of them, or show the bound only "
            "after the end."
        )
