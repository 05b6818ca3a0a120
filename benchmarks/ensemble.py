"""Check how many models per second an ensemble trains, compared with Opacus 1.6.0, one model after another.

    python benchmarks/ensemble.py [--steps 200] [--rounds 3] [--only NAME] [--cores 1|2] [--sizes]

Training takes 200 steps with batch size 64 on 3,200 random images of 28x28. Opacus has the same memory
settings, fast Poisson sampling instead of its loader, and two modes: per-example gradients by hooks (the
default), and ghost clipping. One core means CPU time of one thread, in turns. Two cores means wall-clock
time: two processes of the ensemble, and Opacus with one or two threads, whichever is faster. Other load on
the machine distorts both, wall-clock time most: measure on an idle machine.

``--sizes`` shows the effect of the number of models at once instead.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from _measure import Table, finish, restart_in_environment
from _opacus_models import train_with_opacus
from torch import nn

from dpaudit.training import DPSGD, SGD, initialize
from dpaudit.training.data import Dataset, random_images
from dpaudit.training.ensemble import Ensemble, Example
from dpaudit.training.gradients import flat_parameters
from dpaudit.training.models import logistic_regression, mlp

WHOLE, SIZE, BATCH = 200, 3_200, 64  # steps of a training run, examples, expected batch size
SAME = 1e-4  # fraction of the largest weight change: Opacus adds 1e-6 to every norm
KINDS = ("ensemble", "hooks", "ghost")
COLUMNS = ("model", "ensemble", "Opacus hooks", "Opacus ghost", "vs. hooks", "vs. ghost", "limit")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A kind of model, and the required speed-up over Opacus."""

    name: str
    build: Callable[[], nn.Module]
    speedup: float
    group: int
    """The number of models that are trained for one time measurement."""
    sizes: tuple[int, ...]


