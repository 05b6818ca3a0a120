"""One experiment from its config to its result; goes on where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpaudit._torch.crafting import nobody
from dpaudit.canaries import ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments._audits import Watchers
from dpaudit.experiments._build import build
from dpaudit.experiments._data import load_data
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._loop import Live, Progress, train
from dpaudit.experiments._outcome import observed, outcome
from dpaudit.experiments._resolved import Resolved, require_same_code, require_same_data, resolve
from dpaudit.experiments.black_box import FinalModel, ManyRuns, Running, run_many
from dpaudit.experiments.config import Config, ManyRunsConfig
from dpaudit.training.data import Dataset

__all__ = ["Outcome", "rehearse", "run"]


@dataclass(frozen=True)
class Outcome:
    """The plain values of ``result.json``, and whether they were there already."""

    values: dict[str, Any]
    was_finished: bool


def _nobody(_: object) -> None:
    """Looks on and says nothing."""


@dataclass(frozen=True)
class _Told:
    """Who is told what."""

    watch: Callable[[Progress], None]
    say: Callable[[str], None]
    crafting: Callable[[int, int], None]
    trials: Callable[[Running], None]


@dataclass(frozen=True)
class _Prepared:
    """All that is known before the first step."""

    config: Config
    directory: RunDirectory
    resolved: Resolved
    data: tuple[Dataset, Dataset]
    is_new: bool
    retry_failed: bool

    def begin(self) -> None:
        """Keep the config, once nothing about it can be wrong any more."""
        if self.is_new:
            self.directory.begin(self.config, self.resolved)


def run(
    config: Config,
    *,
    watch: Callable[[Progress], None] = _nobody,
    say: Callable[[str], None] = _nobody,
    crafting: Callable[[int, int], None] = nobody,
    trials: Callable[[Running], None] = _nobody,
    retry_failed: bool = False,
) -> Outcome:
    """Train, audit and keep everything in the config's output directory.

    The same config goes on from the last checkpoint, or has its result already; another one is refused.
    ``watch`` is called after every step, ``say`` with what is done between, ``crafting`` with how many of all
    steps of making canaries are done, ``trials`` after every group of a run of many trainings.
    With ``retry_failed``, those of its trainings that have failed are tried again.
    """
    directory, told = RunDirectory(config.output), _Told(watch, say, crafting, trials)
    with directory.locked():
        resolved = directory.resolved(config)
        if resolved is not None:
            require_same_code(resolved, config)
        stored = None if resolved is None else directory.result()
        if stored is not None and not (retry_failed and stored.get("num_failed")):
            return Outcome(stored, was_finished=True)
        prepared = _prepare(config, directory, resolved, told, retry_failed=retry_failed)
        return Outcome(_kind_of(config)(prepared, told), was_finished=False)


def _prepare(
    config: Config,
    directory: RunDirectory,
    resolved: Resolved | None,
    told: _Told,
    *,
    retry_failed: bool,
) -> _Prepared:
    data = load_data(config.data)
    is_new = resolved is None
    if resolved is None:
        if config.training.target_epsilon is not None:
            told.say("Calibrating the noise")
        resolved = resolve(config, data[0])
    else:
        require_same_data(resolved, data[0])
    return _Prepared(config, directory, resolved, data, is_new, retry_failed)


def _kind_of(config: Config) -> Callable[[_Prepared, _Told], dict[str, Any]]:
    if isinstance(config.audit, ManyRunsConfig):
        return _many_trainings
    return _final_model if config.threat_model == ThreatModel.BLACK_BOX.value else _every_step


def _many_trainings(run: _Prepared, told: _Told) -> dict[str, Any]:
    runs = ManyRuns(config=run.config, resolved=run.resolved, data=run.data)
    return run_many(
        runs,
        run.directory,
        begin=run.begin,
        watch=told.trials,
        say=told.say,
        retry_failed=run.retry_failed,
    )


def _final_model(run: _Prepared, told: _Told) -> dict[str, Any]:
    final = FinalModel.of(run.config, run.resolved, run.data)
    run.begin()
    told.say("Training")
    seconds = train(final, run.directory.checkpoint, Live(), told.watch).seconds
    told.say("Finding the bounds")
    values = final.outcome(seconds)
    run.directory.finish({"scores": final.scores, "present": final.present}, values)
    return values


def _every_step(run: _Prepared, told: _Told) -> dict[str, Any]:
    live = Live()
    experiment = build(run.config, run.resolved, run.data, Watchers((live,), told.crafting))
    run.begin()
    told.say("Training")
    trained = train(experiment, run.directory.checkpoint, live, told.watch)
    if trained.stopped_early:
        told.say(f"Stopped at step {experiment.training.num_done:,}: the claim is refuted")
    told.say("Finding the bounds of all methods")
    values = outcome(experiment, trained)
    run.directory.finish(observed(experiment), values)
    return values


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
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        raise InputError("Expected run() with threat_model = 'black-box', which keeps scores in a directory.")
    data, live = load_data(config.data), Live()
    resolved = resolve(config, data[0])
    experiment = build(config, resolved, data, Watchers((live,), crafting))
    values = outcome(experiment, train(experiment, None, live, watch))
    if keep:
        RunDirectory(config.output).replace(config, resolved, observed(experiment), values)
    return values
