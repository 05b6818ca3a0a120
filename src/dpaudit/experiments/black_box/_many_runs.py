"""Black-box audit of many training runs, from the config to the result.

``run_many`` trains in a pool and analyzes the scores; :class:`ManyRuns` holds what the training runs share
and is restored from plain values in every process. ``scorer`` and ``neighbours`` are targets of recipes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from dpaudit import _io
from dpaudit.errors import InputError
from dpaudit.experiments import _analysis as analysis
from dpaudit.experiments import _build as building
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._loop import Listener, Running
from dpaudit.experiments.black_box._canary import SharedCanary, canary_for, first_weights
from dpaudit.experiments.black_box._final_model import SCORES
from dpaudit.experiments.config import Config
from dpaudit.experiments.config._schema import FunctionModel, ManyRunsConfig, PoolConfig
from dpaudit.experiments.trials import (
    Neighbours,
    Pool,
    Processes,
    Ray,
    Recipe,
    Serial,
    Store,
    Trial,
    TrialPlan,
    TrialProgress,
    TrialsRun,
    function_recipe,
    log_odds,
    run_trials,
)
from dpaudit.stats import Observations, plain
from dpaudit.training import accuracy
from dpaudit.training.data import Dataset, HeldOutData
from dpaudit.training.ensemble import Ensemble
from dpaudit.training.ensemble._models import joined
from dpaudit.training.gradients import num_parameters

_PAUSE_SECONDS = 5.0  # between two running bounds


def run_many(
    runs: ManyRuns,
    directory: RunDirectory,
    *,
    begin: Callable[[], None],
    listener: Listener,
    retry_failed: bool = False,
) -> dict[str, Any]:
    """Train the missing models and return the result. ``begin`` is called before training starts."""
    run = runs.resolved.run_digest(runs.config)
    stored = SharedCanary.read(directory.path, run)
    runs = replace(runs, stored=stored or runs.shared)
    plan = TrialPlan(
        recipe=recipe_for(runs),
        num_trials=runs.audit.num_models,
        seed=runs.resolved.seed,
        config={**runs.config.identity(), "canary_digest": runs.shared.digest},
    )
    begin()
    runs.shared.write(directory.path, run)
    estimates = _RunningBound(runs, listener)
    listener.message("Training")
    store, pool = Store(directory.path, plan), pool_for(runs.config.pool)
    for remark in store.remarks:
        listener.message(remark)
    done = run_trials(plan, pool=pool, store=store, retry_failed=retry_failed, watch=estimates.update)
    listener.message("Computing the bounds of all methods")
    if (observations := done.observations) is None:
        raise InputError(f"No training run returned a score: {done.failure_summary}")
    scores = runs.scores(observations, len(done.failures))
    values = _outcome(runs, scores, done, estimates.progress)
    return directory.finish(runs.config, runs.resolved, scores.arrays, values, packages=done.packages)


class _RunningBound:
    """Progress reports with a bound from the scores so far, updated every few seconds."""

    progress: TrialProgress
    """The progress at the last update."""

    def __init__(self, runs: ManyRuns, listener: Listener) -> None:
        self._runs, self._listener = runs, listener
        self._epsilon: float | None = None
        self._due = time.monotonic() + _PAUSE_SECONDS

    def update(self, progress: TrialProgress) -> None:
        self.progress, now = progress, time.monotonic()
        if now >= self._due and progress.num_done >= 20 and progress.num_left > 0:
            if (observations := progress.observations) is not None:
                self._epsilon = analysis.bound_of_runs(self._runs.scores(observations)).epsilon
            ended = time.monotonic()
            # 20 times as long as a bound takes, because workers get no work meanwhile
            self._due = ended + max(_PAUSE_SECONDS, 20 * (ended - now))
        claimed = self._runs.claimed_epsilon
        self._listener.trials(Running(progress=progress, epsilon=self._epsilon, claimed=claimed))


def _outcome(
    runs: ManyRuns, scores: analysis.RunScores, done: TrialsRun, last: TrialProgress
) -> dict[str, Any]:
    """Return the verdict, all bounds, power, accuracy and timing."""
    started = time.monotonic()
    values = analysis.plain_values(scores, analysis.compare(scores))
    if done.num_retried and runs.build is None:
        repeated = f"{done.num_retried:,} training runs that had failed were repeated"
        values["bound"]["assumptions"].append(f"{analysis.RETRIED}{repeated}")
    values["notes"] += done.remarks
    if done.failure_summary is not None:
        values["notes"].append(done.failure_summary)
    speed = last.models_per_second
    return {
        "schema_version": analysis.RESULT_SCHEMA,
        **values,
        "largest_epsilon": plain(analysis.largest_epsilon(scores)),
        **scores.values,
        **_first_model(runs),
        "timing": {
            # since the last start or resume, without models trained before
            "training_seconds": round(last.seconds, 3),
            "models_per_second": None if speed is None else round(speed, 3),
            "audit_seconds": round(time.monotonic() - started, 3),
        },
    }


def _first_model(runs: ManyRuns) -> dict[str, Any]:
    """Train a model without the canary and return its size and accuracy; None for a user's function."""
    if runs.build is None:
        return {"num_parameters": None, "accuracy": None}
    model = runs.ensemble.train([runs.resolved.seed], [False]).module(0)
    return {"num_parameters": num_parameters(model), "accuracy": accuracy(model, runs.test)}


