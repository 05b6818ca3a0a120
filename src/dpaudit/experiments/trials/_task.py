"""The task of a pool: train and score a group of trials in any process."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import lru_cache

from dpaudit._interrupts import raise_if_machine
from dpaudit._provenance import packages
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments.trials._trial_plan import Group, Recipe, Scorer, extend_search_path, search_path

# for new processes, and for libraries that this process loads later
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Finished:
    """Result of a group, of plain values: a score or an error for each of its trials."""

    scores: Sequence[float | None]
    errors: Sequence[str | None]
    seconds: float = 0.0
    """The time taken by the group."""
    host: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that the process of the group has imported."""

    @classmethod
    def failed(cls, group: Group, error: str, seconds: float = 0.0) -> Finished:
        """Return the result of a group in which every trial failed."""
        text = error[-10_000:].encode(errors="replace").decode()
        nothing = (None,) * len(group)
        return cls(nothing, (text,) * len(group), seconds, socket.gethostname(), packages())


@dataclass(frozen=True)
class Task:
    """Callable that scores a group and can be sent to any process.

    It returns the group together with its result, so that any unordered ``map`` can serve as a pool.
    """

    recipe: Recipe
    search_path: tuple[str, ...] = ()
    """The module search path of the process that created the task."""

    @classmethod
    def of(cls, recipe: Recipe) -> Task:
        """Return a task for other processes, which will find the same modules as this one."""
        return cls(recipe, search_path())

    def build(self) -> Scorer:
        """Create the scorer; called once per process."""
        extend_search_path(self.search_path)
        with _single_threaded():
            return self.recipe.build()

    def __call__(self, group: Group) -> tuple[Group, Finished]:
        """Train and score the trials of a group."""
        scorer = _built(self.recipe.to_json(), self.search_path)
        return group, perform(scorer, group, is_own=self.recipe.is_own)


@lru_cache(maxsize=1)
def _built(recipe: str, directories: tuple[str, ...]) -> Scorer:
    """Return the scorer, cached for pools that send the task with every group."""
    return Task(Recipe.from_json(recipe), directories).build()


def perform(scorer: Scorer, group: Group, *, is_own: bool = False) -> Finished:
    """Score a group; errors of the user's function become part of the result.

    A fault of the machine raises ``IncompleteError``: the same trial may succeed elsewhere or later. If all
    code is dpaudit's (``is_own``), any exception is raised, because it is not a failure of the training.
    """
    started = time.perf_counter()
    try:
        with _single_threaded():
            scores = _numbers(scorer(group), len(group))
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        raise_if_machine(error, f"{named(group)} could not be trained")
        if is_own:
            raise
        return Finished.failed(group, traceback.format_exc(), time.perf_counter() - started)
    errors = tuple(
        None if math.isfinite(score) else f"The score must be finite, got {score}." for score in scores
    )
    finite = tuple(score if math.isfinite(score) else None for score in scores)
    return Finished(finite, errors, time.perf_counter() - started, socket.gethostname(), packages())


def failed_worker(text: str) -> IncompleteError:
    """Return the error for an exception in dpaudit's own code in another process, with its traceback."""
    lines = text.strip().splitlines()
    error = IncompleteError(f"A worker of dpaudit failed with {lines[-1] if lines else 'an unknown error'}.")
    error.__cause__ = RuntimeError(f"in the worker:\n{text}")
    return error


def named(group: Group) -> str:
    """Return the numbers of the trials of a group, to begin a sentence."""
    first, last = group[0].number, group[-1].number
    return f"Trial {first}" if first == last else f"Trials {first} to {last}"


def _numbers(scores: Sequence[float], count: int) -> tuple[float, ...]:
    numbers = tuple(float(score) for score in scores)
    if len(numbers) != count:
        raise InputError(f"Each of {count} trials needs one score, got {len(numbers)}.")
    return numbers


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Use one thread, so that rounding is the same everywhere, and reserve standard output for the result.

    Threads in a pool take turns: the settings and the seeded RNGs are global to the process.
    """
    with _LOCK:
        before = {name: os.environ.get(name) for name in ONE_THREAD}
        os.environ.update(ONE_THREAD)  # for libraries that are loaded inside this context
        torch = sys.modules.get("torch")  # imported by the audited code, if at all
        threads = torch.get_num_threads() if torch is not None else 1
        try:
            if torch is not None:
                torch.set_num_threads(1)
            with redirect_stdout(sys.stderr):
                yield
        finally:
            if torch is not None:
                torch.set_num_threads(threads)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
