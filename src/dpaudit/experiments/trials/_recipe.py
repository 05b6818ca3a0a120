"""How any process, on any machine, makes the same scorer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.experiments.trials._target import load
from dpaudit.experiments.trials._trial import Scorer

__all__ = ["Recipe"]


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

    Trials are cut into groups of so many by their numbers, and a group is always computed as a whole: where
    rounding depends on the company of a model, it is always in the same company.
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
        """The whole recipe as text."""
        values = {"target": self.target, "arguments": self.arguments, "group_size": self.group_size}
        return json.dumps(values, allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """The same again."""
        return cls(**json.loads(text))

    def build(self) -> Scorer:
        """Make the scorer; whatever goes wrong here would go wrong for every trial."""
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
