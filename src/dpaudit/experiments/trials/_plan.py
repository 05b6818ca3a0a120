"""All trials of a run."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dpaudit import _validate
from dpaudit.experiments.trials._recipe import Recipe
from dpaudit.experiments.trials._trial import Group, Trial

__all__ = ["TrialPlan"]

_MOST = 1_000_000  # each is kept in memory


@dataclass(frozen=True, kw_only=True)
class TrialPlan:
    """Which trials a run has; whoever makes it again has the same ones."""

    recipe: Recipe
    num_trials: int
    seed: int
    config: Mapping[str, Any] | None = None
    """What else makes two runs the same run, as plain values; None: the recipe's arguments."""

    def __post_init__(self) -> None:
        _validate.whole("num_trials", self.num_trials, low=2, high=_MOST)
        _validate.whole("seed", self.seed, low=0)

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """By their numbers."""
        return tuple(Trial.of(self.seed, number) for number in range(self.num_trials))

    def groups_without(self, done: Container[int]) -> list[Group]:
        """The groups of which at least one trial is not done."""
        size = self.recipe.group_size
        groups = (self.trials[start : start + size] for start in range(0, self.num_trials, size))
        return [group for group in groups if any(trial.number not in done for trial in group)]

    def identity(self) -> dict[str, Any]:
        """All that the scores depend on: scores of another identity must not be mixed with these."""
        name, given = ("arguments", self.recipe.arguments) if self.config is None else ("config", self.config)
        return {
            name: dict(given),
            "target": self.recipe.target,
            "group_size": self.recipe.group_size,
            "num_trials": self.num_trials,
            "seed": self.seed,
        }
