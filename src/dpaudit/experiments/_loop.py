"""The training loop of a run: its callbacks, its progress and its checkpoints.

It ends after the last step, at the first violation if the config requests it, or on an interrupt, which is
deferred to the end of the current step and writes a checkpoint.
"""

from __future__ import annotations

import io
import time
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch

from dpaudit import _io
from dpaudit._interrupts import deferred, raise_if_machine, raise_if_requested, requested
from dpaudit.errors import InputError
from dpaudit.experiments._directory import damaged_checkpoint, read_checkpoint, with_digest
from dpaudit.training import Training, accuracy

if TYPE_CHECKING:
    from dpaudit.experiments._build import Experiment
    from dpaudit.experiments.black_box import FinalModel
    from dpaudit.experiments.trials import TrialProgress
    from dpaudit.recording import LiveBound

_ARRAY = "numpy array"  # key that marks a tensor as a converted array


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


@dataclass(frozen=True)
class Trained:
    """Duration of a training run, and whether it was stopped early."""

    seconds: float  # total, including earlier starts of a resumed run
    stopped_early: bool


def train(experiment: Experiment | FinalModel, checkpoint: Path | None, listener: Listener) -> Trained:
    """Resume from the checkpoint, if there is one, and train to the end or to the first violation.

    After a signal, finish the current step and write a checkpoint before the signal takes effect: a run
    resumed from the middle of a step would differ.
    """
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


def summary(experiment: Experiment | FinalModel, trained: Trained) -> dict[str, Any]:
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


class _Clock:
    """Clock that measures a run, including its earlier starts, and writes checkpoints when they are due."""

    def __init__(self, experiment: Experiment | FinalModel, path: Path | None) -> None:
        self._experiment, self._training, self._path = experiment, experiment.training, path
        self._before, self._run = 0.0, experiment.resolved.run_digest(experiment.config)
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


def save(path: Path, training: Training, seconds: float, run: str) -> None:
    """Write a checkpoint, with private permissions: it reveals seeds and canary membership."""
    file = io.BytesIO()
    torch.save(_as_tensors({"training": training.state_dict(), "seconds": seconds, "run": run}), file)
    _io.write(path, methodcaller("write", with_digest(file.getvalue())), private=True)


def restore(path: Path, training: Training, run: str) -> float:
    """Restore the state of a training run; return the seconds that it had taken. ``run`` is its digest."""
    content = io.BytesIO(read_checkpoint(path))
    try:
        state = _as_arrays(_loaded(content))
        is_own = state["run"] == run
        if is_own:
            training.load_state_dict(state["training"])
            return float(state["seconds"])
    except Exception as error:  # torch raises anything for bytes that are not a checkpoint
        raise_if_machine(error, f"Cannot read {path}")  # deleting an intact checkpoint would lose it
        raise damaged_checkpoint(path) from error
    raise InputError(
        f"The checkpoint {path} is of another run; restore it, or delete it to restart the run from its "
        "first step with the same seeds."
    )


def _loaded(file: BinaryIO) -> Any:
    """Load tensors, numbers and strings only: no code from the file is executed."""
    with zipfile.ZipFile(file) as packed:
        # torch does not compress: an entry that decompresses to more than its size is not from torch
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in packed.infolist()):
            raise zipfile.BadZipFile
    file.seek(0)
    with warnings.catch_warnings():
        # torch warns about an unusual pickle protocol; what can be loaded is validated anyway
        warnings.simplefilter("ignore", UserWarning)
        return torch.load(file, weights_only=True, map_location="cpu")


def _as_tensors(value: Any) -> Any:
    """Convert arrays to marked tensors, which ``torch.load`` accepts with ``weights_only``."""
    if isinstance(value, np.ndarray):
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value))}
    if isinstance(value, Mapping):
        return {key: _as_tensors(item) for key, item in value.items()}
    return [_as_tensors(item) for item in value] if isinstance(value, list) else value


def _as_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if _ARRAY in value:
            return value[_ARRAY].numpy()
        return {key: _as_arrays(item) for key, item in value.items()}
    return [_as_arrays(item) for item in value] if isinstance(value, list) else value
