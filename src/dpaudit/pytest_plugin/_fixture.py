"""The fixture ``dp_audit``, which audits a step or a recorder, or runs noise tests, and may fail the test.

The message of a failed test is the block of its audit and the command that repeats it; ``-v`` adds details.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NoReturn, TypeVar, cast, overload

import numpy as np
import pytest

from dpaudit import _validate
from dpaudit._interrupts import machine_fault
from dpaudit.accounting import Claim
from dpaudit.canaries import GradientCanary, Mixture
from dpaudit.diagnostics import Diagnosis, Diagnostics, Leaves, likely_causes
from dpaudit.diagnostics._diagnosis import joint_causes
from dpaudit.errors import InputError
from dpaudit.observers._arrays import require_rows
from dpaudit.observers._residuals import UnknownSumError
from dpaudit.observers._session import NUMBERS, claimed_numbers
from dpaudit.observers.step import observe_step
from dpaudit.pytest_plugin._suite import (
    AuditCall,
    SuiteAudits,
    UnderpoweredWarning,
    fail,
    mark_incomplete,
    note,
    note_error,
)
from dpaudit.recording import MissingCanaryError, Recorder, SupportsDiagnose, claimed_noise
from dpaudit.stats import Block, Result, Verdict
from dpaudit.stats._block import to_check_text

Method = TypeVar("Method", bound=Callable[..., Any])

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
            call = self._begin(options.get("confidence"))
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
        self._call: AuditCall
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
            "dp_audit needs a step, which is a function of per-example gradients, or the recorder of an "
            f"observer, got an object of type {type(subject).__name__}{hint}."
        )

    @_audit_call
    def step(
        self,
        step: Callable[[Any], Any],
        *,
        claim: Claim,
        max_grad_norm: float,
        epsilon: float | None = None,
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

        ``epsilon`` is the figure that was claimed beside the parameters of ``claim``.
        ``gradients`` are those of other examples; without them, ``num_parameters`` is the gradient's length.
        ``leaves`` are the sizes of the parameters that a gradient consists of. The default canary is that of
        ``observe_step``, without short ones if the claim is not about Gaussian noise: only the bound counts.
        """
        __tracebackhide__ = True
        _validate.instance("claim", claim, Claim, "a Claim such as Claim.gaussian(...)")
        claim = claim.with_epsilon(epsilon)
        if canary is None:
            canary = Mixture(short=claimed_noise(claim) is not None)
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
                seed=self._call.seed,
            )
        except UnknownSumError as error:
            why = str(error)
        else:
            return self._audit(recorder)
        return self._fail_without_verdict(why)

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
        diagnosis = tests.diagnose(1 - self._call.error_rate)
        note(self._node, self._call.number, None, diagnosis)
        if diagnosis.findings:
            rows = [("finding", f"{finding.name}: {finding.sentence}") for finding in diagnosis.findings]
            rows += [("cause", cause) for cause in joint_causes(diagnosis, {})]
            numbers = "the training run does not match its claim"
            self._fail(Block("▲", "VIOLATION (mechanism)", numbers, tuple(rows)), str(diagnosis))
        if diagnosis.to_check and self._session.is_strict:
            rows = [("to check", to_check_text(vars(fact))) for fact in diagnosis.to_check]
            numbers = "no finding, but --dp-audit-strict asks for a decision"
            self._fail(Block("\u25cb", "TO CHECK", numbers, tuple(rows)), str(diagnosis))
        return diagnosis

    def _begin(self, confidence: float | None) -> AuditCall:
        own_confidence = None if confidence is None else _validate.confidence(confidence)
        self._call = self._session.next_call(self._node.nodeid, own_confidence)
        return self._call

    def _audit(self, recorder: Recorder, **options: Any) -> AuditOutcome:
        __tracebackhide__ = True
        try:
            result = recorder.audit(confidence=1 - self._call.error_rate, **options)
        except MissingCanaryError as error:
            why, gap = str(error), error.gap
        else:
            return self._conclude(result)
        # outside the handler, where pytest would print the error twice
        causes: tuple[str, ...] = ()
        if recorder.facts is not None:
            scale, batch_size = recorder.facts.canary_scale, recorder.facts.batch_size
            causes = likely_causes(signal=gap, canary_scale=scale, batch_size=batch_size)
        return self._fail_without_verdict(why, *causes)

    def _conclude(self, result: Result) -> AuditOutcome:
        __tracebackhide__ = True
        note(self._node, self._call.number, result, result.diagnosis)
        if result.is_violation or (result.to_check and self._session.is_strict):
            self._fail(result.block, result.details())
        if result.verdict is Verdict.UNDERPOWERED:
            text = f"{result.verdict.value} Power: {result.power}. Use more steps or canaries."
            self._node.warn(UnderpoweredWarning(text))
        return AuditOutcome(result)

    def _fail_without_verdict(self, why: str, *causes: str) -> NoReturn:
        """Fail the test: passing without a verdict would be worse."""
        __tracebackhide__ = True
        note_error(self._node, self._call.number)
        rows = ("reason", why), *(("cause", cause) for cause in causes)
        block = Block("?", "NO VERDICT", "the audit could not test the claim", rows)
        self._fail(block, "\n".join([why, *causes]))

    def _fail(self, block: Block, details: str) -> NoReturn:
        """Fail the test with a block and its rerun command; pytest's own line names the finding."""
        __tracebackhide__ = True
        # the test states its claim, and -v shows the notes: findings and causes get their room
        rows = tuple(row for row in block.rows if row[0] not in {"claim", "note"})
        lines = [replace(block, rows=rows).text(more="pytest -v"), f"  rerun    {self._call.rerun}"]
        if self._call.number > 1:
            lines.insert(1, f"  call     {self._call.number} of the test")
        if self._node.config.get_verbosity() > 0:
            lines += ["", details]
        named = [text for label, text in block.rows if label in {"finding", "reason", "to check"}]
        names = [text.partition(":")[0].partition(" (")[0] for text in named]
        fail("\n".join(lines), ": ".join([*names[:1], block.numbers]))


@dataclass(frozen=True)
class AuditOutcome:
    """The outcome of an audit that has not failed its test."""

    result: Result

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Tests of the noise; None if only scores are known, or if the bound may have stopped the run."""
        return self.result.diagnosis


def _other_gradients(gradients: Any, num_parameters: int | None) -> Any:
    """Return the gradients of the other examples; no rows if only the number of parameters is given."""
    if (gradients is None) == (num_parameters is None):
        raise InputError(
            "Pass either gradients=... of the other examples or num_parameters=..., got "
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
