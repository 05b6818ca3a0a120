"""Claims how many models a second an ensemble trains, next to Opacus 1.6.0, one model after another.

    python benchmarks/ensemble.py [--steps 200] [--rounds 3] [--only NAME] [--sizes]

200 steps of batch 64 on 3,200 random images of 28x28. Opacus has the same memory settings, a cheap Poisson
sampling instead of its loader, and the faster of its two modes, per-example gradients by hooks (the default)
or ghost clipping. One core is CPU time of one thread, in turns. Two cores is clock time: two processes of the
ensemble, and Opacus with one or two threads, whichever is faster. What else runs on the machine disturbs
both, and clock time most: look at it only where nothing else runs.

``--sizes`` shows how the number of models at once matters instead.
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
from _cases import restart_in_environment
from _measure import Table, finish
from _opacus_models import train_with_opacus
from torch import nn

from dpaudit.training import DPSGD, SGD, initialize
from dpaudit.training.data import Dataset, random_images
from dpaudit.training.ensemble import Ensemble, Example
from dpaudit.training.gradients import flat_parameters
from dpaudit.training.models import logistic_regression, mlp

WHOLE, SIZE, BATCH = 200, 3_200, 64  # steps of a training, examples, expected batch
SAME = 1e-4  # of the largest change of a weight: Opacus adds 1e-6 to every norm
KINDS = ("ensemble", "hooks", "ghost")
COLUMNS = ("model", "ensemble", "Opacus hooks", "Opacus ghost", "of hooks", "of ghost", "limit")

Clock = Callable[[], float]


@dataclass(frozen=True)
class Case:
    """A kind of model, and how many times faster than Opacus it has to be trained."""

    name: str
    build: Callable[[], nn.Module]
    speedup: float
    group: int
    """How many models are trained to be timed."""
    sizes: tuple[int, ...]


def lenet() -> nn.Sequential:
    """The usual small network for MNIST in DP papers: 26,010 parameters."""
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
    """A comparison of different things would be none: without noise, on all examples, in double precision."""
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


def models_a_second(case: Case, kind: str, num_steps: int, clock: Clock, at_once: int | None = None) -> float:
    """At the usual number of steps."""
    data, chosen, count = images(), settings(num_steps), 1
    if kind == "ensemble":
        made = ensemble(case, data, chosen, models_at_once=at_once)
        made.scores([0], [True])  # what is made once for all models
        count = at_once or case.group
        start = clock()
        made.scores(range(count), [number % 2 == 0 for number in range(count)])
    else:
        start = clock()
        train_with_opacus(initialize(case.build, 0), data, chosen, ghost=kind == "ghost")
    return count * num_steps / WHOLE / (clock() - start)


def on_one_core(cases: Sequence[Case], num_steps: int, rounds: int) -> Table:
    table = Table("Models a second on one core (CPU time)", COLUMNS)
    for case in cases:
        require_same_models(case)
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                rates[kind].append(models_a_second(case, kind, num_steps, time.process_time))
        _add(table, case, rates, claimed=False)
    return table


def on_two_cores(cases: Sequence[Case], num_steps: int, rounds: int) -> Table:
    table = Table("Models a second on two cores (clock time)", COLUMNS)
    for case in cases:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind in KINDS:
                rates[kind].append(_children(case, kind, num_steps))
        _add(table, case, rates, claimed=True)
    return table


def _children(case: Case, kind: str, num_steps: int) -> float:
    """Two processes of the ensemble with a thread each; Opacus with the better of one thread and two."""
    if kind == "ensemble":
        return sum(_rates(case, kind, num_steps, num_threads=1, count=2))
    return max(_rates(case, kind, num_steps, num_threads, count=1)[0] for num_threads in (1, 2))


def _rates(case: Case, kind: str, num_steps: int, num_threads: int, count: int) -> list[float]:
    """Of some processes that run at the same time."""
    command = [sys.executable, __file__, "--steps", str(num_steps), "--only", case.name]
    command += ["--child", kind, "--threads", str(num_threads)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return [float(child.communicate()[0]) for child in running]


def _add(table: Table, case: Case, rates: dict[str, list[float]], claimed: bool) -> None:
    """A ratio is the median over rounds, so that what disturbs the machine disturbs both."""
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
    table = Table("Models a second on one core by the number of models at once", ("model", "at once", "rate"))
    for case in cases:
        rates: dict[int, list[float]] = {size: [] for size in case.sizes}
        for _ in range(rounds):
            for size in case.sizes:
                rates[size].append(models_a_second(case, "ensemble", num_steps, time.process_time, size))
        for size, found in rates.items():
            table.add(case.name, str(size), f"{statistics.median(found):.2f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=WHOLE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=[case.name for case in CASES])
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--child", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only in (None, case.name)]
    if chosen.child is not None:
        torch.set_num_threads(chosen.threads)
        print(models_a_second(cases[0], chosen.child, chosen.steps, time.perf_counter))
        return 0
    if chosen.sizes:
        return finish(at_once(cases, chosen.steps, chosen.rounds))
    return finish(
        on_one_core(cases, chosen.steps, chosen.rounds), on_two_cores(cases, chosen.steps, chosen.rounds)
    )


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
