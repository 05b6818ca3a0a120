"""Many trainings from their config to a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.experiments._directory import SCHEMA_VERSION, RunDirectory
from dpaudit.experiments.black_box._made import Made
from dpaudit.experiments.black_box._pools import pool_for
from dpaudit.experiments.black_box._recipe import ManyRuns, recipe_for
from dpaudit.experiments.black_box._running import Running
from dpaudit.experiments.black_box._verdict import Judge
from dpaudit.experiments.trials import Store, TrialPlan, TrialProgress, TrialsRun, run_trials
from dpaudit.training import accuracy
from dpaudit.training.gradients import num_parameters

__all__ = ["run_many"]

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
