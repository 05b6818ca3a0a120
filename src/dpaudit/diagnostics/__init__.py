"""Cheap tests of the noise and the batches of a training, with a known error rate; numpy and scipy only."""

from dpaudit.diagnostics._causes import likely_causes
from dpaudit.diagnostics._check import Check, Finding
from dpaudit.diagnostics._diagnosis import Diagnosis
from dpaudit.diagnostics._diagnostics import Diagnostics
from dpaudit.diagnostics.noise import Amount

__all__ = ["Amount", "Check", "Diagnosis", "Diagnostics", "Finding", "likely_causes"]
