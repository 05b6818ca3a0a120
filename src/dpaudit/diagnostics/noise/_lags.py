"""Whether the noise of a step depends on that of the steps just before."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of, near_line
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["step_correlation"]

_MOST = 16


def step_correlation(record: NoiseRecord) -> Check | None:
    """The correlation between steps so many apart, for one up to 16.

    Each step is in one pair only, so that both halves of the pairs are independent, and the p-value exact.
    """
    rows, steps = record.sketches.rows.astype(np.float64), record.sketches.steps
    num_lags = min(_MOST, record.num_steps - 1)
    if num_lags < 1:
        return None
    found = []
    for lag in range(1, num_lags + 1):
        earlier = np.flatnonzero((steps % (2 * lag) < lag) & np.isin(steps + lag, steps))
        later = np.searchsorted(steps, steps[earlier] + lag)
        first, second = rows[earlier].ravel(), rows[later].ravel()
        dot, squares = first @ second, (first @ first, second @ second)
        product = float(np.sqrt(squares[0] * squares[1]))
        p_value = float(near_line(dot, *squares, first.size))
        found.append((p_value, lag, float(dot) / product if product > 0 else 0.0))
    p_value, lag, correlation = min(found)
    apart = "consecutive steps" if lag == 1 else f"steps {lag} apart"
    return Check(
        name="step-correlation",
        p_value=any_of(p_value, num_lags),
        sentence=f"The noise of {apart} has a correlation of {correlation:.2g}.",
        estimate=correlation,
    )
