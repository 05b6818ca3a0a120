"""The fixture ``dp_audit``, which audits a step or a recorder, or runs noise tests, and may fail the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn, Protocol, TypeVar, cast, overload

import numpy as np
import pytest

from dpaudit import _validate
from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary, Mixed
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._diagnosis import flagged_by, share_error
from dpaudit.diagnostics._noise_record import Leaves
from dpaudit.errors import InputError
from dpaudit.observers._arrays import require_rows
from dpaudit.observers._residuals import UnknownSumError
from dpaudit.observers.step import observe_step
from dpaudit.pytest_plugin._message import FailureMessage, ScoreSummary, claimed_noise
from dpaudit.pytest_plugin._session import AuditSession
from dpaudit.pytest_plugin._summary import UnderpoweredWarning, note, note_error
from dpaudit.recording import ArrivalError, Recorder, UntestedError, WholeRunRecorder
from dpaudit.stats import Result, Verdict

AnyRecorder = Recorder | WholeRunRecorder
Method = TypeVar("Method", bound=Callable[..., Any])

_MIXED = Mixed()
_CANARIES = 64
_WEAK = 2.0  # an audit that detects no leak below this multiple of the claim is weak
_ZEROS = "other gradients: replaced by zeros, because their sum is not a sum of clipped gradients"


def _audit_call(method: Method) -> Method:
    """Begin a call; list an input error in the table with its rerun command, without dpaudit's frames."""

    @wraps(method)
    def wrapped(self: DpAudit, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        report = self._begin(options.get("confidence"))
        try:
            return method(self, *args, **options)
        except InputError as error:
            note_error(self._node, report.call.number)
            error.add_note(f"rerun: {report.call.rerun}")
            raise error.with_traceback(None) from None

    return cast("Method", wrapped)


class DpAudit:
    """The audits of one test; a refuted claim fails the test.

    ``seed`` is for an observer or a training run in the test; ``num_steps`` is the session's budget.
    """

    def __init__(self, node: pytest.Item, session: AuditSession) -> None:
        self._node, self._session = node, session
        self._report: FailureMessage
        self.seed = session.seed_of(node.nodeid, 0)
        self.num_steps = session.num_steps

    @overload
    def __call__(self, subject: Diagnostics, **options: Any) -> Diagnosis: ...
    @overload
    def __call__(self, subject: Callable[[Any], Any] | AnyRecorder, **options: Any) -> AuditOutcome: ...
    def __call__(self, subject: Any, **options: Any) -> AuditOutcome | Diagnosis:
        """Audit ``subject``; keywords are as in :meth:`step`, :meth:`recorded` or :meth:`diagnosed`."""
        __tracebackhide__ = True
        if isinstance(subject, AnyRecorder):
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
        canary: GradientCanary = _MIXED,
        num_canaries: int | None = None,
        num_steps: int | None = None,
        confidence: float | None = None,  # noqa: ARG002  # used by _audit_call
    ) -> AuditOutcome:
        """Audit a function from per-example gradients to a privatized gradient, as in ``observe_step``.

        ``gradients`` are those of other examples; without them, ``num_parameters`` is the gradient's length.
        ``leaves`` are the sizes of the parameters that a gradient consists of.
        """
        __tracebackhide__ = True
        others = _other_gradients(gradients, num_parameters)
        default_canaries = max(1, min(_CANARIES, others.shape[1] // 2))

        def observe(rows: Any) -> Recorder:
            return observe_step(
                step if num_parameters is None else _with_numpy_hint(step),
                rows,
                claim=claim,
                max_grad_norm=max_grad_norm,
                batch_size=batch_size,
                num_steps=self.num_steps if num_steps is None else num_steps,
                canary=canary,
                num_canaries=default_canaries if num_canaries is None else num_canaries,
                leaves=leaves,
                seed=self._report.call.seed,
            )

        try:
            return self._audit(observe(others))
        except UnknownSumError as error:
            unknown = error
        zeros = 0 * others  # unaffected by any clipping
        return self._audit(observe(zeros), unknown=unknown)

    @_audit_call
    def recorded(
        self,
        recorder: AnyRecorder,
        *,
        tests: SupportsDiagnose | None = None,
        confidence: float | None = None,  # noqa: ARG002
        **claim: Any,
    ) -> AuditOutcome:
        """Audit the recorder of an observer or of the native engine; keywords are as in its ``audit()``.

        ``tests`` are ``Diagnostics`` or a ``Diagnose`` hook of the same training run, for recorders without
        noise.
        """
        __tracebackhide__ = True
        return self._audit(recorder, tests=tests, **claim)

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
        own = None if confidence is None else _validate.confidence(confidence)
        self._report = FailureMessage(self._session, call, own)
        return self._report

    def _audit(
        self, recorder: AnyRecorder, unknown: UnknownSumError | None = None, **options: Any
    ) -> AuditOutcome:
        __tracebackhide__ = True
        gap: float | None = None
        try:
            outcome = _outcome(recorder, self._report.error_rate, **options)
        except ArrivalError as error:
            why, gap = str(error), error.gap
        else:
            if unknown is None or outcome.is_bad:
                return self._conclude(outcome, recorder, () if unknown is None else (_ZEROS,))
            why = str(unknown)
        # outside the handler, where pytest would print the error twice
        return self._fail_without_verdict(why, gap, recorder)

    def _fail_without_verdict(self, why: str, gap: float | None, recorder: AnyRecorder) -> NoReturn:
        """Fail the test: passing without a verdict would be worse."""
        __tracebackhide__ = True
        note_error(self._node, self._report.call.number)
        pytest.fail(self._report.no_verdict(why, gap, recorder.facts), pytrace=False)

    def _conclude(self, outcome: AuditOutcome, recorder: AnyRecorder, remarks: Sequence[str]) -> AuditOutcome:
        __tracebackhide__ = True
        result = outcome.result
        note(self._node, self._report.call.number, result, outcome.diagnosis)
        if outcome.is_bad:
            scores = ScoreSummary.of(recorder) if isinstance(recorder, Recorder) else None
            pytest.fail(self._report.failure(result, outcome.diagnosis, scores, remarks), pytrace=False)
        if _is_weak(result):
            text = f"{result.verdict.value} Power: {result.power}. Use more steps or canaries."
            self._node.warn(UnderpoweredWarning(text))
        return outcome


@dataclass(frozen=True)
class AuditOutcome:
    """The outcome of an audit that has not failed its test."""

    result: Result
    diagnosis: Diagnosis | None
    """Tests of the noise; None if only scores are known, or if the bound may have stopped the run."""

    @property
    def is_bad(self) -> bool:
        """Whether the claim is refuted or a test flags the noise."""
        return bool(flagged_by(self.result, self.diagnosis))


class SupportsDiagnose(Protocol):
    """Tests on data added by the developer, such as ``dpaudit.Diagnostics``."""

    def diagnose(self, confidence: float = ...) -> Diagnosis:
        """Run the tests."""


def _outcome(
    recorder: AnyRecorder, error_rate: float, tests: SupportsDiagnose | None = None, **claim: Any
) -> AuditOutcome:
    """Audit the scores, and test the noise if it is known; both share the error rate."""
    has_tests = tests is not None or recorder.tests_noise
    bound_level, tests_level = share_error(error_rate, has_bound=True, has_tests=has_tests)
    result = recorder.audit(confidence=bound_level, **claim)
    if tests is not None:
        return AuditOutcome(result, tests.diagnose(tests_level))
    claimed = claimed_noise(result)
    if recorder.tests_noise and claimed is not None:
        with suppress(UntestedError):  # "not run" in the table
            return AuditOutcome(result, recorder.diagnose(noise_multiplier=claimed, confidence=tests_level))
    return AuditOutcome(result, None)


def _other_gradients(gradients: Any, num_parameters: int | None) -> Any:
    """Return the gradients of the other examples; no rows if only the number of parameters is given."""
    if (gradients is None) == (num_parameters is None):
        raise InputError(
            "Expected either gradients=... of the other examples or num_parameters=..., got "
            f"{'neither' if gradients is None else 'both'}."
        )
    if num_parameters is not None:
        return np.zeros((0, _validate.whole("num_parameters", num_parameters)), np.float32)
    require_rows(gradients)
    return gradients


def _with_numpy_hint(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the step with a note on its errors: how to pass arrays other than numpy's."""

    @wraps(step)
    def wrapped(rows: Any) -> Any:
        try:
            return step(rows)
        except (AttributeError, TypeError) as error:
            error.add_note(
                "With num_parameters=..., dp_audit passes numpy arrays to the step. For torch or jax, pass "
                f"gradients=torch.zeros(0, {rows.shape[1]}) or its jax.numpy equivalent."
            )
            raise

    return wrapped


def _is_weak(result: Result) -> bool:
    claimed = result.hypothesis.parameter
    return result.verdict is Verdict.UNDERPOWERED or result.design.smallest_leak(claimed) > _WEAK * claimed
