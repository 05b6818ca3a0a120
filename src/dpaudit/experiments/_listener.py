"""The callbacks of a run for steps, canaries, trials and messages, and the progress that they receive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpaudit.experiments.trials import TrialProgress
    from dpaudit.recording import LiveBound


def ignore(*_: Any) -> None:
    """Do nothing: the default of every callback."""


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Callbacks of a run, each of which does nothing unless it is given."""

    message: Callable[[str], None] = ignore
    """Called with a sentence on the work between steps."""
    step: Callable[[Progress], None] = ignore
    """Called before the first step and after every step."""
    crafting: Callable[[int, int], None] = ignore
    """Called with the number of finished steps of canary crafting, and of all."""
    trials: Callable[[Running], None] = ignore
    """Called after every group of trials in a run of many trainings."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The step that a run has reached, and its live bound."""

    num_done: int
    num_steps: int
    num_new: int
    """Steps since the run was started or resumed."""
    seconds: float
    """The time that those steps took."""
    live: LiveBound | None


@dataclass(frozen=True, kw_only=True)
class Running:
    """The progress of many trainings, and the bound that the scores so far would give if they were all.

    The bound is an estimate: stopping at its best value errs more often than its confidence says.
    """

    progress: TrialProgress
    epsilon: float | None
    claimed: float | None