@dataclass(frozen=True, kw_only=True, eq=False)
class ManyRuns:
    """Data, canary and settings shared by all training runs."""

    config: Config
    resolved: building.Resolved
    data: tuple[Dataset, Dataset]
    stored: SharedCanary | None = None
    """The canary and the initial weights, if they were computed before."""

    @classmethod
    def restored(
        cls, values: Mapping[str, Any], resolved: Mapping[str, Any], shared: Mapping[str, Any]
    ) -> ManyRuns:
        """Restore the runs of another process from plain values; raise if data or code differ."""
        config, numbers = (
            Config.model_validate({**values, "output": "."}),
            building.Resolved.from_dict(resolved),
        )
        data = building.load_data(config.data)
        building.require_same_data(numbers, data[0])
        building.require_same_code(numbers, config)
        return cls(config=config, resolved=numbers, data=data, stored=SharedCanary.from_dict(shared))

    @property
    def audit(self) -> ManyRunsConfig:
        """The audit table of the config."""
        assert isinstance(self.config.audit, ManyRunsConfig)
        return self.config.audit

    @cached_property
    def _no_scores(self) -> analysis.RunScores:
        about = {
            "mode": self.audit.mode,
            "threat_model": self.config.threat_model,
            "noise_multiplier": self.resolved.noise_multiplier,
            "sample_rate": self.resolved.sample_rate,
            "num_steps": self.config.training.num_steps,
            "delta": self.config.training.delta,
            "num_models": self.audit.num_models,
        }
        return analysis.RunScores({}, about, self.config.identity()["audit"])

    @property
    def claimed_epsilon(self) -> float | None:
        """The claimed epsilon; None without noise, which claims nothing."""
        claim = self._no_scores.claim
        return None if claim is None else claim.epsilon

    def scores(self, observations: Observations, num_failed: int = 0) -> analysis.RunScores:
        """Return scores of these training runs for their analysis."""
        arrays = {"with_canary": observations.with_canary, "without_canary": observations.without_canary}
        return replace(
            self._no_scores, arrays=arrays, values={**self._no_scores.values, "num_failed": num_failed}
        )

    @cached_property
    def _parts(self) -> tuple[Dataset, HeldOutData]:
        test, held_out = building.split_held_out(self.config, self.resolved, *self.data)
        assert held_out is not None  # ensured by the config
        return test, held_out

    @property
    def test(self) -> Dataset:
        """The test examples."""
        return self._parts[0]

    @cached_property
    def build(self) -> Callable[[], nn.Module] | None:
        """The function that builds a model; None if the user's function trains it."""
        model = self.config.model
        return None if isinstance(model, FunctionModel) else building.model_for(model, self.data[0])

    @cached_property
    def shared(self) -> SharedCanary:
        """The canary, and the initial weights if all models share them."""
        if self.stored is not None:
            return self.stored
        seed, held_out = self.resolved.audit_seed, self._parts[1]
        weights = None
        if self.build is not None:
            weights = first_weights(self.audit.initialization, self.build, held_out, seed)
        return SharedCanary(canary_for(self.audit.canary, held_out, seed, self.build, weights), weights)

    @cached_property
    def ensemble(self) -> Ensemble:
        """The models that are trained together, unless the user's function trains them."""
        assert self.build is not None
        training = self.config.training
        return Ensemble(
            build=self.build,
            data=self.data[0],
            canary=self.shared.canary,
            settings=building.settings_of(training, self.resolved),
            mechanism=building.mechanism_of(training, self.resolved),
            initial_weights=self.shared.weights,
            device=building.device_of(self.config.device),
        )


