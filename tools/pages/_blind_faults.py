"""The development half of the blind benchmark: faults that colleagues may read.

The other half is in `_blind_held_out*.py`, which is for measurement only.
"""

from __future__ import annotations

from _blind_faults_data import DATA
from _blind_faults_ghost import GHOST
from _blind_faults_release import RELEASE
from _blind_faults_run import RUN

__all__ = ["DEVELOPMENT"]

DEVELOPMENT = (*RELEASE, *GHOST, *DATA, *RUN)
