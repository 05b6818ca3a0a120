"""One experiment from its config to its result; goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpaudit._torch.crafting import nobody
from dpaudit.experiments._audits import Watchers
from dpaudit.experiments._build import build
from dpaudit.experiments._data import load_data
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._loop import Live, Progress, train
from dpaudit.experiments._outcome import observed, outcome
from dpaudit.experiments._resolved import require_same_data, resolve
from dpaudit.experiments.config import Config

__all__ = ["Outcome", "rehearse", "run"]


@dataclass(frozen=True)
class Outcome:
    """The plain values of ``result.json``, and whether they were there already."""

    values: dict[str, Any]
    was_finished: bool


def _nobody(_: object) -> None:
    """Looks on and says nothing."""


def run(
    config: Config,
    *,
    watch: Callable[[Progress], None] = _nobody,
    say: Callable[[str], None] = _nobody,
    crafting: Callable[[int, int], None] = nobody,
) -> Outcome:
    """Train, audit and keep everything in the config's output directory.

    The same config goes on from the last checkpoint, or has its result already; another one is refused.
    ``watch`` is called after every step, ``say`` with what is done between, ``crafting`` with how many of all
    steps of making canaries are done.
    """
    directory = RunDirectory(config.output)
    with directory.locked():
        resolved = directory.resolved(config)
        if resolved is not None and (stored := directory.result()) is not None:
            return Outcome(stored, was_finished=True)
        data = load_data(config.data)
        is_new = resolved is None
        if resolved is None:
            say("Calibrating the noise")
            resolved = resolve(config, data[0])
        else:
            require_same_data(resolved, data[0])
        live = Live()
        experiment = build(config, resolved, data, Watchers((live,), crafting))
        if is_new:
            directory.begin(config, resolved)
        say("Training")
        trained = train(experiment, directory.checkpoint, live, watch)
        if trained.stopped_early:
            say(f"Stopped at step {experiment.training.num_done:,}: the claim is refuted")
        say("Finding the bounds of all methods")
        values = outcome(experiment, trained)
        directory.finish(observed(experiment), values)
    return Outcome(values, was_finished=False)


def rehearse(
    config: Config,
    *,
    watch: Callable[[Progress], None] = _nobody,
    crafting: Callable[[int, int], None] = nobody,
    keep: bool = False,
) -> dict[str, Any]:
    """The same in one go, without checkpoints: the result is returned and nothing is kept.

    With ``keep`` it goes to the output directory at the end, in the place of what an earlier one left there.
    """
    data, live = load_data(config.data), Live()
    resolved = resolve(config, data[0])
    experiment = build(config, resolved, data, Watchers((live,), crafting))
    values = outcome(experiment, train(experiment, None, live, watch))
    if keep:
        RunDirectory(config.output).replace(config, resolved, observed(experiment), values)
    return values
