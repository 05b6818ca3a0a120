"""One experiment from its config to its result, resumed where it was interrupted.

``run`` keeps everything in the output directory of the config, ``rehearse`` runs in one go. Below them: the
kinds of runs, and the result of one with an audit of steps, as plain values and arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpaudit.accounting import SubsampledGaussian
from dpaudit.canaries import InputCanary, ThreatModel
from dpaudit.errors import InputError
from dpaudit.experiments._build import Experiment, build, load_data
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._listener import Listener, Progress, Running, ignore
from dpaudit.experiments._loop import Trainable, Trained, summary, train
from dpaudit.experiments._resolved import Resolved, require_same_code, require_same_data, resolve
from dpaudit.experiments.black_box import FinalModel, ManyRuns, run_many
from dpaudit.experiments.config import Config, EndToEndConfig, ManyRunsConfig, PaperConfig
from dpaudit.methods import examine
from dpaudit.recording import WholeRunRecorder
from dpaudit.stats import TradeOff
from dpaudit.stats._serialization import SCHEMA_VERSION
from dpaudit.training import OneRun
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


@dataclass(frozen=True)
class Outcome:
    """The plain values of ``result.json``, and whether they were there already."""

    values: dict[str, Any]
    was_finished: bool


def run(
    config: Config,
    *,
    watch: Callable[[Progress], None] = ignore,
    say: Callable[[str], None] = ignore,
    crafting: Callable[[int, int], None] = ignore,
    trials: Callable[[Running], None] = ignore,
    retry_failed: bool = False,
) -> Outcome:
    """Train, audit and keep everything in the config's output directory.

    The same config resumes from the last checkpoint, or has its result already; another one is refused.
    ``watch`` is called after every step, ``say`` with what is done in between, ``crafting`` with the number
    of finished steps of canary crafting and of all, ``trials`` after every group of a run of many trainings.
    With ``retry_failed``, trainings that have failed are tried again.
    """
    listener = Listener(message=say, step=watch, crafting=crafting, trials=trials)
    directory = RunDirectory(config.output)
    with directory.locked():
        resolved = directory.resolved(config)
        if resolved is not None:
            require_same_code(resolved, config)
        stored = None if resolved is None else directory.result()
        if stored is not None and not (retry_failed and stored.get("num_failed")):
            return Outcome(stored, was_finished=True)
        values = _prepare(config, directory, resolved, listener, retry_failed=retry_failed).run()
        return Outcome(values, was_finished=False)


def rehearse(
    config: Config,
    *,
    watch: Callable[[Progress], None] = ignore,
    crafting: Callable[[int, int], None] = ignore,
    keep: bool = False,
) -> dict[str, Any]:
    """Train and audit in one go, without checkpoints; return the values of the result.

    Nothing is kept, unless ``keep`` says so: then everything goes to the output directory at the end and
    replaces what an earlier run left there.
    """
    if config.threat_model == ThreatModel.BLACK_BOX.value:
        raise InputError("Expected run() with threat_model = 'black-box', which keeps scores in a directory.")
    listener, data = Listener(step=watch, crafting=crafting), load_data(config.data)
    resolved = resolve(config, data[0])
    experiment = build(config, resolved, data, listener)
    values = _outcome(experiment, train(experiment, None, listener))
    if keep:
        RunDirectory(config.output).replace(config, resolved, _arrays(experiment), values)
    return values


def use_one_thread() -> None:
    """Let torch use one thread: several that share a core mostly wait for each other."""
    torch.set_num_threads(1)


def _prepare(
    config: Config,
    directory: RunDirectory,
    resolved: Resolved | None,
    listener: Listener,
    *,
    retry_failed: bool,
) -> _PreparedRun:
    data = load_data(config.data)
    is_new = resolved is None
    if resolved is None:
        if config.training.target_epsilon is not None:
            listener.message("Calibrating the noise")
        resolved = resolve(config, data[0])
    else:
        require_same_data(resolved, data[0])
    return _PreparedRun(config, directory, resolved, data, listener, is_new, retry_failed)


@dataclass(frozen=True)
class _PreparedRun:
    """A run of which all is known, before its first step."""

    config: Config
    directory: RunDirectory
    resolved: Resolved
    data: tuple[Dataset, Dataset]
    listener: Listener
    is_new: bool
    retry_failed: bool

    def run(self) -> dict[str, Any]:
        """Train, audit and return the values of ``result.json``."""
        if isinstance(self.config.audit, ManyRunsConfig):
            return self._many_trainings()
        is_black_box = self.config.threat_model == ThreatModel.BLACK_BOX.value
        return self._final_model() if is_black_box else self._every_step()

    def _begin(self) -> None:
        """Keep the config, once nothing about it can be wrong any more."""
        if self.is_new:
            self.directory.begin(self.config, self.resolved)

    def _many_trainings(self) -> dict[str, Any]:
        runs = ManyRuns(config=self.config, resolved=self.resolved, data=self.data)
        return run_many(
            runs, self.directory, begin=self._begin, listener=self.listener, retry_failed=self.retry_failed
        )

    def _final_model(self) -> dict[str, Any]:
        final = FinalModel.of(self.config, self.resolved, self.data)
        trained = self._train(final)
        self.listener.message("Finding the bounds")
        started = time.monotonic()
        values = {"schema_version": SCHEMA_VERSION, **final.values(), **summary(final, trained, started)}
        self.directory.finish({"scores": final.scores, "present": final.present}, values)
        return values

    def _every_step(self) -> dict[str, Any]:
        experiment = build(self.config, self.resolved, self.data, self.listener)
        trained = self._train(experiment)
        if trained.stopped_early:
            done = experiment.training.num_done
            self.listener.message(f"Stopped at step {done:,}: the claim is refuted")
        self.listener.message("Finding the bounds of all methods")
        values = _outcome(experiment, trained)
        self.directory.finish(_arrays(experiment), values)
        return values

    def _train(self, experiment: Trainable) -> Trained:
        self._begin()
        self.listener.message("Training")
        return train(experiment, self.directory.checkpoint, self.listener)


def _arrays(experiment: Experiment) -> dict[str, np.ndarray]:
    """Return the recorded observations by the names of their files."""
    state = experiment.audit.recorder.state_dict()
    if isinstance(experiment.audit.recorder, WholeRunRecorder):
        return {"log_likelihood_ratios": state["ratios"], "present": state["present"]}
    return {"scores": state["scores"], "present": state["present"]}


def _outcome(experiment: Experiment, trained: Trained) -> dict[str, Any]:
    """Return verdict, all bounds, power, tests of the noise, accuracy and timing."""
    started = time.monotonic()
    values = _bounds(experiment, trained)
    return {
        "schema_version": SCHEMA_VERSION,
        **values,
        "diagnosis": _diagnosis(experiment, trained),
        **summary(experiment, trained, started),
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
    """Test noise and batches, with an error rate of their own; None for a run that chose its end."""
    if trained.stopped_early:
        return None
    return experiment.tests.diagnose(experiment.audit.recorder.confidence).to_dict()


def _names(experiment: Experiment, trained: Trained) -> Collection[str] | None:
    """Return the methods, beside that of the verdict, whose bounds hold here."""
    asked = experiment.config.audit.methods
    if trained.stopped_early:  # a fixed number of observations is what the others count on
        return ()
    if _shares_noise(experiment):
        return () if asked is not None and _BETS not in asked else (_BETS,)
    return asked


def _shares_noise(experiment: Experiment) -> bool:
    """Return whether scores of one step are dependent even in a correct training."""
    audit = experiment.audit
    return isinstance(audit, OneRun) and isinstance(audit.canary, InputCanary) and audit.num_canaries > 1


def _curve(experiment: Experiment) -> TradeOff | None:
    """Return the trade-off of one observation, unless it is that of a step with the canary."""
    recorder, audit = experiment.audit.recorder, experiment.config.audit
    if isinstance(audit, EndToEndConfig) and isinstance(recorder, WholeRunRecorder):
        return recorder.tradeoff
    if isinstance(audit, PaperConfig) and audit.canary_rate < 1:
        return SubsampledGaussian(audit.canary_rate, 1)
    return None
