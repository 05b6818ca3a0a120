"""Claims that a step of DP-SGD takes at most twice as long as a step of torch without privacy.

One thread and CPU time. The two kinds of step run in turns, and the ratio is the median over neighbours, so
that what disturbs the machine for a while disturbs both. A comparison with Opacus is not part of it yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _measure import ONE_THREAD, Table, finish, milliseconds
from torch import nn

from dpaudit.training import DPSGD, SGD, Seeds, Training, initialize
from dpaudit.training.data import Dataset, random_images
from dpaudit.training.models import conv_net, purchase_mlp, wide_resnet

LIMIT = 2.0
STEPS_AN_EPOCH = 20
# The C library reads these before Python starts. By default it gives memory back to the system after every
# step, which makes per-example gradients three to four times slower.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}
ENVIRONMENT = MALLOC | ONE_THREAD


@dataclass(frozen=True)
class Case:
    """A model with the batch size at which it is measured."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    repetitions: int

    def data(self) -> Dataset:
        """Enough noise for some steps."""
        return random_images(STEPS_AN_EPOCH * self.batch_size, shape=self.shape, num_classes=self.num_classes)


CASES = (
    Case("MLP 600-256-128-100", purchase_mlp, (600,), 100, 256, 200),
    Case("ConvNet", conv_net, (3, 32, 32), 10, 128, 15),
    Case("WRN-16-4", wide_resnet, (3, 32, 32), 10, 32, 5),
)


def private_step(case: Case) -> Callable[[], object]:
    settings = DPSGD(
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1 / STEPS_AN_EPOCH,
        num_steps=1,
        optimizer=SGD(learning_rate=0.1),
    )
    return Training(initialize(case.build, seed=0), case.data(), settings, seeds=Seeds.of(0)).step


def plain_step(case: Case) -> Callable[[], object]:
    """What anyone writes: some examples, forward, backward, update."""
    data, model = case.data(), initialize(case.build, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        inputs, targets = data.at(torch.randint(len(data), (case.batch_size,)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(case: Case) -> list[tuple[float, float]]:
    """Seconds of steps without and with privacy, after two of each to warm up."""
    plain, private = plain_step(case), private_step(case)
    pairs = [(cpu_seconds(plain), cpu_seconds(private)) for _ in range(2 + case.repetitions)]
    return pairs[2:]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)
    table = Table("One step", ("model", "batch", "torch", "DP-SGD", "ratio", "limit"))
    for case in CASES:
        pairs = measure(case)
        plain, private = (milliseconds(statistics.median(times)) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        cells = case.name, str(case.batch_size), plain, private, f"{ratio:.2f}x", f"{LIMIT:g}x"
        table.add(*cells, met=ratio <= LIMIT)
    return finish(table)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    sys.exit(main())
