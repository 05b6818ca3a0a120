"""Tests of the residual noise: what a step released, less the sum that is known."""

from dpaudit.diagnostics.noise._amount import Amount, amount
from dpaudit.diagnostics.noise._checks import noise_checks
from dpaudit.diagnostics.noise._layout import Leaves
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["Amount", "Leaves", "NoiseRecord", "amount", "noise_checks"]
