"""The fixture ``dp_audit``, which audits a step or a recorder, or runs noise tests, and may fail the test.

``FailureMessage`` is what the test then says: the claim, the bound, findings and likely causes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast, overload

import numpy as np
import pytest

from dpaudit import _validate
from dpaudit._interrupts import machine_fault
from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary, Mixed, Mixture
from dpaudit.diagnostics import Diagnosis, Diagnostics, Leaves, likely_causes
from dpaudit.diagnostics._diagnosis import joint_causes
from dpaudit.errors import InputError
from dpaudit.observers._arrays import require_rows
from dpaudit.observers._residuals import UnknownSumError
from dpaudit.observers._session import NUMBERS, claimed_numbers
from dpaudit.observers.step import OTHERS_REPLACED, observe_step
from dpaudit.pytest_plugin._suite import (
    AuditCall,
    SuiteAudits,
    UnderpoweredWarning,
    mark_incomplete,
    note,
    note_error,
)
from dpaudit.recording import MissingCanaryError, Recorder, SupportsDiagnose, TrainingInfo, claimed_noise
from dpaudit.recording._joint_verdict import ScoreSummary
from dpaudit.stats import PRIVACY, Result, Verdict

Method = TypeVar("Method", bound=Callable[..., Any])

_MIXTURE, _MIXED = Mixture(), Mixed()
_OF_STEP = "_dpaudit_of_step"  # attribute of an exception that the tested step has raised
# verdicts, weak audits if pytest turns warnings into failures, and requests to stop
_MEANT = (
    pytest.fail.Exception,
    pytest.skip.Exception,
    pytest.exit.Exception,
    UnderpoweredWarning,
    KeyboardInterrupt,
)


def _audit_call(method: Method) -> Method:
    """Begin a call; list an input error in the table with its rerun command, without dpaudit's frames."""

    @wraps(method)
    def wrapped(self: DpAudit, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        call: AuditCall | None = None
        try:
            call = self._begin(options.get("confidence")).call
            return method(self, *args, **options)
        except InputError as error:
            if call is not None:
                note_error(self._node, call.number)
                error.add_note(f"rerun: {call.rerun}")
            raise error.with_traceback(None) from None
        except _MEANT:
            raise
        except BaseException as error:  # also SystemExit, which pytest would call a failure
            if not getattr(error, _OF_STEP, False) or machine_fault(error) is not None:
                note_error(self._node, 1 if call is None else call.number)
                mark_incomplete(error)
                error.add_note("dpaudit: the audit could not be completed, and nothing was judged.")
            raise

    return cast("Method", wrapped)


class DpAudit:
    """The audits of one test; a refuted claim fails the test.

    ``seed`` is for an observer or a training run in the test; ``num_steps`` is the session's budget.
    """

    def __init__(self, node: pytest.Item, session: SuiteAudits) -> None:
        self._node, self._session = node, session
        self._report: FailureMessage
        self.seed = session.seed_of(node.nodeid, 0)
        self.num_steps = session.num_steps

    @overload
    def __call__(self, subject: Diagnostics, **options: Any) -> Diagnosis: ...
    @overload
    def __call__(self, subject: Callable[[Any], Any] | Recorder, **options: Any) -> AuditOutcome: ...
    def __call__(self, subject: Any, **options: Any) -> AuditOutcome | Diagnosis:
        """Audit ``subject``; keywords are as in :meth:`step`, :meth:`recorded` or :meth:`diagnosed`."""
        __tracebackhide__ = True
        if isinstance(subject, Recorder):
            return self.recorded(subject, **options)
        if isinstance(subject, Diagnostics):
            return self.diagnosed(subject, **options)
        if callable(subject):
            return self.step(subject, **options)
        hint = ": pass its .recorder" if hasattr(subject, "recorder") else ""
        raise InputError(
            "Expected a step, which is a function of per-example gradients, or the recorder of an observer, "
            f"got an object of type {type(subject).__name__}{hint}."
        )

    @_audit_call
    def step(
        self,
        step: Callable[[Any], Any],
        *,
        claim: Claim,
        max_grad_norm: float,
        gradients: Any = None,
        num_parameters: int | None = None,
        batch_size: float | None = None,
        leaves: Leaves | None = None,
        canary: GradientCanary | None = None,
        num_canaries: int | None = None,
        num_steps: int | None = None,
        confidence: float | None = None,  # noqa: ARG002  # used by _audit_call
    ) -> AuditOutcome:
        """Audit a function from per-example gradients to a privatized gradient, as in ``observe_step``.

        ``gradients`` are those of other examples; without them, ``num_parameters`` is the gradient's length.
        ``leaves`` are the sizes of the parameters that a gradient consists of. The default canary is that of
        ``observe_step``, or ``Mixed()`` if the claim is not about Gaussian noise and only the bound counts.
        """
        __tracebackhide__ = True
        if canary is None:
            canary = _MIXED if claimed_noise(claim) is None else _MIXTURE
        others = _other_gradients(gradients, num_parameters)
        try:
            recorder = observe_step(
                _watched(step, is_given_numpy=num_parameters is not None),
                others,
                claim=claim,
                max_grad_norm=max_grad_norm,
                batch_size=batch_size,
                num_steps=self.num_steps if num_steps is None else num_steps,
                canary=canary,
                num_canaries=num_canaries,
                leaves=leaves,
                seed=self._report.call.seed,
            )
        except UnknownSumError as error:
            why = str(error)
        else:
            return self._audit(recorder)
        return self._fail_without_verdict(why, None, None)

    @_audit_call
    def recorded(
        self,
        recorder: Recorder,
        *,
        claim: Claim | None = None,
        tests: SupportsDiagnose | None = None,
        confidence: float | None = None,  # noqa: ARG002
        **options: Any,
    ) -> AuditOutcome:
        """Audit the recorder of an observer or of the native engine; keywords are as in its ``audit()``.

        Pass the claim of the real training run, either as ``claim`` or as its numbers. ``tests`` are
        ``Diagnostics`` or a ``Diagnose`` hook of the same training run, for recorders without noise.
        """
        __tracebackhide__ = True
        if claim is not None:
            claimed_numbers(claim, **{name: options.get(name) for name in NUMBERS})  # refuses both
            options["claim"] = claim
        return self._audit(recorder, tests=tests, **options)

    @_audit_call
    def diagnosed(self, tests: SupportsDiagnose, *, confidence: float | None = None) -> Diagnosis:  # noqa: ARG002
        """Run tests on data that the developer has added, without auditing scores."""
        __tracebackhide__ = True
        diagnosis = tests.diagnose(1 - self._report.error_rate)
        note(self._node, self._report.call.number, None, diagnosis)
        if diagnosis.findings:
            pytest.fail(self._report.findings(diagnosis), pytrace=False)
        return diagnosis

    def _begin(self, confidence: float | None) -> FailureMessage:
        call = self._session.next_call(self._node.nodeid)
        test_confidence = None if confidence is None else _validate.confidence(confidence)
        self._report = FailureMessage(self._session, call, test_confidence)
        return self._report

    def _audit(self, recorder: Recorder, **options: Any) -> AuditOutcome:
        __tracebackhide__ = True
        try:
            outcome = AuditOutcome(recorder.audit(confidence=1 - self._report.error_rate, **options))
        except MissingCanaryError as error:
            why, gap = str(error), error.gap
        else:
            return self._conclude(outcome, recorder)
        # outside the handler, where pytest would print the error twice
        return self._fail_without_verdict(why, gap, recorder.facts)

    def _fail_without_verdict(self, why: str, gap: float | None, facts: TrainingInfo | None) -> NoReturn:
        """Fail the test: passing without a verdict would be worse."""
        __tracebackhide__ = True
        note_error(self._node, self._report.call.number)
        pytest.fail(self._report.no_verdict(why, gap, facts), pytrace=False)

    def _conclude(self, outcome: AuditOutcome, recorder: Recorder) -> AuditOutcome:
        __tracebackhide__ = True
        result = outcome.result
        note(self._node, self._report.call.number, result, outcome.diagnosis)
        if result.refuted:
            pytest.fail(self._report.failure(result, _summarized(recorder)), pytrace=False)
        if result.verdict is Verdict.UNDERPOWERED:
            text = f"{result.verdict.value} Power: {result.power}. Use more steps or canaries."
            self._node.warn(UnderpoweredWarning(text))
        return outcome


@dataclass(frozen=True)
class AuditOutcome:
    """The outcome of an audit that has not failed its test."""

    result: Result

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Tests of the noise; None if only scores are known, or if the bound may have stopped the run."""
        return self.result.diagnosis


def _summarized(recorder: Recorder) -> ScoreSummary | None:
    """Return the noise and signal of scores of single steps."""
    state = recorder.state_dict()
    if "scores" not in state:
        return None
    return ScoreSummary.of(state["scores"], state["present"], recorder.facts)


def _other_gradients(gradients: Any, num_parameters: int | None) -> Any:
    """Return the gradients of the other examples; no rows if only the number of parameters is given."""
    if (gradients is None) == (num_parameters is None):
        raise InputError(
            "Expected either gradients=... of the other examples or num_parameters=..., got "
            f"{'neither' if gradients is None else 'both'}."
        )
    if num_parameters is not None:
        return np.zeros((0, _validate.integer("num_parameters", num_parameters)), np.float32)
    require_rows(gradients)
    return gradients


def _watched(step: Callable[[Any], Any], *, is_given_numpy: bool) -> Callable[[Any], Any]:
    """Return the step with a mark on its errors, since others are not errors of the tested code.

    If dpaudit chose numpy for its arrays, a note says how to pass others.
    """

    @wraps(step)
    def wrapped(rows: Any) -> Any:
        try:
            return step(rows)
        except BaseException as error:
            setattr(error, _OF_STEP, True)
            if is_given_numpy and isinstance(error, AttributeError | TypeError):
                error.add_note(
                    "With num_parameters=..., dp_audit passes numpy arrays to the step. For torch or jax, "
                    f"pass gradients=torch.zeros(0, {rows.shape[1]}) or its jax.numpy equivalent."
                )
            raise

    return wrapped


@dataclass(frozen=True)
class FailureMessage:
    """The messages of one call: why it failed its test, how the error rate is shared, and how to rerun it."""

    session: SuiteAudits
    call: AuditCall
    own_confidence: float | None = None

    @property
    def error_rate(self) -> float:
        """The probability of a false alarm allotted to this call."""
        confidence = self.session.confidence if self.own_confidence is None else self.own_confidence
        return self.call.error_share * (1 - confidence)

    def failure(self, result: Result, scores: ScoreSummary | None) -> str:
        """Return the message for a refuted claim: bound, estimated noise, findings, and likely causes."""
        claimed = claimed_noise(result.claim)
        lines = [f"claim: {result.claim.summary}", f"bound: {result.bound.statement}"]
        if result.estimate.noise is not None:
            lines.append(f"estimate: {result.estimate.noise}")
        lines += [self._session_line, *(text for text in result.not_covered if text == OTHERS_REPLACED)]
        if scores is not None:
            lines += [noise_line(scores, claimed), canary_line(scores)]
        lines += [f"finding: {finding}" for finding in result.findings]
        return self._text(_title(result), lines, result.likely_causes())

    def no_verdict(self, why: str, gap: float | None, facts: TrainingInfo | None) -> str:
        """Return the message for an audit without a verdict, with likely causes."""
        causes: tuple[str, ...] = ()
        if gap is not None and facts is not None:
            scale, batch_size = facts.canary_scale, facts.batch_size
            causes = likely_causes(signal=gap, canary_scale=scale, batch_size=batch_size)
        return self._text("no verdict.", [f"reason: {why}"], causes)

    def findings(self, diagnosis: Diagnosis) -> str:
        """Return the message for findings of tests on data that the developer has added."""
        lines = [self._session_line, *(f"finding: {finding}" for finding in diagnosis.findings)]
        return self._text("the training run does not match its claim.", lines, joint_causes(diagnosis, {}))

    def _text(self, title: str, lines: Sequence[str], causes: Sequence[str]) -> str:
        call = "" if self.call.number == 1 else f" (call {self.call.number} of the test)"
        lines = [*lines, *(f"possible cause: {cause}" for cause in causes), *self._rerun_lines]
        return "\n".join([f"dpaudit{call}: {title}", *(f"  {line}" for line in lines)])

    @property
    def _session_line(self) -> str:
        count = self.session.num_tests
        tests = "1 test that uses" if count == 1 else f"{count} tests that use"
        return f"session: {_validate.percent(self.session.confidence)} joint confidence for {tests} dp_audit"

    @property
    def _rerun_lines(self) -> list[str]:
        lines = [f"rerun: {self.call.rerun}"]
        if self.own_confidence is not None and self.session.num_tests > 1:
            lines.append("(rerun alone, a call with its own confidence= does not share it with other tests)")
        return lines


def _title(result: Result) -> str:
    if PRIVACY in result.refuted:
        return (
            f"epsilon >= {result.bound.epsilon:.3g}, but {result.claim.epsilon:.3g} is claimed. "
            f"{result.sentence}"
        )
    return f"{result.findings[0].name}: {result.sentence}"


def noise_line(scores: ScoreSummary, claimed: float | None) -> str:
    """Return the noise in clipping norms, or relative to the claim."""
    if scores.noise == 0:
        return "noise: none"
    low, high = scores.low, scores.high
    if claimed is None:
        return f"noise: {scores.noise:.3g} times the clipping norm ({low:.3g} to {high:.3g})"
    ratio = scores.noise / claimed
    return f"noise: {ratio:.3g} of the claimed level ({low / claimed:.3g} to {high / claimed:.3g})"


def canary_line(scores: ScoreSummary) -> str:
    """Return the signal of a canary in the scores, an estimate that may exceed 1 by chance."""
    signal = f"{scores.signal:.3g}"
    spread = "" if scores.spread_signal is None else f" (spread canaries: {scores.spread_signal:.3g})"
    return f"canary: estimated at {signal} times the clipping norm{spread}; at most 1 if clipped correctly"
