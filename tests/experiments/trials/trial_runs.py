"""Plans of tiny trials and their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpaudit.experiments.trials import Pool, Recipe, Serial, TrialPlan, TrialsRun, open_store, run_trials


def plan_of(name: str = "plain", *, num_trials: int = 10, group_size: int = 1, **arguments: Any) -> TrialPlan:
    recipe = Recipe(target=f"trial_functions:{name}", arguments=arguments, group_size=group_size)
    return TrialPlan(recipe=recipe, num_trials=num_trials, seed=1)


def finish(
    plan: TrialPlan, folder: Path, pool: Pool | None = None, *, retry_failed: bool = False
) -> TrialsRun:
    """Run what is missing in the folder's store."""
    with open_store(folder, plan) as store:
        return run_trials(plan, pool=pool or Serial(), store=store, retry_failed=retry_failed)


def undisturbed(plan: TrialPlan, folder: Path) -> dict[int, float]:
    """The scores of the same trials, made by a scorer without tricks, at once."""
    return dict(
        finish(plan_of(num_trials=plan.num_trials, group_size=plan.num_trials), folder / "undisturbed").scores
    )
