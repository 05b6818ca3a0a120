"""Audits of training with Opacus; the training loop does not change."""

from dpaudit.errors import MissingExtraError

try:
    import opacus as _opacus  # noqa: F401  # fail here, with the line that installs it
except ImportError as _error:
    raise MissingExtraError("Observing Opacus", "opacus") from _error

from dpaudit.observers._replay_result import ReplayResult
from dpaudit.observers.opacus._check import LintReport, check, check_prepared
from dpaudit.observers.opacus._input_canaries import hold_out
from dpaudit.observers.opacus._observe import observe
from dpaudit.observers.opacus._prepared import PreparedTraining
from dpaudit.observers.opacus._replay import replay

__all__ = [
    "LintReport",
    "PreparedTraining",
    "ReplayResult",
    "check",
    "check_prepared",
    "hold_out",
    "observe",
    "replay",
]
