"""From a config to the recipe of its trials: what every process makes again from plain values.

Many trainings from their config to a verdict. The pool that a config names. Where many trainings are, with
what their scores say so far.
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
from dpaudit.experiments._build import (
    device_of,
    load_data,
    mechanism_of,
    model_for,
    settings_of,
    split_held_out,
)
from dpaudit.experiments._directory import RunDirectory
from dpaudit.experiments._resolved import Resolved, require_same_code, require_same_data
from dpaudit.experiments.black_box._canary import Made, canary_for, first_weights
from dpaudit.experiments.black_box._verdict import Judge
from dpaudit.experiments.config import (
    Config,
    FunctionModel,
    ManyRunsConfig,
    PoolConfig,
    ProcessesConfig,
    RayConfig,
)
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
from dpaudit.stats._serialization import SCHEMA_VERSION
from dpaudit.training import accuracy
from dpaudit.training.data import Dataset, HeldOutData
from dpaudit.training.ensemble import Ensemble, Score, negative_loss
from dpaudit.training.ensemble import log_odds as ensemble_log_odds
from dpaudit.training.ensemble._models import joined
from dpaudit.training.gradients import num_parameters

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
            data="dpaudit:neighbours",
            data_arguments=arguments,
            score="dpaudit:log-probability" if runs.audit.score == "loss" else None,
        )
    return Recipe(target="dpaudit:ensemble-scorer", arguments=arguments, group_size=runs.ensemble.at_once)


def _found_anywhere(config: Config) -> dict[str, Any]:
    """The config as plain values, with data that are found from any directory."""
    values = config.identity()
    if values["data"].get("directory") is not None:
        values["data"]["directory"] = str(_io.expanded(values["data"]["directory"]).absolute())
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


def pool_for(config: PoolConfig | None) -> Pool:
    """The keys of its table are the fields of the pool; without one, processes."""
    if config is None:
        return Processes()
    values = config.model_dump(exclude={"kind"})
    if isinstance(config, ProcessesConfig):
        return Processes(**values)
    return Ray(**values) if isinstance(config, RayConfig) else Serial()


_PAUSE = 5.0  # seconds between two bounds
_SHARE = 20  # and so many times as long as a bound takes: meanwhile nobody gives work to the workers
_FEW = 20  # scores; of fewer nothing is said


@dataclass(frozen=True, kw_only=True)
class Running:
    """Progress, and the bound that the scores so far would give if they were all.

    It is an estimate: who looks at every moment and stops at the best errs more often than the bound says.
    """

    progress: TrialProgress
    epsilon: float | None
    claimed: float | None

    @staticmethod
    def watching(judge: Judge, watch: Callable[[Running], None]) -> Callable[[TrialProgress], None]:
        """What makes such values from progress, and finds a new bound every few seconds."""
        newest: list[float] = []
        due = [time.monotonic() + _PAUSE]

        def told(progress: TrialProgress) -> None:
            now = time.monotonic()
            if now >= due[0] and progress.num_done >= _FEW and progress.num_left > 0:
                observations = progress.observations
                if observations is not None:
                    newest[:] = [judge.bound(observations).epsilon]
                ended = time.monotonic()
                due[0] = ended + max(_PAUSE, _SHARE * (ended - now))
            watch(
                Running(
                    progress=progress, epsilon=newest[0] if newest else None, claimed=judge.claimed_epsilon
                )
            )

        return told


_RETRIED = (
    "all chance of a training comes from the seed that it is given: {:,} that had failed were tried again"
)


def run_many(
    runs: ManyRuns,
    directory: RunDirectory,
    *,
    begin: Callable[[], None],
    watch: Callable[[Running], None],
    say: Callable[[str], None],
    retry_failed: bool = False,
) -> dict[str, Any]:
    """Train what is missing, and judge. ``begin`` is called when everything is in place."""
    runs = replace(runs, kept=Made.read(directory.path) or runs.made)
    plan = TrialPlan(
        recipe=recipe_for(runs),
        num_trials=runs.audit.num_models,
        seed=runs.resolved.seed,
        config={**runs.config.identity(), "canary_digest": runs.made.digest},
    )
    begin()
    runs.made.write(directory.path)
    judge = Judge(runs.config, runs.resolved)
    last: list[TrialProgress] = []
    watched = Running.watching(judge, watch)

    def told(progress: TrialProgress) -> None:
        last[:] = [progress]
        watched(progress)

    say("Training")
    with Store(directory.path, plan) as store:
        for remark in store.remarks:
            say(remark)
        pool = pool_for(runs.config.pool)
        done = run_trials(plan, pool=pool, store=store, retry_failed=retry_failed, watch=told)
    say("Finding the bounds of all methods")
    values = _outcome(runs, judge, done, last[-1])
    directory.finish(_arrays(done), values)
    return values


def _arrays(done: TrialsRun) -> dict[str, np.ndarray]:
    observations = _observations(done)
    return {"with_canary": observations.with_canary, "without_canary": observations.without_canary}


def _observations(done: TrialsRun) -> Any:
    if done.observations is None:
        raise InputError(f"Expected trainings that give scores: {done.failure_summary}")
    return done.observations


def _outcome(runs: ManyRuns, judge: Judge, done: TrialsRun, last: TrialProgress) -> dict[str, Any]:
    """Verdict, all bounds, power, accuracy and timing."""
    started = time.monotonic()
    values = judge.values(_observations(done), done.failures)
    if done.num_retried and runs.build is None:
        values["bound"]["assumptions"].append(_RETRIED.format(done.num_retried))
    notes = [*values["notes"], *done.remarks]
    if done.failure_summary is not None:
        notes.append(done.failure_summary)
    speed = last.models_per_second
    return {
        "schema_version": SCHEMA_VERSION,
        **values,
        "notes": notes,
        "mode": runs.audit.mode,
        "threat_model": runs.config.threat_model,
        "noise_multiplier": runs.resolved.noise_multiplier,
        "sample_rate": runs.resolved.sample_rate,
        "num_steps": runs.config.training.num_steps,
        "num_models": runs.audit.num_models,
        "num_failed": len(done.failures),
        **_first_model(runs),
        "timing": {
            # of the last start; models that were there before took their time then
            "training_seconds": round(last.seconds, 3),
            "models_per_second": None if speed is None else round(speed, 3),
            "audit_seconds": round(time.monotonic() - started, 3),
        },
    }


def _first_model(runs: ManyRuns) -> dict[str, Any]:
    """How good a model is: one without the canary, trained once more. Not known of a user's function."""
    if runs.build is None:
        return {"num_parameters": None, "accuracy": None}
    model = runs.ensemble.train([runs.resolved.seed], [False]).module(0)
    return {"num_parameters": num_parameters(model), "accuracy": accuracy(model, runs.test)}
