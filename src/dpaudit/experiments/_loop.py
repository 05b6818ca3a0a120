"""The training itself: steps, checkpoints, and three ways to end.

Ctrl-C that waits for the end of a step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeAlias

from dpaudit.experiments._build import Experiment
from dpaudit.experiments._directory import restore, save
from dpaudit.experiments.config import Config
from dpaudit.recording import LiveBound, Recorder
from dpaudit.training import Training

_SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupt:
    """Whether somebody asked to stop. The second time is at once, without waiting."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self, _signal: int, _frame: FrameType | None) -> None:
        """What a signal calls."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


@contextmanager
def between_steps() -> Iterator[Interrupt]:
    """Inside, an interrupt only asks: half a step in a checkpoint would make another run of it."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # signals are the main thread's
        return
    before = {number: signal.signal(number, interrupt.ask) for number in _SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run is."""

    num_done: int
    num_steps: int
    num_new: int
    """Steps since it was started, or started again."""
    seconds: float
    """In those steps."""
    live: LiveBound | None


Watch: TypeAlias = Callable[[Progress], None]


class Live:
    """Keeps the newest live bound: a callback of the audit."""

    def __init__(self) -> None:
        self.newest: LiveBound | None = None

    def __call__(self, bound: LiveBound) -> None:
        self.newest = bound

    @property
    def is_violation(self) -> bool:
        """Whether the claim is refuted already."""
        return self.newest is not None and self.newest.is_violation


class Trainable(Protocol):
    """What a training and its config are part of."""

    @property
    def config(self) -> Config: ...

    @property
    def training(self) -> Training: ...


@dataclass(frozen=True)
class Trained:
    """How a training ended."""

    seconds: float  # over all starts of the run
    stopped_early: bool


def train(experiment: Trainable, checkpoint: Path | None, live: Live, watch: Watch) -> Trained:
    """Go on from the checkpoint, if there is one, to the end or to the first violation, if that is asked.

    An interrupt ends it too: after the step and a checkpoint, as ``KeyboardInterrupt``.
    """
    if isinstance(experiment, Experiment):
        _ask_accountant(experiment)
    clock = _Clock(experiment, checkpoint)
    stops = getattr(experiment.config.audit, "stop_on_violation", False)
    with between_steps() as interrupt:
        watch(clock.progress(live))
        for _ in experiment.training.run():
            watch(clock.progress(live))
            # before the checkpoint: a run that is killed now and goes on has to stop here again
            if stops and live.is_violation:
                return Trained(clock.seconds, stopped_early=True)
            if interrupt.is_asked:
                clock.save()
                raise KeyboardInterrupt
            clock.save_in_time()
        clock.save()
    return Trained(clock.seconds, stopped_early=False)


def _ask_accountant(experiment: Experiment) -> None:
    """Live bounds need a table of the accountant: made now, its seconds are not taken for those of a step."""
    recorder = experiment.audit.recorder
    if isinstance(recorder, Recorder):
        hypothesis = recorder.claim.hypothesis(None)
        hypothesis.epsilon(hypothesis.parameter)


class _Clock:
    """The time that a run took, over all its starts, and when a checkpoint is due."""

    def __init__(self, experiment: Trainable, path: Path | None) -> None:
        self._training, self._path = experiment.training, path
        self._every = experiment.config.checkpoint_seconds
        self._before = 0.0
        if path is not None and path.exists():
            self._before = restore(path, self._training)
        self._first = self._training.num_done
        self._started = self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._started

    def progress(self, live: Live) -> Progress:
        done = self._training.num_done
        return Progress(
            num_done=done,
            num_steps=self._training.settings.num_steps,
            num_new=done - self._first,
            seconds=time.monotonic() - self._started,
            live=live.newest,
        )

    def save_in_time(self) -> None:
        if time.monotonic() - self._saved >= self._every:
            self.save()

    def save(self) -> None:
        if self._path is not None:
            save(self._path, self._training, self.seconds)
            self._saved = time.monotonic()
