"""Plan of a run of trials: the list of trials, and the recipe with which any process can score them.

A :class:`Recipe` identifies a function by name, so that another process or machine can load it.
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

from dpaudit import _validate
from dpaudit._interrupts import raise_if_machine
from dpaudit._io import open_file
from dpaudit._provenance import spawn_seed
from dpaudit.errors import DpauditError, InputError

# dpaudit's own targets. Their names are part of a stored run's identity and must not change when code moves.
_BUILT_IN = {
    "dpaudit:ensemble-scorer": "dpaudit.experiments.black_box._many_runs:scorer",
    "dpaudit:neighbours": "dpaudit.experiments.black_box._many_runs:neighbours",
    "dpaudit:log-probability": "dpaudit.experiments.black_box._many_runs:log_probability",
    "dpaudit:function-scorer": "dpaudit.experiments.trials._function:function_scorer",
    "dpaudit:figure-cells": "dpaudit.experiments.reproduction._reproduce:worker",
}


@dataclass(frozen=True)
class Trial:
    """One training run of a black-box audit."""

    number: int
    seed: int
    """The 128-bit random seed of this trial, from which all its randomness is derived."""
    present: bool
    """Whether the canary is in the data: in every second trial, so that any part of a run is balanced."""

    @classmethod
    def of(cls, seed: int, number: int) -> Trial:
        """Return the trial with this number in a run with this seed.

        >>> Trial.of(1, 0).present, Trial.of(1, 1).present, Trial.of(1, 0) == Trial.of(1, 0)
        (False, True, True)
        """
        # branch 1 of the run's seed is the audit's
        return cls(number, spawn_seed(seed, 2, number), number % 2 == 1)


Group: TypeAlias = tuple[Trial, ...]


class Scorer(Protocol):
    """Callable that trains a model for each trial and returns the canary's scores."""

    def __call__(self, trials: Sequence[Trial], /) -> Sequence[float]: ...


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Function, named as ``module:function``, that creates a scorer from plain arguments.

    >>> Recipe(target="builtins:sum").group_size
    1
    """

    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values that JSON can represent: they are sent to other processes and machines."""
    group_size: int = 1
    """Number of trials that the scorer trains together.

    Trials are grouped by number, and a group is always computed together: rounding errors of a model may
    depend on the other models in its group, which are always the same.
    """

    def __post_init__(self) -> None:
        _validate.integer("group_size", self.group_size)
        try:
            is_plain = json.loads(self.to_json())["arguments"] == self.arguments
        except (TypeError, ValueError) as error:
            raise InputError(f"arguments must be representable as JSON, got {self.arguments!r}.") from error
        if not is_plain:  # for example, integer keys
            raise InputError(f"arguments must be preserved exactly by JSON, got {self.arguments!r}.")

    @property
    def is_own(self) -> bool:
        """Whether all code of a trial is dpaudit's, so that an exception is not a failure of the training."""
        return self.target == "dpaudit:ensemble-scorer"

    def to_json(self) -> str:
        """Return the recipe as JSON text."""
        values = {"target": self.target, "arguments": self.arguments, "group_size": self.group_size}
        return json.dumps(values, allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Return the recipe that :meth:`to_json` serialized."""
        return cls(**json.loads(text))

    def build(self) -> Scorer:
        """Create the scorer; an error here would occur for every trial."""
        function = load(self.target)
        try:
            scorer = function(**self.arguments)
        except DpauditError:
            raise
        except Exception as error:  # the function may raise anything
            raise_if_machine(error, f"Cannot call {self.target!r}")
            if self.is_own:
                raise
            raise InputError(
                f"{self.target!r} must return a scorer, but it raised {type(error).__name__}: {error}"
            ) from error
        if not callable(scorer):
            raise InputError(f"{self.target!r} must return a scorer, a function of trials, got {scorer!r}.")
        return scorer  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """Trials of a run, fully determined by these values."""

    recipe: Recipe
    num_trials: int
    seed: int
    config: Mapping[str, Any] | None = None
    """Plain values that identify the run; None means the recipe's arguments."""

    def __post_init__(self) -> None:
        _validate.integer("num_trials", self.num_trials, low=2, high=1_000_000)  # all in memory
        _validate.integer("seed", self.seed, low=0)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, ordered by number."""
        return tuple(Trial.of(self.seed, number) for number in range(self.num_trials))

    def groups_without(self, done: Container[int]) -> list[Group]:
        """Return the groups with at least one trial that is not in ``done``."""
        size = self.recipe.group_size
        groups = (self.trials[start : start + size] for start in range(0, self.num_trials, size))
        return [group for group in groups if any(trial.number not in done for trial in group)]

    def identity(self) -> dict[str, Any]:
        """Return all values on which the scores depend; scores of different identities must not be mixed."""
        name, values = (
            ("arguments", self.recipe.arguments) if self.config is None else ("config", self.config)
        )
        return {
            name: dict(values),
            "target": self.recipe.target,
            "group_size": self.recipe.group_size,
            "num_trials": self.num_trials,
            "seed": self.seed,
        }


def load(target: str) -> Callable[..., Any]:
    """Return the function with this name, given as ``module:function``.

    Modules in the current directory are found as well.

    >>> load("math:sqrt")(4.0)
    2.0
    """
    target = _BUILT_IN.get(target, target) if isinstance(target, str) else target
    module_name, colon, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (module_name and colon and name):
        raise InputError(f"A function is named as 'module:function', got {target!r}.")
    extend_search_path([str(Path.cwd())])
    module = _module(target, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        source = getattr(module, "__file__", None) or module_name
        wrong = f"{name} is not a function" if hasattr(module, name) else f"there is no {name}"
        raise InputError(f"{target!r} is not a function: {wrong} in {source}.")
    return function  # type: ignore[no-any-return]


def source_digest(target: str) -> str:
    """Return a hash of the source file of a function's module; empty if there is no file."""
    extend_search_path([str(Path.cwd())])
    name = target.partition(":")[0]
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return ""
    with open_file(spec.origin) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def search_path() -> tuple[str, ...]:
    """Return the module search path of this process as absolute paths, for use in another process."""
    return tuple(str(Path(entry or ".").absolute()) for entry in sys.path)


def extend_search_path(directories: Iterable[str]) -> None:
    """Prepend these directories to the module search path, unless they are already in it."""
    present = set(search_path())
    sys.path[:0] = [directory for directory in directories if directory not in present]


def _module(target: str, name: str) -> ModuleType:
    importlib.invalidate_caches()  # the file may have been written a moment ago
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise InputError(
                f"{target!r} cannot be imported: module {missing} is neither in {Path.cwd()} nor installed."
            ) from error
        raise InputError(f"{target!r} cannot be imported: its module {name} needs {missing}.") from error
    except Exception as error:  # the user's module may raise anything
        raise InputError(
            f"{target!r} cannot be imported: its module {name} raised {type(error).__name__}: {error}"
        ) from error
