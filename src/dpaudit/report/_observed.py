"""The observations that a run keeps, in whichever form its audit has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpaudit.errors import InputError
from dpaudit.report._files import read_array
from dpaudit.stats import Observations

__all__ = ["Observed", "read_observations"]


@dataclass(frozen=True)
class Observed:
    """Observations, if there are any; what each is of; and whether they came one after the other."""

    observations: Observations | None
    counted: str
    in_order: bool


def read_observations(folder: Path, *, paired: bool) -> Observed:
    """Scores of steps, scores of whole trainings, or one likelihood ratio a canary.

    ``paired`` says that a step has one score without the canary and one with it, and no coins.
    """
    try:
        return (
            _of_steps(folder, paired)
            or _of_trials(folder)
            or _of_canaries(folder)
            or Observed(None, "observation", in_order=False)
        )
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"The observations in {folder} are damaged. {error}") from error


def _of_steps(folder: Path, paired: bool) -> Observed | None:
    scores, present = read_array(folder / "scores.npy", "f"), read_array(folder / "present.npy", "b")
    if scores is None or present is None:
        return None
    if paired:
        scores, present = scores.reshape(-1), present.reshape(-1)
    return Observed(Observations.from_presence(scores, present), "step", in_order=True)


def _of_trials(folder: Path) -> Observed | None:
    """One score a training, of trainings with the canary and without it."""
    sides = [read_array(folder / f"{name}.npy", "f") for name in ("with_canary", "without_canary")]
    if sides[0] is None or sides[1] is None:
        return None
    found = Observations(with_canary=sides[0], without_canary=sides[1])
    return Observed(found, "trial", in_order=True)


def _of_canaries(folder: Path) -> Observed | None:
    """One score a canary of the same training: they have no order in time."""
    ratios = read_array(folder / "log_likelihood_ratios.npy", "f")
    present = read_array(folder / "present.npy", "b")
    if ratios is None or present is None:
        return None
    return Observed(Observations.from_presence(ratios, present), "canary", in_order=False)
