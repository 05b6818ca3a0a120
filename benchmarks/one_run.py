"""Check that one run suffices: the bound is at least 0.95 of epsilon, and above it in at most 5 % of seeds.

Trains on the embedded digits and on random images with correct DP-SGD, at a claim like the paper's main one,
once per seed, and audits each run with 512 canaries per step.

    python benchmarks/one_run.py [--seeds 40]
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from _digits import DELTA, dpsgd_training, finished
from _measure import Table, finish
from torch import nn

import dpaudit
from dpaudit.training import OneRun
from dpaudit.training.data import Dataset, digits, random_images
from dpaudit.training.models import mlp

RATE, STEPS = 0.08, 2000
SMALLEST_RATIO, LARGEST_SHARE = 0.95, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=40)
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    table = Table(
        f"One run of {STEPS:,} steps, 512 canaries, sample rate {RATE:g}, {seeds} seeds",
        ("data", "claimed", "mean bound", "of the claim", "smallest", "above the claim"),
        complaint="NOT MET",
    )
    for name, data, build in _cases():
        for epsilon in (4.0, 8.0):
            _add(table, name, epsilon, [_bound(data, build, epsilon, seed) for seed in range(seeds)])
    return finish(table)


def _cases() -> list[tuple[str, Dataset, Callable[[], nn.Module]]]:
    return [
        ("digits", digits().split(300)[0], lambda: mlp(64, 32, 10)),
        ("random", random_images(300), lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))),
    ]


def _bound(data: Dataset, build: Callable[[], nn.Module], epsilon: float, seed: int) -> dpaudit.Bound:
    audit = OneRun(delta=DELTA, num_canaries=512, seed=seed)
    terms = {"epsilon": epsilon, "sample_rate": RATE, "num_steps": STEPS, "learning_rate": 0.2}
    finished(dpsgd_training(audit, build=build, data=data, seed=seed, **terms))
    return audit.recorder.audit().bound


def _add(table: Table, name: str, epsilon: float, bounds: list[dpaudit.Bound]) -> None:
    ratios = [bound.epsilon / epsilon for bound in bounds]
    above = sum(ratio > 1 for ratio in ratios) / len(ratios)
    mean = statistics.mean(ratios)
    table.add(
        name,
        f"{epsilon:g}",
        f"{mean * epsilon:.2f}",
        f"{mean:.3f}",
        f"{min(ratios):.3f}",
        f"{100 * above:.1f} %",
        met=mean >= SMALLEST_RATIO and above <= LARGEST_SHARE,
    )


if __name__ == "__main__":
    sys.exit(main())
