"""The held-out half of the blind benchmark: for measurement only.

Do not open the files `_blind_held_out*.py` while you work on checks or causes: a fault that the author of a
check has read measures nothing any more. Run `blind.py --half held-out` for the counts.
"""

from __future__ import annotations

from _blind_held_out_data import HIDDEN_DATA
from _blind_held_out_ghost import HIDDEN_GHOST
from _blind_held_out_release import HIDDEN_RELEASE
from _blind_held_out_run import HIDDEN_RUN

__all__ = ["HELD_OUT"]

HELD_OUT = (*HIDDEN_RELEASE, *HIDDEN_GHOST, *HIDDEN_DATA, *HIDDEN_RUN)
