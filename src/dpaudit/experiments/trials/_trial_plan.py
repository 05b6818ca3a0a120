"""The plan of a run of trials: which trials there are, and the recipe by which any process scores them.

A :class:`Recipe` names a function as text, so that another process, or another machine, can load it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import numpy as np

from dpaudit import _validate
from dpaudit._io import open_file
from dpaudit.errors import InputError

_MAX_TRIALS = 1_000_000  # each is kept in memory
_BRANCH = 2  # of the run's seed; the first is the audit's own
# dpaudit's own targets. Their names are part of a stored run's identity, so they stay when code moves.
_BUILT_IN = {
    "dpaudit:ensemble-scorer": "dpaudit.experiments.black_box._many_runs:scorer",
    "dpaudit:neighbours": "dpaudit.experiments.black_box._many_runs:neighbours",
    "dpaudit:log-probability": "dpaudit.experiments.black_box._many_runs:log_probability",
    "dpaudit:function-scorer": "dpaudit.experiments.trials._function:function_scorer",
    "dpaudit:figure-cells": "dpaudit.experiments.reproduction._reproduce:worker",
}
# the names that version 0.1 stored instead
_FORMER = {
    "dpaudit.experiments.black_box._recipe:scorer": "dpaudit:ensemble-scorer",
    "dpaudit.experiments.black_box._recipe:neighbours": "dpaudit:neighbours",
    "dpaudit.experiments.black_box._recipe:log_probability": "dpaudit:log-probability",
    "dpaudit.experiments.trials._function:function_scorer": "dpaudit:function-scorer",
}


@dataclass(frozen=True)
class Trial:
    """One training of a black-box audit."""

    number: int
    seed: int
    """The random seed of this trial, 128 bits; everything random in it follows from it."""
    present: bool
    """Whether the canary is in its data: in every second trial, so that any part of a run is balanced."""

    @classmethod
    def of(cls, seed: int, number: int) -> Trial:
        """Return the trial of this number in a run with this seed.

        >>> Trial.of(1, 0).present, Trial.of(1, 1).present, Trial.of(1, 0) == Trial.of(1, 0)
        (False, True, True)
        """
        return cls(number, spawn_seed(seed, _BRANCH, number), number % 2 == 1)


def spawn_seed(seed: int, *branch: int) -> int:
    """Return the seed of 128 bits of a branch of a run's randomness."""
    words = np.random.SeedSequence(seed, spawn_key=branch).generate_state(4, np.uint32)
    return int.from_bytes(words.astype("<u4").tobytes(), "little")


Group: TypeAlias = tuple[Trial, ...]


