"""How a recorder shows itself in a notebook."""

from __future__ import annotations

from collections.abc import Callable

from dpaudit.accounting import Claim
from dpaudit.errors import InputError
from dpaudit.recording._live import LiveBound
from dpaudit.stats._html import labelled

__all__ = ["recorder_html"]

_NOT_SHOWN = "not looked at; live() shows it, and audit() then allows for a run that was ended because of it"


def recorder_html(
    name: str,
    *,
    num_done: int,
    num_scores: int | None,
    claim: Callable[[], Claim],
    bound: Callable[[], LiveBound] | None,
) -> str:
    """What was recorded, what is claimed, and the ``bound`` where showing it changes nothing."""
    rows = [("steps", f"{num_done:,}")]
    if num_scores is not None:
        rows.append(("scores a step", f"{num_scores:,}"))
    try:
        rows.append(("claim", claim().summary))
        rows.append(("bound so far", _NOT_SHOWN if bound is None else str(bound())))
    except InputError as error:  # a claim that is not complete yet
        rows.append(("claim", str(error)))
    return labelled(name, "", rows)
