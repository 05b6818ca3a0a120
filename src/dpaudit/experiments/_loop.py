"""The training loop of a run, with its checkpoints.

It ends after the last step, at the first violation if the config requests it, or on an interrupt, which is
deferred to the end of the current step and writes a checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from dpaudit._interrupts import deferred, raise_if_requested, requested
from dpaudit.experiments._build import Experiment
from dpaudit.experiments._directory import restore, run_digest, save
from dpaudit.experiments._listener import Listener, Progress
from dpaudit.experiments.black_box import FinalModel
from dpaudit.recording import Recorder
from dpaudit.training import accuracy

Trainable: TypeAlias = Experiment | FinalModel
"""A training run with its config, its canaries and the latest live bound of its audit."""


@dataclass(frozen=True)
class Trained:
    """Duration of a training run, and whether it was stopped early."""

    seconds: float  # total, including earlier starts of a resumed run
    stopped_early: bool


def train(experiment: Trainable, checkpoint: Path | None, listener: Listener) -> Trained:
    """Resume from the checkpoint, if there is one, and train to the end or to the first violation.

    After a signal, finish the current step and write a checkpoint before the signal takes effect: a run
    resumed from the middle of a step would differ.
    """
    if isinstance(experiment, Experiment):
        _load_accountant(experiment)
    clock = _Clock(experiment, checkpoint)
    stops = getattr(experiment.config.audit, "stop_on_violation", False)
    with deferred():
        listener.step(clock.progress())
        for _ in experiment.training.run():
            progress = clock.progress()
            listener.step(progress)
            # before the checkpoint: a run that is ended here must stop here again after it is resumed
            if stops and progress.live is not None and progress.live.is_violation:
                return Trained(clock.seconds, stopped_early=True)
            if requested() is not None:
                clock.save()
                raise_if_requested()
            clock.save_if_due()
        clock.save()
    return Trained(clock.seconds, stopped_early=False)  # not reached after a signal during the last step


def summary(experiment: Trainable, trained: Trained) -> dict[str, Any]:
    """Return the settings, accuracy and timing of a training run for its result."""
    training, config = experiment.training, experiment.config
    return {
        "mode": config.audit.mode,
        "threat_model": config.threat_model,
        "noise_multiplier": experiment.resolved.noise_multiplier,
        "sample_rate": experiment.resolved.sample_rate,
        "num_steps": training.settings.num_steps,
        "delta": config.training.delta,
        "num_done": training.num_done,
        "stopped_early": trained.stopped_early,
        "num_parameters": training.num_parameters,
        "num_canaries": experiment.num_canaries,
        "accuracy": accuracy(training.model, experiment.test.to(training.device)),
        "timing": {
            "training_seconds": round(trained.seconds, 3),
            "steps_per_second": round(training.num_done / max(trained.seconds, 1e-9), 3),
        },
    }


def _load_accountant(experiment: Experiment) -> None:
    """Compute the accountant's table for live bounds in advance, so that it does not distort step timings."""
    recorder = experiment.audit.recorder
    if isinstance(recorder, Recorder):
        hypothesis = recorder.claim.hypothesis(None)
        hypothesis.epsilon(hypothesis.parameter)


class _Clock:
    """Clock that measures a run, including its earlier starts, and writes checkpoints when they are due."""

    def __init__(self, experiment: Trainable, path: Path | None) -> None:
        self._experiment, self._training, self._path = experiment, experiment.training, path
        self._before, self._run = 0.0, run_digest(experiment.config, experiment.resolved)
        if path is not None and path.exists():
            self._before = restore(path, self._training, self._run)
        self._first = self._training.num_done
        self._started = self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def progress(self) -> Progress:
        done = self._training.num_done
        return Progress(
            num_done=done,
            num_steps=self._training.settings.num_steps,
            num_new=done - self._first,
            seconds=time.monotonic() - self._started,
            live=self._experiment.live,
        )

    def save_if_due(self) -> None:
        if time.monotonic() - self._saved >= self._experiment.config.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        if self._path is not None:
            save(self._path, self._training, self.seconds, self._run)
            self._saved = time.monotonic()
