"""Scorers and training functions that tests name by text; worker processes import this file."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpaudit.experiments.trials import Neighbours, Trial

Scorer = Callable[[Sequence[Trial]], list[float]]


def score(trial: Trial) -> float:
    return float(np.random.default_rng(trial.seed).normal(float(trial.present)))


def plain() -> Scorer:
    return lambda trials: [score(trial) for trial in trials]


def in_company() -> Scorer:
    """As an ensemble whose sums are rounded differently in other company."""
    return lambda trials: [score(trial) + 1e-9 * len(trials) + 1e-6 * trials[0].number for trial in trials]


def failing(numbers: list[int], healed: str | None = None) -> Scorer:
    def scorer(trials: Sequence[Trial]) -> list[float]:
        if any(trial.number in numbers for trial in trials) and not (healed and Path(healed).exists()):
            raise ZeroDivisionError("this training diverged")
        return [score(trial) for trial in trials]

    return scorer


def killing(number: int, folder: str, times: int) -> Scorer:
    """Kills its own process the first ``times`` times that it gets the trial, and leaves a mark each time."""

    def scorer(trials: Sequence[Trial]) -> list[float]:
        if any(trial.number == number for trial in trials):
            marks = len(list(Path(folder).iterdir()))
            if marks < times:
                (Path(folder) / f"{marks}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return [score(trial) for trial in trials]

    return scorer


def out_of_memory(number: int, folder: str, times: int) -> Scorer:
    """Has no memory the first ``times`` times that it gets the trial, and notes its process each time."""

    def scorer(trials: Sequence[Trial]) -> list[float]:
        marks = len(list(Path(folder).iterdir()))
        if any(trial.number == number for trial in trials) and marks < times:
            (Path(folder) / f"{marks}").write_text(f"{os.getpid()}")
            raise MemoryError
        return [score(trial) for trial in trials]

    return scorer


def without(fault: str, number: int, folder: str) -> Scorer:
    """Has too little memory or disk the first time that it gets the trial."""

    def scorer(trials: Sequence[Trial]) -> list[float]:
        mark = Path(folder) / "mark"
        if any(trial.number == number for trial in trials) and not mark.exists():
            mark.touch()
            raise MemoryError if fault == "memory" else OSError(errno.ENOSPC, "No space left on device")
        return [score(trial) for trial in trials]

    return scorer


def signalling(number: int, folder: str) -> Scorer:
    """Asks its own process to end the first time that it gets the trial."""

    def scorer(trials: Sequence[Trial]) -> list[float]:
        mark = Path(folder) / "mark"
        if any(trial.number == number for trial in trials) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return [score(trial) for trial in trials]

    return scorer


def waiting(number: int, fifo: str, released: str) -> Scorer:
    """Says its process id to whoever reads the pipe, and never ends that trial, unless released."""

    def scorer(trials: Sequence[Trial]) -> list[float]:
        if any(trial.number == number for trial in trials) and not Path(released).exists():
            with Path(fifo).open("w") as pipe:
                pipe.write(f"{os.getpid()}\n")
            signal.pause()
        return [score(trial) for trial in trials]

    return scorer


def odd_scores() -> Scorer:
    values = {0: float("nan"), 1: float("inf"), 2: -0.0, 3: 3.0}
    return lambda trials: [values.get(trial.number, 0.5) for trial in trials]


def extreme() -> Scorer:
    """A model that diverged has the very lowest score, one that is very sure the very highest."""

    def scorer(trials: Sequence[Trial]) -> list[float]:
        values = {0: sys.float_info.max, 1: -sys.float_info.max, 3: 0.0, 4: 0.0}
        return [values[trial.number] for trial in trials]

    return scorer


def too_few() -> Scorer:
    return lambda trials: [0.5] * (len(trials) - 1)


def loud() -> Scorer:
    def scorer(trials: Sequence[Trial]) -> list[float]:
        print("a training that talks")
        return [score(trial) for trial in trials]

    return scorer


def leaving() -> Scorer:
    return lambda _: sys.exit("a training that thinks it is a program")


def offline() -> Scorer:
    def score(_: object) -> list[float]:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")

    return score


def dying_at_import() -> Scorer:
    os._exit(7)


def no_data() -> Scorer:
    raise FileNotFoundError("no such data")


no_function = 3


# What a user would write.


def numbers(size: int = 20) -> Neighbours:
    base = np.random.default_rng(0).normal(size=size)
    return Neighbours(with_canary=np.append(base, 9.0), without_canary=base, canary=(np.array([1.0]), 1))


def noisy_mean(dataset: np.ndarray, seed: int) -> float:
    return float(dataset.mean() + np.random.default_rng(seed).normal())


def forgets_its_seed(dataset: np.ndarray, seed: int) -> float:
    del seed
    return float(dataset.sum() + np.random.normal())  # noqa: NPY002


def noisy_model(dataset: np.ndarray, seed: int) -> Callable[[Any], Any]:
    slope = noisy_mean(dataset, seed)
    return lambda batch: np.concatenate([np.zeros_like(batch), slope * batch], axis=1)


def imports_late(dataset: np.ndarray, seed: int) -> float:
    del dataset, seed
    import torch  # noqa: PLC0415  # by the function itself, and not before

    return float(torch.randn(()))


def nothing(dataset: np.ndarray, seed: int) -> None:
    del dataset, seed


def product(model: Callable[[Any], Any], example: np.ndarray, label: int) -> float:
    return 2.0 * float(model(example[None])[0, label])
