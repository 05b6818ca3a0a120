"""Any event that dp-accounting can describe, as a curve."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats.tradeoffs import PiecewiseLinear

__all__ = ["event_curve"]

_NUM_LINES = 200  # each costs a pass over the privacy loss distribution


def event_curve(event: Any) -> PiecewiseLinear:
    """The trade-off curve of a ``DpEvent``, from its privacy loss distribution."""
    import dp_accounting  # noqa: PLC0415  # imported late: it takes longer than all the rest
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415

    if not isinstance(event, dp_accounting.DpEvent):
        raise InputError(f"Expected event to be a dp_accounting.DpEvent, got {event!r}.")
    accountant = PLDAccountant()
    if not accountant.supports(event):
        raise InputError(f"dp-accounting has no privacy loss distribution for {event!r}.")
    accountant.compose(event)
    largest = max(accountant.get_epsilon(1e-12), 0.0)
    if not np.isfinite(largest):
        largest = _finite_epsilon(accountant)
    epsilons = np.linspace(0.0, largest, _NUM_LINES)
    deltas = [accountant.get_delta(float(epsilon)) for epsilon in epsilons]
    return PiecewiseLinear(tuple(epsilons), tuple(np.clip(deltas, 0.0, 1.0)))


def _finite_epsilon(accountant: Any) -> float:
    """The epsilon at the smallest delta, from 1e-11 up, that has a finite one."""
    for exponent in range(11, 0, -1):
        epsilon = accountant.get_epsilon(10.0**-exponent)
        if np.isfinite(epsilon):
            return float(epsilon)
    raise InputError("The event has no finite epsilon at any delta up to 0.1: it protects nothing.")
