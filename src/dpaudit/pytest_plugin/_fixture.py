"""What a test calls.

The two things that an audit may find: a bound that refutes the claim, and noise that is not normal. The
examples beside the canaries of an audited step.
"""

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
from dpaudit.diagnostics._noise_record import Leaves
from dpaudit.errors import InputError
from dpaudit.observers._arrays import require_rows
from dpaudit.observers._residuals import UnknownSumError
from dpaudit.observers.step import observe_step
from dpaudit.pytest_plugin._message import Frame, Seen, claimed_noise
from dpaudit.pytest_plugin._session import Audits
from dpaudit.pytest_plugin._summary import UnderpoweredWarning, note, note_error
from dpaudit.recording import ArrivalError, Recorder, UntestedError, WholeRunRecorder
from dpaudit.stats import Result, Verdict

AnyRecorder = Recorder | WholeRunRecorder

_TESTS = 0.2  # of the error, for the tests of the noise; the bound has the rest


class Tests(Protocol):
    """Tests of a training that somebody feeds, such as ``dpaudit.Diagnostics``."""

    def diagnose(self, confidence: float = ...) -> Diagnosis:
        """What they found."""


@dataclass(frozen=True)
class Audited:
    """What a test that is not failed gets back."""

    result: Result
    diagnosis: Diagnosis | None
    """Tests of the noise; None where only scores are known, or where a look may have ended the run."""

    @property
    def is_bad(self) -> bool:
        """Whether anything was found."""
        return self.result.verdict is Verdict.VIOLATION or bool(self.diagnosis and self.diagnosis.findings)


def judge(recorder: AnyRecorder, error: float, tests: Tests | None = None, **claim: Any) -> Audited:
    """The verdict, and the tests of the noise where it is known; both share the error."""
    rest = 1 - _TESTS if tests is not None or recorder.tests_noise else 1.0
    result = recorder.audit(confidence=1 - rest * error, **claim)
    level, claimed = 1 - _TESTS * error, claimed_noise(result)
    if tests is not None:
        return Audited(result, tests.diagnose(level))
    if recorder.tests_noise and claimed is not None:
        with suppress(UntestedError):  # the table says that they were not run
            return Audited(result, recorder.diagnose(noise_multiplier=claimed, confidence=level))
    return Audited(result, None)


def others_of(gradients: Any, num_parameters: int | None) -> Any:
    """Their gradients, examples x parameters; none at all if only the number of parameters is given."""
    if (gradients is None) == (num_parameters is None):
        raise InputError(
            "Expected either gradients=..., those of the other examples, or num_parameters=..., got "
            f"{'neither' if gradients is None else 'both'}."
        )
    if num_parameters is not None:
        return np.zeros((0, _validate.whole("num_parameters", num_parameters)), np.float32)
    require_rows(gradients)
    return gradients


def silent(gradients: Any) -> Any:
    """Zeros in their place, which are the same with any clipping."""
    return 0 * gradients


