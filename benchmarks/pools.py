"""Check that two processes run trials at least 1.8 times as fast as one, and measure the cost of a pool.

A trial trains a small network in torch, as a user's function would. The machine must be idle: a process that
shares its core is slower.

    python benchmarks/pools.py [--trials 60] [--repetitions 3] [--ray]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _measure import Table, finish, seconds

from dpaudit.experiments.trials import (
    Neighbours,
    Pool,
    Processes,
    Ray,
    Recipe,
    Serial,
    TrialPlan,
    function_recipe,
    open_store,
    run_trials,
)

LIMIT = 1.8
STEPS, BATCH, INPUTS, CLASSES = 150, 64, 256, 10


def data() -> Neighbours:
    import torch  # noqa: PLC0415  # only workers need it

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2000, INPUTS, generator=generator)
    labels = torch.randint(CLASSES, (2000,), generator=generator)
    canary = torch.zeros(INPUTS), 0
    more = torch.cat([inputs, canary[0][None]]), torch.cat([labels, torch.zeros(1, dtype=torch.long)])
    return Neighbours(with_canary=more, without_canary=(inputs, labels), canary=canary)


def train(dataset: Any, seed: int) -> Any:
    import torch  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415

    torch.manual_seed(seed)
    inputs, labels = dataset
    model = nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        batch = torch.randint(len(inputs), (BATCH,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def recipe() -> Recipe:
    name = Path(__file__).stem
    return function_recipe(f"{name}:train", data=f"{name}:data")


def speed(pool: Pool, num_trials: int) -> float:
    """Return models per second after the first third, to exclude the start of Python and torch."""
    plan = TrialPlan(recipe=recipe(), num_trials=num_trials, seed=1)
    marks: list[tuple[float, int]] = []
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder), plan) as store:
        run = run_trials(plan, pool=pool, store=store, watch=lambda p: marks.append((p.seconds, p.num_new)))
    if run.failures:
        sys.exit(run.failure_summary)
    (start, before), (end, after) = marks[len(marks) // 3], marks[-1]
    return (after - before) / (end - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="also measure Ray, which is slow to start")
    options = parser.parse_args()
    pools: dict[str, Pool] = {
        "serial": Serial(),
        "one process": Processes(num_workers=1),
        "two processes": Processes(num_workers=2),
    }
    if options.ray:
        pools["Ray"] = Ray()
    load = os.getloadavg()[0]
    speeds: dict[str, list[float]] = {name: [] for name in pools}
    took = seconds(lambda: _measure(pools, speeds, options))
    table = Table(
        f"{options.trials} trials of {STEPS} steps, {options.repetitions} times in turn, {took:.0f} s "
        f"(load before: {load:.1f})",
        ("pool", "models/s", "vs. one process", "limit"),
    )
    for name, found in speeds.items():
        ratio = statistics.median(mine / one for mine, one in zip(found, speeds["one process"], strict=True))
        is_claimed = name == "two processes"
        limit, met = (f"at least {LIMIT}x", ratio >= LIMIT) if is_claimed else ("", None)
        table.add(name, f"{statistics.median(found):.2f}", f"{ratio:.2f}x", limit, met=met)
    return finish(table)


def _measure(pools: dict[str, Pool], speeds: dict[str, list[float]], options: argparse.Namespace) -> None:
    for _ in range(options.repetitions):
        for name, pool in pools.items():
            speeds[name].append(speed(pool, options.trials))


if __name__ == "__main__":
    sys.exit(main())