def lenet() -> nn.Sequential:
    """Return the usual small MNIST network of DP papers, with 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


CASES = (
    Case("logistic regression", lambda: logistic_regression(784, 10), 10.0, 64, (4, 8, 16, 32, 64, 128)),
    Case("MLP 784-64-10", lambda: mlp(784, 64, 10), 15.0, 32, (4, 8, 16, 32, 64)),
    Case("LeNet-like", lenet, 1.5, 4, (1, 2, 4, 8)),
)


def images(num_examples: int = SIZE) -> Dataset:
    data = random_images(num_examples, shape=(1, 28, 28))
    return replace(data, inputs=data.at(torch.arange(num_examples))[0])


def settings(num_steps: int) -> DPSGD:
    return DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=BATCH / SIZE,
        num_steps=num_steps,
        optimizer=SGD(learning_rate=0.1),
    )


def ensemble(case: Case, data: Dataset, chosen: DPSGD, **options: Any) -> Ensemble:
    canary = Example(torch.zeros(data.shape), 0)
    return Ensemble(build=case.build, data=data, canary=canary, settings=chosen, **options)


def require_same_models(case: Case) -> None:
    """Exit if the models differ from those of Opacus without noise, which would make the comparison void."""
    torch.set_default_dtype(torch.float64)
    data = images(BATCH)
    data = replace(data, inputs=data.inputs.double())
    chosen = replace(settings(3), noise_multiplier=0.0, sample_rate=1.0)
    first = flat_parameters(initialize(case.build, 0))
    ours = ensemble(case, data, chosen, initial_weights=first).train([1], [False]).weights[0]
    for ghost in (False, True):
        theirs = train_with_opacus(initialize(case.build, 0), data, chosen, ghost=ghost)
        difference = float((ours - flat_parameters(theirs)).abs().max() / (ours - first).abs().max())
        if difference > SAME:
            raise SystemExit(f"{case.name}: the models of Opacus differ from ours by {difference:.1e}.")
    torch.set_default_dtype(torch.float32)


def models_per_second(
    case: Case, kind: str, num_steps: int, clock: Clock, at_once: int | None = None
) -> float:
    """Return models per second, scaled to the full number of steps."""
    data, chosen, count = images(), settings(num_steps), 1
    if kind == "ensemble":
        made = ensemble(case, data, chosen, models_at_once=at_once)
        made.scores([0], [True])  # prepares what all models share
        count = at_once or case.group
        start = clock()
        made.scores(range(count), [number % 2 == 0 for number in range(count)])
    else:
        start = clock()
        train_with_opacus(initialize(case.build, 0), data, chosen, ghost=kind == "ghost")
    return count * num_steps / WHOLE / (clock() - start)


def on_one_core(cases: Sequence[Case], num_steps: int, rounds: int) -> Table:
    table = Table("Models per second on one core (CPU time)", COLUMNS)
    for case in cases:
        require_same_models(case)
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                rates[kind].append(models_per_second(case, kind, num_steps, time.process_time))
        _add(table, case, rates, claimed=False)
    return table


def on_two_cores(cases: Sequence[Case], num_steps: int, rounds: int) -> Table:
    table = Table("Models per second on two cores (wall-clock time)", COLUMNS)
    for case in cases:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                rates[kind].append(_children(case, kind, num_steps))
        _add(table, case, rates, claimed=True)
    return table


def _children(case: Case, kind: str, num_steps: int) -> float:
    """Run two single-threaded processes of the ensemble, or Opacus with the better of one and two threads."""
    if kind == "ensemble":
        return sum(_rates(case, kind, num_steps, num_threads=1, count=2))
    return max(_rates(case, kind, num_steps, num_threads, count=1)[0] for num_threads in (1, 2))


def _rates(case: Case, kind: str, num_steps: int, num_threads: int, count: int) -> list[float]:
    """Return the rates of concurrent processes."""
    command = [sys.executable, __file__, "--steps", str(num_steps), "--only", case.name]
    command += ["--child", kind, "--threads", str(num_threads)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [float(child.communicate()[0]) for child in running]


def _add(table: Table, case: Case, rates: dict[str, list[float]], claimed: bool) -> None:
    """Add a row with median ratios over rounds, so that load on the machine affects both sides."""
    ratios = {
        kind: statistics.median(a / b for a, b in zip(rates["ensemble"], rates[kind], strict=True))
        for kind in ("hooks", "ghost")
    }
    cells = [f"{statistics.median(rates[kind]):.2f}" for kind in KINDS]
    least = min(ratios.values())
    found = [f"{ratios[kind]:.1f}x" for kind in ("hooks", "ghost")]
    limit = f"at least {case.speedup:g}x" if claimed else ""
    table.add(case.name, *cells, *found, limit, met=least >= case.speedup if claimed else None)


def at_once(cases: Sequence[Case], num_steps: int, rounds: int) -> Table:
    table = Table("Models per second on one core, by models at once", ("model", "at once", "rate"))
    for case in cases:
        rates: dict[int, list[float]] = {size: [] for size in case.sizes}
        for _ in range(rounds):
            for size in case.sizes:
                rates[size].append(models_per_second(case, "ensemble", num_steps, time.process_time, size))
        for size, found in rates.items():
            table.add(case.name, str(size), f"{statistics.median(found):.2f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=WHOLE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--cores", type=int, choices=[1, 2])
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only in (None, case.name)]
    if chosen.child is not None:
        torch.set_num_threads(chosen.threads)
        print(models_per_second(cases[0], chosen.child, chosen.steps, time.perf_counter))
        return 0
    if chosen.sizes:
        return finish(at_once(cases, chosen.steps, chosen.rounds))
    measures = {1: on_one_core, 2: on_two_cores}
    wanted = [chosen.cores] if chosen.cores else [1, 2]
    return max(finish(measures[cores](cases, chosen.steps, chosen.rounds)) for cores in wanted)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