def recipe_for(runs: ManyRuns) -> Recipe:
    """Return the recipe with which any process can run the trials of this run."""
    arguments = {
        "values": _with_absolute_path(runs.config),
        "resolved": runs.resolved.to_dict(),
        "shared": runs.shared.to_dict(),
    }
    model = runs.config.model
    if isinstance(model, FunctionModel):
        return function_recipe(
            model.function,
            data="dpaudit:neighbours",
            data_arguments=arguments,
            score="dpaudit:log-probability" if runs.audit.score == "loss" else None,
        )
    return Recipe(target="dpaudit:ensemble-scorer", arguments=arguments, group_size=runs.ensemble.at_once)


def _with_absolute_path(config: Config) -> dict[str, Any]:
    """Return the config as plain values, with the data directory as an absolute path."""
    values = config.identity()
    if values["data"].get("directory") is not None:
        values["data"]["directory"] = str(_io.expanded(values["data"]["directory"]).absolute())
    return values


def scorer(
    *, values: Mapping[str, Any], resolved: Mapping[str, Any], shared: Mapping[str, Any]
) -> Callable[[Sequence[Trial]], list[float]]:
    """Return the scorer that trains groups of models as an ensemble."""
    runs = ManyRuns.restored(values, resolved, shared)
    ensemble, score = runs.ensemble, SCORES[runs.audit.score or "log-odds"]

    def scored(trials: Sequence[Trial]) -> list[float]:
        scores = ensemble.scores([trial.seed for trial in trials], [trial.present for trial in trials], score)
        return [float(trial) for trial in scores]

    return scored


def neighbours(
    *, values: Mapping[str, Any], resolved: Mapping[str, Any], shared: Mapping[str, Any]
) -> Neighbours:
    """Return the two data sets for a user's training function, with inputs ready for a model."""
    runs = ManyRuns.restored(values, resolved, shared)
    data, canary = runs.data[0], runs.shared.canary
    alone = Dataset(*data.at(torch.arange(len(data))), data.num_classes)
    return Neighbours(
        with_canary=joined(data, canary), without_canary=alone, canary=(canary.inputs, canary.target)
    )


def log_probability(model: Any, example: Any, label: int) -> float:
    """Return the negative loss of a model on the canary."""
    return float(-np.logaddexp(0.0, -log_odds(model, example, label)))


def pool_for(config: PoolConfig | None) -> Pool:
    """Return the pool that a table describes; its keys are the fields. The default is processes."""
    values = {"kind": "processes"} if config is None else config.model_dump()
    kinds: dict[str, type[Pool]] = {"serial": Serial, "processes": Processes, "ray": Ray}
    return kinds[values.pop("kind")](**values)