def with_hint(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same step; if it cannot use arrays of numpy, it is said how it gets others."""

    @wraps(step)
    def called(rows: Any) -> Any:
        try:
            return step(rows)
        except (AttributeError, TypeError) as error:
            error.add_note(
                "With num_parameters=..., dp_audit gives the step arrays of numpy. For torch or jax pass "
                f"gradients=torch.zeros(0, {rows.shape[1]}), or that of jax.numpy."
            )
            raise

    return called


_MIXED = Mixed()
_CANARIES = 64
_WEAK = 2.0  # an audit that sees no leak below so many times the claim says little

Method = TypeVar("Method", bound=Callable[..., Any])


def _begun(method: Method) -> Method:
    """What cannot be used or judged ends with a sentence and a row in the table, and without our frames."""

    @wraps(method)
    def told(self: DpAudit, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        frame = self._begin(options.get("confidence"))
        try:
            return method(self, *args, **options)
        except InputError as error:
            note_error(self._node, frame.share.number)
            error.add_note(f"again: {frame.share.again}")
            raise error.with_traceback(None) from None

    return cast("Method", told)


class DpAudit:
    """Audits a step, or judges what an observer recorded; a refuted claim fails the test.

    ``seed`` is for an observer or a training of the test's own; ``num_steps`` is the session's budget.
    """

    def __init__(self, node: pytest.Item, audits: Audits) -> None:
        self._node, self._audits = node, audits
        self._frame: Frame
        self.seed = audits.seed_of(node.nodeid, 0)
        self.num_steps = audits.num_steps

    @overload
    def __call__(self, subject: Diagnostics, **options: Any) -> Diagnosis: ...
    @overload
    def __call__(self, subject: Callable[[Any], Any] | AnyRecorder, **options: Any) -> Audited: ...
    def __call__(self, subject: Any, **options: Any) -> Audited | Diagnosis:
        """Audit ``subject``; keywords are those of :meth:`step`, :meth:`recorded` or :meth:`diagnosed`."""
        __tracebackhide__ = True
        if isinstance(subject, AnyRecorder):
            return self.recorded(subject, **options)
        if isinstance(subject, Diagnostics):
            return self.diagnosed(subject, **options)
        if callable(subject):
            return self.step(subject, **options)
        hint = ": give its .recorder" if hasattr(subject, "recorder") else ""
        raise InputError(
            "Expected a step, which is a function of per-example gradients, or the recorder of an observer, "
            f"got an object of type {type(subject).__name__}{hint}."
        )

    @_begun
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
        confidence: float | None = None,  # noqa: ARG002  # the error was taken of it already
    ) -> Audited:
        """A function from per-example gradients to a privatised gradient, as for ``observe_step``.

        Without ``gradients`` of other examples there are none; then ``num_parameters`` says how long one is.
        ``leaves`` are the sizes of the parameters that a gradient is made of.
        """
        __tracebackhide__ = True
        others = others_of(gradients, num_parameters)
        usual = max(1, min(_CANARIES, others.shape[1] // 2))

        def observed(rows: Any) -> Recorder:
            return observe_step(
                step if num_parameters is None else with_hint(step),
                rows,
                claim=claim,
                max_grad_norm=max_grad_norm,
                batch_size=batch_size,
                num_steps=self.num_steps if num_steps is None else num_steps,
                canary=canary,
                num_canaries=usual if num_canaries is None else num_canaries,
                leaves=leaves,
                seed=self._frame.share.seed,
            )

        try:
            return self._judged(observed(others))
        except UnknownSumError as error:
            return self._judged(observed(silent(others)), unknown=error)

    @_begun
    def recorded(
        self,
        recorder: AnyRecorder,
        *,
        tests: Tests | None = None,
        confidence: float | None = None,  # noqa: ARG002
        **claim: Any,
    ) -> Audited:
        """What an observer or an audit of the native training recorded; keywords as for its ``audit()``.

        ``tests`` are ``Diagnostics`` or a ``Diagnose`` hook that saw the same training, for recorders that
        know nothing of the noise.
        """
        __tracebackhide__ = True
        return self._judged(recorder, tests=tests, **claim)

    @_begun
    def diagnosed(self, tests: Tests, *, confidence: float | None = None) -> Diagnosis:  # noqa: ARG002
        """Tests that the test has fed, without any audit of scores."""
        __tracebackhide__ = True
        diagnosis = tests.diagnose(1 - self._frame.error)
        note(self._node, self._frame.share.number, None, diagnosis)
        if diagnosis.findings:
            pytest.fail(self._frame.of_tests(diagnosis), pytrace=False)
        return diagnosis

    def _begin(self, confidence: float | None) -> Frame:
        share = self._audits.take(self._node.nodeid)
        own = None if confidence is None else _validate.confidence(confidence)
        self._frame = Frame(self._audits, share, own)
        return self._frame

    def _judged(
        self, recorder: AnyRecorder, unknown: UnknownSumError | None = None, **options: Any
    ) -> Audited:
        __tracebackhide__ = True
        try:
            audited = judge(recorder, self._frame.error, **options)
        except ArrivalError as error:
            self._give_up(str(error), error.gap, recorder)
        if unknown is not None and not audited.is_bad:
            self._give_up(str(unknown), None, recorder)
        return self._end(audited, recorder, () if unknown is None else (_AGAIN,))

    def _give_up(self, why: str, gap: float | None, recorder: AnyRecorder) -> NoReturn:
        """There is no verdict, and a test that only looks green would be worse."""
        __tracebackhide__ = True
        note_error(self._node, self._frame.share.number)
        pytest.fail(self._frame.no_verdict(why, gap, recorder.facts), pytrace=False)

    def _end(self, audited: Audited, recorder: AnyRecorder, remarks: Sequence[str]) -> Audited:
        __tracebackhide__ = True
        result = audited.result
        note(self._node, self._frame.share.number, result, audited.diagnosis)
        if audited.is_bad:
            seen = Seen.of(recorder) if isinstance(recorder, Recorder) else None
            pytest.fail(self._frame.failure(result, audited.diagnosis, seen, remarks), pytrace=False)
        if _is_weak(result):
            text = f"{result.verdict.value} Of this audit, {result.power}: make more steps or canaries."
            self._node.warn(UnderpoweredWarning(text))
        return audited


_AGAIN = "others: their sum is not that of clipped gradients; so zeros are in their place here"


def _is_weak(result: Result) -> bool:
    claimed = result.hypothesis.parameter
    return result.verdict is Verdict.UNDERPOWERED or result.design.smallest_leak(claimed) > _WEAK * claimed
