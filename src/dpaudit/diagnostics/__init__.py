"""Cheap tests of the noise and the batches of a training run, with a known error rate; numpy and scipy only.

One group tests the residual noise: what a step released minus the known sum. The other tests which examples
took part in which step against Poisson sampling.
"""

from dpaudit.diagnostics._causes import likely_causes
from dpaudit.diagnostics._diagnosis import CheckResults, Diagnosis, Diagnostics
from dpaudit.diagnostics._noise_tests import Amount
from dpaudit.diagnostics._p_values import Check, Finding

__all__ = ["Amount", "Check", "CheckResults", "Diagnosis", "Diagnostics", "Finding", "likely_causes"]