class Scorer(Protocol):
    """Train a model for each trial and return the canary's score in each of them."""

    def __call__(self, trials: Sequence[Trial], /) -> Sequence[float]: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A function, named as ``module:function``, that makes a scorer from plain arguments.

    >>> Recipe(target="builtins:sum").group_size
    1
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Only what JSON can hold: it is sent to other processes and other machines."""
    group_size: int = 1
    """How many trials its scorer trains at once.

    Trials are grouped by their numbers, and a group is always computed together: the rounding of a model may
    depend on the others of its group, which are always the same.
    """

    def __post_init__(self) -> None:
        _validate.whole("group_size", self.group_size)
        try:
            is_plain = json.loads(self.to_json())["arguments"] == self.arguments
        except (TypeError, ValueError) as error:
            raise InputError(f"Expected arguments that JSON can hold, got {self.arguments!r}.") from error
        if not is_plain:  # such as numbers as keys
            raise InputError(f"Expected arguments that JSON leaves as they are, got {self.arguments!r}.")

    def to_json(self) -> str:
        """Return the recipe as text."""
        values = {"target": self.target, "arguments": self.arguments, "group_size": self.group_size}
        return json.dumps(values, allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Return what :meth:`to_json` came from."""
        return cls(**json.loads(text))

    def build(self) -> Scorer:
        """Make the scorer; an error here would occur for every trial."""
        function = load(self.target)
        try:
            scorer = function(**self.arguments)
        except InputError:
            raise
        except Exception as error:  # the function may raise anything
            raise InputError(
                f"Expected {self.target!r} to make a scorer, but it raised {type(error).__name__}: {error}"
            ) from error
        if not callable(scorer):
            raise InputError(
                f"Expected {self.target!r} to make a scorer, a function of trials, got {scorer!r}."
            )
        return scorer  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """The trials of a run, which follow from these values alone."""

    recipe: Recipe
    num_trials: int
    seed: int
    config: Mapping[str, Any] | None = None
    """What makes two runs the same run, as plain values; None: the recipe's arguments."""

    def __post_init__(self) -> None:
        _validate.whole("num_trials", self.num_trials, low=2, high=_MAX_TRIALS)
        _validate.whole("seed", self.seed, low=0)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, by their numbers."""
        return tuple(Trial.of(self.seed, number) for number in range(self.num_trials))

    def groups_without(self, done: Container[int]) -> list[Group]:
        """Return the groups of which at least one trial is not done."""
        size = self.recipe.group_size
        groups = (self.trials[start : start + size] for start in range(0, self.num_trials, size))
        return [group for group in groups if any(trial.number not in done for trial in group)]

    def identity(self) -> dict[str, Any]:
        """Return everything that the scores depend on; scores of different identities must not be mixed."""
        name, given = ("arguments", self.recipe.arguments) if self.config is None else ("config", self.config)
        return {
            name: dict(given),
            "target": self.recipe.target,
            "group_size": self.recipe.group_size,
            "num_trials": self.num_trials,
            "seed": self.seed,
        }


def with_stable_targets(identity: Any) -> Any:
    """Return an identity in which targets that version 0.1 stored have their present names.

    >>> with_stable_targets({"target": "dpaudit.experiments.black_box._recipe:scorer", "seed": 1})
    {'target': 'dpaudit:ensemble-scorer', 'seed': 1}
    """
    if isinstance(identity, dict):
        return {name: with_stable_targets(value) for name, value in identity.items()}
    return _FORMER.get(identity, identity) if isinstance(identity, str) else identity


def load(target: str) -> Callable[..., Any]:
    """Return the function that ``target`` names, as ``module:function``.

    Modules of the current directory are found too.

    >>> load("math:sqrt")(4.0)
    2.0
    """
    target = _BUILT_IN.get(target, target) if isinstance(target, str) else target
    module_name, colon, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (module_name and colon and name):
        raise InputError(f"Expected a function as 'module:function', got {target!r}.")
    extend_search_path([str(Path.cwd())])
    module = _module(target, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        source = getattr(module, "__file__", None) or module_name
        wrong = f"{name} is no function" if hasattr(module, name) else f"there is no {name}"
        raise InputError(f"Expected a function as 'module:function', got {target!r}: {wrong} in {source}.")
    return function  # type: ignore[no-any-return]


def source_digest(target: str) -> str:
    """Return a hash of the file of a function's module; empty if there is no file."""
    extend_search_path([str(Path.cwd())])
    name = target.partition(":")[0]
    try:
        found = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return ""
    with open_file(found.origin) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def search_path() -> tuple[str, ...]:
    """Return the search path of this process, as absolute paths for another process."""
    return tuple(str(Path(entry or ".").absolute()) for entry in sys.path)


def extend_search_path(directories: Iterable[str]) -> None:
    """Search for modules in these directories first, unless they are known already."""
    known = set(search_path())
    sys.path[:0] = [directory for directory in directories if directory not in known]


def _module(target: str, name: str) -> ModuleType:
    importlib.invalidate_caches()  # the file may have been written a moment ago
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise InputError(
                f"Expected a function as 'module:function', got {target!r}: there is no module {missing} in "
                f"{Path.cwd()} or among the installed ones."
            ) from error
        raise InputError(
            f"Expected {target!r} to be importable, but its module {name} needs {missing}."
        ) from error
    except Exception as error:  # the user's module may raise anything
        raise InputError(
            f"Expected {target!r} to be importable, but its module {name} raised "
            f"{type(error).__name__}: {error}"
        ) from error
