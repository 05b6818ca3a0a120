"""Callbacks of a run for steps, canaries, trials and messages, and the progress passed to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpaudit.experiments.trials import TrialProgress
    from dpaudit.recording import LiveBound


def ignore(*_: Any) -> None:
    """Do nothing; the default of every callback."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Callbacks of a run; each does nothing by default."""

    message: Callable[[str], None] = ignore
    """Called with a description of the work between steps."""
    step: Callable[[Progress], None] = ignore
    """Called before the first step and after every step."""
    crafting: Callable[[int, int], None] = ignore
    """Called with the number of finished canary crafting steps and their total number."""
    trials: Callable[[Running], None] = ignore
    """Called after every group of trials when many models are trained."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Current step of a run and its live bound."""

    num_done: int
    num_steps: int
    num_new: int
    """Steps since the run was started or resumed."""
    seconds: float
    """The time taken by those steps."""
    live: LiveBound | None


@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress of many training runs, and the bound from the scores so far.

    The bound is an estimate: stopping at its best value would void its confidence level.
    """

    progress: TrialProgress
    epsilon: float | None
    claimed: float | None
