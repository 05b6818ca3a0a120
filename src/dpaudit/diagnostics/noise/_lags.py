"""Whether the noise of a step depends on that of the steps just before."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of
from dpaudit.diagnostics._signs import correlation, same_signs, sure_signs
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["step_correlation"]

_MOST = 16


def step_correlation(record: NoiseRecord) -> Check | None:
    """The signs of steps so many apart, for one up to 16.

    A step is in two pairs of a distance, with an earlier and with a later one. Whether the signs of one pair
    agree says nothing about any other pair, so that all pairs are counted, and the p-value is exact.
    """
    rows, steps = record.sketches.rows.astype(np.float64), record.sketches.steps
    num_lags = min(_MOST, record.num_steps - 1)
    if num_lags < 1:
        return None
    signs = sure_signs(rows, record.resolution)
    found = []
    for lag in range(1, num_lags + 1):
        earlier = np.flatnonzero(np.isin(steps + lag, steps))
        products = signs[earlier] * signs[np.searchsorted(steps, steps[earlier] + lag)]
        counts = np.count_nonzero(products > 0), np.count_nonzero(products < 0)
        found.append((float(same_signs(*counts, products.size)), lag, float(correlation(*counts))))
    p_value, lag, estimate = min(found)
    apart = "consecutive steps" if lag == 1 else f"steps {lag} apart"
    return Check(
        name="step-correlation",
        p_value=any_of(p_value, num_lags),
        sentence=f"The noise of {apart} has a correlation of {estimate:.2g}.",
        estimate=estimate,
    )
