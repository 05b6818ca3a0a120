"""Tests of who took part in which step, against Poisson sampling."""

from dpaudit.diagnostics.participation._checks import participation_checks
from dpaudit.diagnostics.participation._rate import drawn_rate
from dpaudit.diagnostics.participation._record import ParticipationRecord

__all__ = ["ParticipationRecord", "drawn_rate", "participation_checks"]
