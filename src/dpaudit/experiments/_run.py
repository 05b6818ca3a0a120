"""One experiment from its config to its result; goes on where it was interrupted.

The result of a run as plain values, and its observations as arrays. How torch uses the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpaudit._torch._crafting import nobody
from dpaudit.accounting import SubsampledGaussian
from dpaudit.canaries import InputCanary, ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments._build import Experiment, Watchers, build, load_data
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._loop import Live, Progress, Trained, train
from dpaudit.experiments._resolved import Resolved, require_same_code, require_same_data, resolve
from dpaudit.experiments.black_box import FinalModel, ManyRuns, Running, run_many
from dpaudit.experiments.config import Config, EndToEndConfig, ManyRunsConfig, PaperConfig
from dpaudit.methods import examine
from dpaudit.recording import WholeRunRecorder
from dpaudit.stats import TradeOff
from dpaudit.stats._serialization import SCHEMA_VERSION
from dpaudit.training import OneRun, accuracy
from dpaudit.training.data import Dataset

_SHARED = (
    "Gradients of input canaries are not orthogonal: scores of one step share their noise. The verdict's "
    "bound allows for that; bounds by counts do not, and are left out."
)
_BETS = "f-DP(betting)"
_STOPPED = (
    "The run was stopped at its first violation. The verdict's bound allows for that; bounds by counts and "
    "tests of the noise do not, and are left out."
)


def observed(experiment: Experiment) -> dict[str, np.ndarray]:
    """What was recorded, by the names of the files."""
    state = experiment.audit.recorder.state_dict()
    if isinstance(experiment.audit.recorder, WholeRunRecorder):
        return {"log_likelihood_ratios": state["ratios"], "present": state["present"]}
    return {"scores": state["scores"], "present": state["present"]}


def outcome(experiment: Experiment, trained: Trained) -> dict[str, Any]:
    """Verdict, all bounds, power, tests of the noise, accuracy and timing."""
    started = time.monotonic()
    values = _bounds(experiment, trained)
    training, resolved = experiment.training, experiment.resolved
    return {
        "schema_version": SCHEMA_VERSION,
        **values,
        "diagnosis": _diagnosis(experiment, trained),
        "mode": experiment.config.audit.mode,
        "threat_model": experiment.config.threat_model,
        "noise_multiplier": resolved.noise_multiplier,
        "sample_rate": resolved.sample_rate,
        "num_steps": training.settings.num_steps,
        "num_done": training.num_done,
        "stopped_early": trained.stopped_early,
        "num_parameters": training.num_parameters,
        "num_canaries": experiment.audit.num_canaries,
        "accuracy": accuracy(training.model, experiment.test.to(training.device)),
        "timing": {
            "training_seconds": round(trained.seconds, 3),
            "steps_per_second": round(training.num_done / max(trained.seconds, 1e-9), 3),
            "audit_seconds": round(time.monotonic() - started, 3),
        },
    }


def _bounds(experiment: Experiment, trained: Trained) -> dict[str, Any]:
    recorder = experiment.audit.recorder
    of_run = isinstance(recorder, WholeRunRecorder)
    found = examine(
        recorder.observations,
        delta=recorder.claim.delta,
        confidence=recorder.confidence,
        claim=recorder.claim,
        tradeoff=_curve(experiment),
        of_steps=not of_run,
        threshold=0.0 if of_run else None,
        names=_names(experiment, trained),
        result=recorder.audit(),
    )
    values = found.to_dict()
    if isinstance(recorder, WholeRunRecorder):
        values["one_run_bound"] = recorder.one_run_bound().to_dict()
    if trained.stopped_early:
        values["notes"].append(_STOPPED)
    elif _shares_noise(experiment):
        values["notes"].append(_SHARED)
    return values


def _diagnosis(experiment: Experiment, trained: Trained) -> dict[str, Any] | None:
    """Tests of the noise and the batches, with an error of their own; none of a run that chose its end."""
    if trained.stopped_early:
        return None
    return experiment.tests.diagnose(experiment.audit.recorder.confidence).to_dict()


def _names(experiment: Experiment, trained: Trained) -> Collection[str] | None:
    """The methods beside the verdict that hold here."""
    asked = experiment.config.audit.methods
    if trained.stopped_early:  # a fixed number of observations is what the others count on
        return ()
    if _shares_noise(experiment):
        return () if asked is not None and _BETS not in asked else (_BETS,)
    return asked


def _shares_noise(experiment: Experiment) -> bool:
    """Whether scores of one step depend on each other also in a correct training."""
    audit = experiment.audit
    return isinstance(audit, OneRun) and isinstance(audit.canary, InputCanary) and audit.num_canaries > 1


def _curve(experiment: Experiment) -> TradeOff | None:
    """The curve of one observation, where it is not that of a step that has the canary."""
    recorder, audit = experiment.audit.recorder, experiment.config.audit
    if isinstance(audit, EndToEndConfig) and isinstance(recorder, WholeRunRecorder):
        return recorder.tradeoff
    if isinstance(audit, PaperConfig) and audit.canary_rate < 1:
        return SubsampledGaussian(audit.canary_rate, 1)
    return None


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


def use_one_thread() -> None:
    """Two threads of torch that share a core with anything else wait for each other most of the time."""
    torch.set_num_threads(1)
