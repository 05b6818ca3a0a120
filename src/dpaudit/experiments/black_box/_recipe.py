"""From a config to the recipe of its trials: what every process makes again from plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from dpaudit import _files
from dpaudit.experiments._build import device_of, mechanism_of, settings_of
from dpaudit.experiments._data import load_data
from dpaudit.experiments._held_out import split_held_out
from dpaudit.experiments._models import model_for
from dpaudit.experiments._resolved import Resolved, require_same_code, require_same_data
from dpaudit.experiments.black_box._canary import canary_for, first_weights
from dpaudit.experiments.black_box._made import Made
from dpaudit.experiments.config import Config, FunctionModel, ManyRunsConfig
from dpaudit.experiments.trials import Neighbours, Recipe, Trial, function_recipe, log_odds
from dpaudit.training.data import Dataset, HeldOutData
from dpaudit.training.ensemble import Ensemble, Score, negative_loss
from dpaudit.training.ensemble import log_odds as ensemble_log_odds
from dpaudit.training.ensemble._example import joined

__all__ = ["ManyRuns", "recipe_for"]

_SCORES: Mapping[str, Score] = {"log-odds": ensemble_log_odds, "loss": negative_loss}


@dataclass(frozen=True, kw_only=True, eq=False)
class ManyRuns:
    """What all trainings of a run have in common."""

    config: Config
    resolved: Resolved
    data: tuple[Dataset, Dataset]
    kept: Made | None = None
    """The canary and the first weights that were made before."""

    @classmethod
    def again(
        cls, values: Mapping[str, Any], resolved: Mapping[str, Any], made: Mapping[str, Any]
    ) -> ManyRuns:
        """The same in another process, from plain values; refused if its data are others."""
        config, numbers = Config.model_validate({**values, "output": "."}), Resolved.from_dict(resolved)
        data = load_data(config.data)
        require_same_data(numbers, data[0])
        require_same_code(numbers, config)
        return cls(config=config, resolved=numbers, data=data, kept=Made.from_dict(made))

    @property
    def audit(self) -> ManyRunsConfig:
        """Its table of the config."""
        assert isinstance(self.config.audit, ManyRunsConfig)
        return self.config.audit

    @cached_property
    def _parts(self) -> tuple[Dataset, HeldOutData]:
        test, held_out = split_held_out(self.config, self.resolved, *self.data)
        assert held_out is not None  # the config has a number of them
        return test, held_out

    @property
    def test(self) -> Dataset:
        """The examples to test on."""
        return self._parts[0]

    @cached_property
    def build(self) -> Callable[[], nn.Module] | None:
        """Makes a model; None: a function of the user does."""
        model = self.config.model
        return None if isinstance(model, FunctionModel) else model_for(model, self.data[0])

    @cached_property
    def made(self) -> Made:
        """What is inserted, and the weights that all models start from; None: each has its own."""
        if self.kept is not None:
            return self.kept
        seed, held_out = self.resolved.audit_seed, self._parts[1]
        weights = None
        if self.build is not None:
            weights = first_weights(self.audit.initialization, self.build, held_out, seed)
        return Made(canary_for(self.audit.canary, held_out, seed, self.build, weights), weights)

    @cached_property
    def ensemble(self) -> Ensemble:
        """What trains, unless a function of the user does."""
        assert self.build is not None
        training = self.config.training
        return Ensemble(
            build=self.build,
            data=self.data[0],
            canary=self.made.canary,
            settings=settings_of(training, self.resolved),
            mechanism=mechanism_of(training, self.resolved),
            initial_weights=self.made.weights,
            device=device_of(self.config.device),
        )


def recipe_for(runs: ManyRuns) -> Recipe:
    """How any process makes the trials of this run."""
    arguments = {
        "values": _found_anywhere(runs.config),
        "resolved": runs.resolved.to_dict(),
        "made": runs.made.to_dict(),
    }
    model = runs.config.model
    if isinstance(model, FunctionModel):
        return function_recipe(
            model.function,
            data=f"{__name__}:{neighbours.__name__}",
            data_arguments=arguments,
            score=f"{__name__}:{log_probability.__name__}" if runs.audit.score == "loss" else None,
        )
    return Recipe(
        target=f"{__name__}:{scorer.__name__}", arguments=arguments, group_size=runs.ensemble.at_once
    )


def _found_anywhere(config: Config) -> dict[str, Any]:
    """The config as plain values, with data that are found from any directory."""
    values = config.identity()
    if values["data"].get("directory") is not None:
        values["data"]["directory"] = str(_files.expanded(values["data"]["directory"]).absolute())
    return values


def scorer(
    *, values: Mapping[str, Any], resolved: Mapping[str, Any], made: Mapping[str, Any]
) -> Callable[[Sequence[Trial]], list[float]]:
    """The scorer of an ensemble."""
    runs = ManyRuns.again(values, resolved, made)
    ensemble, score = runs.ensemble, _SCORES[runs.audit.score or "log-odds"]

    def scored(trials: Sequence[Trial]) -> list[float]:
        found = ensemble.scores([one.seed for one in trials], [one.present for one in trials], score)
        return [float(one) for one in found]

    return scored


def neighbours(
    *, values: Mapping[str, Any], resolved: Mapping[str, Any], made: Mapping[str, Any]
) -> Neighbours:
    """The two data sets that a function of the user is trained on, as a model takes them."""
    runs = ManyRuns.again(values, resolved, made)
    data, canary = runs.data[0], runs.made.canary
    alone = Dataset(*data.at(torch.arange(len(data))), data.num_classes)
    return Neighbours(
        with_canary=joined(data, canary), without_canary=alone, canary=(canary.inputs, canary.target)
    )


def log_probability(model: Any, example: Any, label: int) -> float:
    """Minus the loss of a model at the canary."""
    return float(-np.logaddexp(0.0, -log_odds(model, example, label)))
