"""Several cells at a time, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from dpaudit.errors import InputError
from dpaudit.experiments.reproduction._data import Data
from dpaudit.experiments.reproduction._measuring import Measuring
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.trials import Processes, Recipe, Task, Trial

__all__ = ["measure_pooled", "worker"]


def measure_pooled(measuring: Measuring, pool: Processes, watch: Callable[[int, int, str], None]) -> None:
    """Measure what is missing. A cell that fails does not keep the others from being measured."""
    missing, total = measuring.missing, len(measuring.keys)
    recipe = Recipe(target=f"{__name__}:{worker.__name__}", arguments=measuring.described())
    groups = [(Trial(place, measuring.seed, present=False),) for place in missing]
    num_done, errors = total - len(missing), []
    watch(num_done, total, f"{len(missing)} to measure, several at a time")
    with closing(pool.map(Task.of(recipe), groups)) as results:
        for (trial,), finished in results:
            if finished.errors[0] is not None:
                errors.append(f"{measuring.text(trial.number)}: {_last_line(finished.errors[0])}")
                continue
            num_done += 1
            watch(num_done, total, measuring.text(trial.number))
    if errors:
        raise InputError(
            f"Expected {total} cells of {measuring.figure.name}, but {len(errors)} failed; the others are "
            f"kept. The first was {errors[0]}"
        )


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1]


def worker(
    *, name: str, output: str, scale: str, directory: str | None, embedded: bool, seed: int, device: str
) -> Callable[[Sequence[Trial]], list[float]]:
    """What a process does: the number of a trial is the place of a cell, its score the seconds it took."""
    from dpaudit.experiments.reproduction.figures import figure_named  # noqa: PLC0415  # they import most of this

    measuring = Measuring(
        figure=figure_named(name),
        output=Path(output),
        scale=Scale(scale),
        data=Data(None if directory is None else Path(directory), embedded),
        seed=seed,
        device=device,
    )
    return lambda trials: [measuring.measure(trial.number) for trial in trials]
