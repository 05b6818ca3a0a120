"""Publicly reported faults of DP training code, each with a correct twin: what catches them, and how soon.

Requires torch. The Opacus entries also require Opacus and are skipped without it.
"""

from dpaudit.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401  # fail here, with the command that installs it
except ImportError as _error:
    raise MissingExtraError("The zoo", "torch pydantic") from _error

from dpaudit.zoo import faults
from dpaudit.zoo._evidence import Evidence, Replay, Scenario, Scores
from dpaudit.zoo._run import (
    ENTRIES,
    ENTRIES_FOUND_BY_TESTS,
    ENTRIES_OF_PUBLIC_CODE,
    Entry,
    Judged,
    chosen,
    examine_entry,
    judge,
    run_zoo,
)

__all__ = [
    "ENTRIES",
    "ENTRIES_FOUND_BY_TESTS",
    "ENTRIES_OF_PUBLIC_CODE",
    "Entry",
    "Evidence",
    "Judged",
    "Replay",
    "Scenario",
    "Scores",
    "chosen",
    "examine_entry",
    "faults",
    "judge",
    "run_zoo",
]
