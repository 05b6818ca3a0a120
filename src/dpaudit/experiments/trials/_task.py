"""What a pool does with a group of trials, and what comes back."""

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
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from dpaudit.errors import InputError
from dpaudit.experiments.trials._trial_plan import Group, Recipe, Scorer, extend_search_path, search_path

# for processes that are started; and what is loaded later in this one
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_ALONE = threading.RLock()
_LONGEST_ERROR = 10_000  # characters of a traceback, from its end


@dataclass(frozen=True)
class Finished:
    """The end of a group: for each of its trials a score or an error."""

    scores: tuple[float | None, ...]
    errors: tuple[str | None, ...]
    seconds: float = 0.0
    """That the whole group took."""
    host: str = ""

    @classmethod
    def failed(cls, group: Group, error: str, seconds: float = 0.0) -> Finished:
        """None of its trials has a score."""
        text = error[-_LONGEST_ERROR:].encode(errors="replace").decode()
        nothing = (None,) * len(group)
        return cls(nothing, (text,) * len(group), seconds, socket.gethostname())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Finished:
        """The same again."""
        scores, errors = tuple(values["scores"]), tuple(values["errors"])
        return cls(scores, errors, values["seconds"], values["host"])


@dataclass(frozen=True)
class Task:
    """A function of a group that any process can be given.

    It gives the group back with what became of it, so that anything with a ``map`` can be a pool: the order
    of what comes back does not matter.
    """

    recipe: Recipe
    search_path: tuple[str, ...] = ()
    """Where the process that made the task finds modules."""

    @classmethod
    def of(cls, recipe: Recipe) -> Task:
        """A task for other processes that are to find what this one finds."""
        return cls(recipe, search_path())

    def build(self) -> Scorer:
        """Make the scorer, once in a process."""
        extend_search_path(self.search_path)
        with _quiet_and_alone():
            return self.recipe.build()

    def __call__(self, group: Group) -> tuple[Group, Finished]:
        """Train and score the trials of a group."""
        return group, perform(_built(self.recipe.to_json(), self.search_path), group)


@lru_cache(maxsize=1)
def _built(recipe: str, places: tuple[str, ...]) -> Scorer:
    """For pools that send the task with every group: reading the data once is enough."""
    return Task(Recipe.from_json(recipe), places).build()


def perform(scorer: Scorer, group: Group) -> Finished:
    """Score a group; an error is a result like another."""
    started = time.perf_counter()
    try:
        with _quiet_and_alone():
            scores = _numbers(scorer(group), len(group))
    except (Exception, SystemExit):  # noqa: BLE001  # other people's training may raise anything
        return Finished.failed(group, traceback.format_exc(), time.perf_counter() - started)
    errors = tuple(
        None if math.isfinite(score) else f"Expected a finite score, got {score}." for score in scores
    )
    kept = tuple(score if math.isfinite(score) else None for score in scores)
    return Finished(kept, errors, time.perf_counter() - started, socket.gethostname())


def _numbers(scores: Sequence[float], count: int) -> tuple[float, ...]:
    found = tuple(float(score) for score in scores)
    if len(found) != count:
        raise InputError(f"Expected a score for each of {count} trials, got {len(found)}.")
    return found


@contextmanager
def _quiet_and_alone() -> Iterator[None]:
    """One thread, so that sums are rounded alike everywhere; and standard output is the result's.

    One at a time, too, for pools of threads: all of this, and the generators that are seeded, are the
    process's own.
    """
    with _ALONE:
        yield from _changed()


def _changed() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # for libraries that are loaded now
    torch = sys.modules.get("torch")  # loaded by what is audited, or not at all
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
