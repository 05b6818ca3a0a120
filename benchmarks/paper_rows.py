"""Check that the paper's five methods rank as in its Table 1: ConvNet, CIFAR-10, Algorithm 2, 1,000 steps.

Batches are small (16 of 200 images on average), so that a run takes about a minute. Thresholds are chosen on
the counted data, as in the paper, so none of these numbers is a confidence bound.

    python benchmarks/paper_rows.py DIRECTORY [--epsilon 8] [--seeds 2]

DIRECTORY holds the binary version of CIFAR-10.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from _digits import DELTA, dpsgd_training, finished
from _measure import Table, finish

import dpaudit
from dpaudit.training import TwoBatches
from dpaudit.training.data import cifar10
from dpaudit.training.models import conv_net

RATE, STEPS = 4096 / 50000, 1000
# from the largest bound to the smallest, as in the paper's column "CIFAR-10 ConvNet"
ROWS = (
    ("f-DP(ZB)", dpaudit.Gaussian(), dpaudit.Posterior()),
    ("f-DP(CP)", dpaudit.Gaussian(), dpaudit.ClopperPearson()),
    ("(eps,delta)(ZB)", dpaudit.ApproximateDP(), dpaudit.Posterior()),
    ("eps-DP(Katz)", dpaudit.PureDP(), dpaudit.KatzLog()),
    ("(eps,delta)(CP)", dpaudit.ApproximateDP(), dpaudit.ClopperPearson()),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    title = (
        f"ConvNet on CIFAR-10, epsilon {options.epsilon:g}, {STEPS:,} steps, best threshold on the same data"
    )
    table = Table(title, ("seed", *(name for name, _, _ in ROWS)), complaint="OTHER ORDER")
    for seed in range(options.seeds):
        recorder = _audited(options.directory, options.epsilon, seed)
        bounds = [_epsilon(recorder, *row[1:]) for row in ROWS]
        table.add(
            str(seed), *(f"{bound:.2f}" for bound in bounds), met=bounds == sorted(bounds, reverse=True)
        )
    return finish(table)


def _audited(directory: Path, epsilon: float, seed: int) -> dpaudit.Recorder:
    audit, images = TwoBatches(delta=DELTA, seed=seed), cifar10(directory).split(200)[0]
    terms = {"epsilon": epsilon, "sample_rate": RATE, "num_steps": STEPS}
    finished(dpsgd_training(audit, build=conv_net, data=images, seed=seed, **terms))
    return audit.recorder


def _epsilon(recorder: dpaudit.Recorder, tradeoff: dpaudit.TradeOff, inference: dpaudit.Inference) -> float:
    """Return epsilon of the whole training run; Katz's interval is for pure epsilon-DP."""
    bound = dpaudit.lower_bound(
        recorder.observations,
        delta=0.0 if isinstance(inference, dpaudit.KatzLog) else DELTA,
        tradeoff=tradeoff,
        inference=inference,
        threshold=dpaudit.SameData(),
    )
    return recorder.claim.hypothesis(tradeoff).epsilon(bound.parameter)


if __name__ == "__main__":
    sys.exit(main())
