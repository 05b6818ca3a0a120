"""Publicly reported faults of DP training code, each with a correct twin: what catches them, and how soon.

Requires torch. The Opacus entries also require Opacus and are skipped without it.
"""

from dpaudit.errors import MissingExtraError

try:
    import torch as _torch  # noqa: F401  # fail here, with the command that installs it
except ImportError as _error:
    raise MissingExtraError("The zoo", "torch") from _error

from dpaudit.zoo._entries import ENTRIES, FIRST_HALL
from dpaudit.zoo._entry import Entry, Evidence, Replay, Scores, Specimen
from dpaudit.zoo._run import Judged, chosen, examine_entry, judge, run_zoo
from dpaudit.zoo._second_hall import SECOND_HALL

__all__ = [
    "ENTRIES",
    "FIRST_HALL",
    "SECOND_HALL",
    "Entry",
    "Evidence",
    "Judged",
    "Replay",
    "Scores",
    "Specimen",
    "chosen",
    "examine_entry",
    "judge",
    "run_zoo",
]
