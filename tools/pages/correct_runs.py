"""Audit correct training runs with default settings, and count how many are flagged.

    python tools/pages/correct_runs.py [--runs 400] [--output FILE]

Half of the runs use the native engine, half Opacus. The linear regressions clip nothing and have long
steps, so that every gradient depends on the noise of the steps before: a test whose null does not hold in
adaptive training flags them. Each line of the output file is one run: its setting, seed, verdict, p-value
and findings. Finished runs are read from it, so an interrupted command resumes there. The
table is written to docs/data/correct-runs.csv.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _shared import restart_in_environment, write_tables
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe
from dpaudit.training import DPSGD, SGD, Diagnose, OneRun, Seeds, Training, initialize
from dpaudit.training.data import Dataset, digits
from dpaudit.training.models import mlp

DELTA, RATE = 1e-5, 0.1
ERROR_RATE = 0.05
NUM_EXAMPLES, NUM_FEATURES = 1000, 8


def noise_multiplier(seed: int) -> float:
    """Return a value from 0.8 to 2, another one for every seed."""
    return 0.8 + 1.2 * (seed % 25) / 24


def native_audit(model: nn.Module, train: Dataset, settings: DPSGD, seed: int, **parts: Any) -> Any:
    audit = OneRun(delta=DELTA, seed=seed)
    hooks = [audit, Diagnose()]
    for _ in Training(model, train, settings, seeds=Seeds.of(seed), hooks=hooks, **parts).run():
        pass
    return audit.recorder.audit()


def native_digits(seed: int) -> Any:
    train, _ = digits().split(1500)
    settings = DPSGD(
        noise_multiplier=noise_multiplier(seed),
        max_grad_norm=1.0,
        sample_rate=0.05,
        num_steps=200,
        optimizer=SGD(learning_rate=0.5),
    )
    model = initialize(lambda: mlp(64, 32, 10), seed)
    return native_audit(model, train, settings, seed)


def opacus_audit(
    model: nn.Module, data: TensorDataset, criterion: nn.Module, seed: int, *, steps: int, **options: Any
) -> Any:
    torch.manual_seed(seed)
    ghost = {"grad_sample_mode": "ghost", "criterion": criterion} if options.pop("ghost", False) else {}
    module, optimizer, *private, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=options["lr"]),
        data_loader=DataLoader(data, batch_size=round(RATE * len(data))),
        noise_multiplier=noise_multiplier(seed),
        max_grad_norm=options["max_grad_norm"],
        **ghost,
    )
    loss = private[0] if private else criterion
    with observe(
        optimizer,
        noise_multiplier=noise_multiplier(seed),
        loader=loader,
        num_steps=steps,
        delta=DELTA,
        seed=seed,
        module=module,
    ) as recorder:
        for _ in range(math.ceil(steps * RATE)):
            for x, y in loader:
                optimizer.zero_grad()
                loss(module(x), y).backward()
                optimizer.step()
    return recorder.audit()


def opacus_digits(seed: int, *, ghost: bool = False) -> Any:
    train, _ = digits().split(1500)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    data = TensorDataset(train.inputs, train.targets)
    return opacus_audit(
        model, data, nn.CrossEntropyLoss(), seed, steps=200, lr=0.5, max_grad_norm=1.0, ghost=ghost
    )


def opacus_ghost(seed: int) -> Any:
    return opacus_digits(seed, ghost=True)


def opacus_regression(seed: int) -> Any:
    """Train a linear regression in which nothing is clipped, at the learning rate of Newton's method."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((NUM_EXAMPLES, NUM_FEATURES)).astype(np.float32)
    targets = inputs @ rng.standard_normal((NUM_FEATURES, 1)).astype(np.float32)
    targets += 0.1 * rng.standard_normal(targets.shape).astype(np.float32)
    data = TensorDataset(torch.as_tensor(inputs), torch.as_tensor(targets))
    model = nn.Linear(NUM_FEATURES, 1, bias=False)
    return opacus_audit(model, data, nn.MSELoss(), seed, steps=2000, lr=0.5, max_grad_norm=200.0)


SETTINGS: dict[str, Callable[[int], Any]] = {
    "native, digits": native_digits,
    "Opacus, digits": opacus_digits,
    "Opacus ghost, digits": opacus_ghost,
    "Opacus, linear regression": opacus_regression,
}
SHARES = {"native, digits": 0.5}  # of the runs; the others share the rest


def run(task: tuple[str, int]) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    setting, seed = task
    result = SETTINGS[setting](seed)
    return {
        "setting": setting,
        "seed": seed,
        "verdict": result.verdict.name,
        "p_value": result.p_value,
        "refuted": list(result.refuted),
        "findings": [finding.name for finding in result.findings],
    }


def tasks(num_runs: int) -> list[tuple[str, int]]:
    rest = (1 - sum(SHARES.values())) / (len(SETTINGS) - len(SHARES))
    counts = {name: math.ceil(num_runs * SHARES.get(name, rest)) for name in SETTINGS}
    return [(name, seed) for name, count in counts.items() for seed in range(count)][:num_runs]


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return how many runs of each setting were flagged, and how small their p-values are."""
    rows = list(rows)
    lines = ["| training | runs | flagged | p < 0.05 | p < 0.01 | smallest p | findings |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in (*SETTINGS, "all"):
        chosen = [row for row in rows if name in ("all", row["setting"])]
        if not chosen:
            continue
        p_values = np.array([row["p_value"] for row in chosen])
        flagged = sum(row["verdict"] == "VIOLATION" for row in chosen)
        names = sorted({finding for row in chosen for finding in row["findings"]})
        counts = f"{flagged} | {(p_values < 0.05).sum()} | {(p_values < 0.01).sum()} | {p_values.min():.2g}"
        lines.append(f"| {name} | {len(chosen)} | {counts} | {', '.join(names) or '-'} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--output", type=Path, default=Path("correct-runs.jsonl"))
    arguments = parser.parse_args()
    stored = arguments.output.read_text().splitlines() if arguments.output.exists() else []
    rows = [json.loads(line) for line in stored]
    done = {(row["setting"], row["seed"]) for row in rows}
    missing = [task for task in tasks(arguments.runs) if task not in done]
    with (
        get_context("spawn").Pool(arguments.processes, maxtasksperchild=50) as pool,
        arguments.output.open("a") as file,
    ):
        for row in pool.imap_unordered(run, missing):
            print(json.dumps(row), file=file, flush=True)
            rows.append(row)
            print(f"{len(rows)}/{arguments.runs} {row}", file=sys.stderr, flush=True)
    lines = "\n".join(table(rows))
    write_tables("correct-runs.csv", lines)
    print(lines)
    flagged = sum(row["verdict"] == "VIOLATION" for row in rows)
    limit = ERROR_RATE * len(rows) + 3 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) * len(rows))
    print(f"{flagged} of {len(rows)} correct runs were flagged; at most {limit:.0f} may be.")
    return int(flagged > limit)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
