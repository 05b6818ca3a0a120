"""All tests of the noise."""

from __future__ import annotations

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics.noise._amount import noise_variance
from dpaudit.diagnostics.noise._lags import step_correlation
from dpaudit.diagnostics.noise._leaves import leaf_correlation
from dpaudit.diagnostics.noise._parts import coordinate_noise, leaf_noise, step_noise
from dpaudit.diagnostics.noise._record import NoiseRecord
from dpaudit.diagnostics.noise._repeats import repeated_noise
from dpaudit.diagnostics.noise._shape import noise_shape
from dpaudit.diagnostics.noise._sums import coordinate_correlation

__all__ = ["noise_checks"]

_OTHERS = (
    step_noise,
    leaf_noise,
    coordinate_noise,
    noise_shape,
    repeated_noise,
    step_correlation,
    leaf_correlation,
    coordinate_correlation,
)


def noise_checks(record: NoiseRecord, confidence: float) -> list[Check]:
    """Those that so many steps, leaves and coordinates allow; none is left out for its result."""
    if record.num_steps == 0:
        return []
    found = [noise_variance(record, confidence), *(check(record) for check in _OTHERS)]
    return [check for check in found if check is not None]
