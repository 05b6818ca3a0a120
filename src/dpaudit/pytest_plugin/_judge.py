"""The two things that an audit may find: a bound that refutes the claim, and noise that is not normal."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from dpaudit.diagnostics import Diagnosis
from dpaudit.observers._arriving import ArrivingRecorder
from dpaudit.observers._sampled import SampledRecorder
from dpaudit.observers._untested import UntestedError
from dpaudit.pytest_plugin._message import claimed_noise
from dpaudit.recording import Recorder, WholeRunRecorder
from dpaudit.stats import Result, Verdict

__all__ = ["AnyRecorder", "Audited", "Tests", "judge"]

AnyRecorder = Recorder | WholeRunRecorder | SampledRecorder

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
    kinds = ArrivingRecorder | SampledRecorder
    rest = 1 - _TESTS if tests is not None or isinstance(recorder, kinds) else 1.0
    result = recorder.audit(confidence=1 - rest * error, **claim)
    level, claimed = 1 - _TESTS * error, claimed_noise(result)
    if tests is not None:
        return Audited(result, tests.diagnose(level))
    if isinstance(recorder, kinds) and claimed is not None:
        with suppress(UntestedError):  # the table says that they were not run
            return Audited(result, recorder.diagnose(noise_multiplier=claimed, confidence=level))
    return Audited(result, None)
