"""Any event that dp-accounting can describe, as a curve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats.tradeoffs import PiecewiseLinear

__all__ = ["event_curve"]

_NUM_LINES = 200  # each costs a pass over the privacy loss distribution


def event_curve(event: Any, delta: float) -> PiecewiseLinear:
    """The trade-off curve of a ``DpEvent`` from its privacy loss distribution, with a line at ``delta``."""
    import dp_accounting  # noqa: PLC0415  # imported late: it takes longer than all the rest
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415

    if not isinstance(event, dp_accounting.DpEvent):
        raise InputError(f"Expected event to be a dp_accounting.DpEvent, got {event!r}.")
    accountant = PLDAccountant()
    if not accountant.supports(event):
        raise InputError(f"dp-accounting has no privacy loss distribution for {event!r}.")
    accountant.compose(event)
    points = np.linspace(0.0, _largest_epsilon(accountant), _NUM_LINES)
    here = _finite([accountant.get_epsilon(delta)])
    if not here:
        raise InputError(f"The accountant gives {event!r} no finite epsilon at delta={delta:g}.")
    epsilons = np.unique(np.append(points, here))
    deltas = [accountant.get_delta(float(epsilon)) for epsilon in epsilons]
    return PiecewiseLinear(tuple(epsilons), tuple(np.clip(deltas, 0.0, 1.0)))


def _largest_epsilon(accountant: Any) -> float:
    """The epsilon at the smallest delta that has a finite one: 0 for bounded losses, else 1e-12 or so."""
    deltas = [0.0, *(10.0**-exponent for exponent in range(12, 0, -1))]
    found = _finite(accountant.get_epsilon(delta) for delta in deltas)
    if not found:
        raise InputError("The event has no finite epsilon at any delta up to 0.1: it protects nothing.")
    return min(found[0], 700.0)


def _finite(epsilons: Iterable[float]) -> list[float]:
    return [max(float(epsilon), 0.0) for epsilon in epsilons if np.isfinite(epsilon)]
