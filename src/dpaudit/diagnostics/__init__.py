"""Cheap tests of the noise and the batches of a training run, with a known error rate; numpy and scipy only.

One group tests the residual noise: what a step released minus the known sum. The other tests which examples
took part in which step against Poisson sampling.
"""

from dpaudit.diagnostics._batch_record import BatchRecord
from dpaudit.diagnostics._collector import Diagnostics
from dpaudit.diagnostics._diagnosis import Diagnosis, holm, joint_causes, likely_causes, share_error
from dpaudit.diagnostics._findings import FindingKind, finding_kinds
from dpaudit.diagnostics._noise_check import NoiseCheck
from dpaudit.diagnostics._p_values import Amount, Check, CheckResults, Finding
from dpaudit.diagnostics._run_history import RunHistory
from dpaudit.diagnostics._step import (
    ClaimedStep,
    CoordinateSample,
    Leaves,
    NoiseMaximum,
    ObservedStep,
    RunCheck,
    StepCheck,
    SumChange,
)
from dpaudit.diagnostics._sum_checks import SumRecord

__all__ = [
    "Amount",
    "BatchRecord",
    "Check",
    "CheckResults",
    "ClaimedStep",
    "CoordinateSample",
    "Diagnosis",
    "Diagnostics",
    "Finding",
    "FindingKind",
    "Leaves",
    "NoiseCheck",
    "NoiseMaximum",
    "ObservedStep",
    "RunCheck",
    "RunHistory",
    "StepCheck",
    "SumChange",
    "SumRecord",
    "finding_kinds",
    "holm",
    "joint_causes",
    "likely_causes",
    "share_error",
]
