"""Many training runs for one audit: a plan of trials, pools that run them, and a store of their scores."""

from dpaudit.experiments.trials._function import Neighbours, function_recipe, log_odds
from dpaudit.experiments.trials._ray import Ray
from dpaudit.experiments.trials._runner import TrialProgress, TrialsRun, run_trials
from dpaudit.experiments.trials._store import Store, open_store
from dpaudit.experiments.trials._task import Finished, Task
from dpaudit.experiments.trials._trial_plan import Group, Recipe, Scorer, Trial, TrialPlan
from dpaudit.experiments.trials.pools import Pool, Processes, Serial

__all__ = [
    "Finished",
    "Group",
    "Neighbours",
    "Pool",
    "Processes",
    "Ray",
    "Recipe",
    "Scorer",
    "Serial",
    "Store",
    "Task",
    "Trial",
    "TrialPlan",
    "TrialProgress",
    "TrialsRun",
    "function_recipe",
    "log_odds",
    "open_store",
    "run_trials",
]
