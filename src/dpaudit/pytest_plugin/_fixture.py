"""What a test calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dpaudit.accounting import Claim
from dpaudit.canaries import Dirac, GradientCanary
from dpaudit.diagnostics import Diagnosis
from dpaudit.errors import InputError
from dpaudit.observers.step import observe_step
from dpaudit.pytest_plugin._message import Seen, failure
from dpaudit.pytest_plugin._residuals import Residuals
from dpaudit.pytest_plugin._session import Audits, Share
from dpaudit.pytest_plugin._summary import note
from dpaudit.recording import Recorder, WholeRunRecorder
from dpaudit.stats import Result, Verdict

__all__ = ["Audited", "DpAudit", "UnderpoweredWarning"]

_DIRAC = Dirac()
_DIAGNOSIS = 0.2  # of the error, for the tests of the noise; the bound has the rest
_CANARIES = 64


class UnderpoweredWarning(UserWarning):
    """An audit that could not have seen even a serious leak: its green says little."""


@dataclass(frozen=True)
class Audited:
    """What a test that is not failed gets back."""

    result: Result
    diagnosis: Diagnosis | None
    """Tests of the noise; None where only scores are known."""


class DpAudit:
    """Audits a step, or judges what an observer recorded; a refuted claim fails the test.

    ``seed`` is for an observer or a training of the test's own; ``num_steps`` is the session's budget.
    """

    def __init__(self, node: pytest.Item, audits: Audits) -> None:
        self._node, self._audits = node, audits
        self.seed = audits.seed_of(node.nodeid, 0)
        self.num_steps = audits.num_steps

    def __call__(
        self, subject: Callable[[Any], Any] | Recorder | WholeRunRecorder, **options: Any
    ) -> Audited:
        """Audit ``subject``; keywords are those of :meth:`step` or of :meth:`recorded`."""
        __tracebackhide__ = True
        if isinstance(subject, Recorder | WholeRunRecorder):
            return self.recorded(subject, **options)
        if callable(subject):
            return self.step(subject, **options)
        raise InputError(
            "Expected a step, which is a function of per-example gradients, or the recorder of an observer, "
            f"got a {type(subject).__name__}."
        )

    def step(
        self,
        step: Callable[[Any], Any],
        *,
        claim: Claim,
        max_grad_norm: float,
        gradients: Any = None,
        num_parameters: int | None = None,
        batch_size: float | None = None,
        canary: GradientCanary = _DIRAC,
        num_canaries: int | None = None,
        num_steps: int | None = None,
        confidence: float | None = None,
    ) -> Audited:
        """A function from per-example gradients to a privatised gradient, as for ``observe_step``.

        Without ``gradients`` of other examples there are none; then ``num_parameters`` says how long one is.
        """
        __tracebackhide__ = True
        share, error = self._begin(confidence)
        others = _others(gradients, num_parameters)
        residuals = Residuals(claim, max_grad_norm=max_grad_norm, divisor=batch_size or 1.0)
        recorder = observe_step(
            residuals.watched(step),
            others,
            claim=claim,
            max_grad_norm=max_grad_norm,
            batch_size=batch_size,
            num_steps=self.num_steps if num_steps is None else num_steps,
            canary=canary,
            num_canaries=min(_CANARIES, others.shape[1]) if num_canaries is None else num_canaries,
            seed=share.seed,
        )
        rest = 1 - _DIAGNOSIS if residuals.are_known else 1.0
        result = recorder.audit(confidence=1 - rest * error)
        diagnosis = residuals.diagnose(1 - _DIAGNOSIS * error) if residuals.are_known else None
        seen = Seen.of(
            recorder, canary_scale=canary.scale, batch_size=batch_size, max_grad_norm=max_grad_norm
        )
        return self._end(share, result, diagnosis, seen)

    def recorded(
        self, recorder: Recorder | WholeRunRecorder, *, confidence: float | None = None, **claim: Any
    ) -> Audited:
        """What an observer or an audit of the native training recorded; keywords as for its ``audit()``."""
        __tracebackhide__ = True
        share, error = self._begin(confidence)
        result = recorder.audit(confidence=1 - error, **claim)
        seen = Seen.of(recorder) if isinstance(recorder, Recorder) else None
        return self._end(share, result, None, seen)

    def _begin(self, confidence: float | None) -> tuple[Share, float]:
        share = self._audits.take(self._node.nodeid)
        whole = 1 - (self._audits.confidence if confidence is None else confidence)
        return share, share.of_error * whole

    def _end(self, share: Share, result: Result, diagnosis: Diagnosis | None, seen: Seen | None) -> Audited:
        __tracebackhide__ = True
        findings = () if diagnosis is None else diagnosis.findings
        is_bad = result.verdict is Verdict.VIOLATION or bool(findings)
        note(self._node, share.number, result, [finding.name for finding in findings])
        if is_bad:
            repeat = f"pytest '{self._node.nodeid}' --dp-audit-seed {self._audits.seed}"
            pytest.fail(failure(result, diagnosis, seen, self._audits, repeat), pytrace=False)
        if result.verdict is Verdict.UNDERPOWERED:
            warnings.warn(f"{result.sentence} ({result.power})", UnderpoweredWarning, stacklevel=3)
        return Audited(result, diagnosis)


def _others(gradients: Any, num_parameters: int | None) -> Any:
    if (gradients is None) == (num_parameters is None):
        raise InputError(
            "Expected either gradients=..., those of the other examples, or num_parameters=..., got "
            f"{'neither' if gradients is None else 'both'}."
        )
    return np.zeros((0, num_parameters), np.float32) if gradients is None else gradients
