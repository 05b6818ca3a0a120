"""Models to train, and how the time of their steps is compared.

One thread and CPU time. The steps that are compared take turns, and a ratio is the median over neighbours, so
that what disturbs the machine for a while disturbs all of them. After some turns everything is made anew:
where in memory things lie is luck, and makes some percent of difference.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from _measure import ONE_THREAD
from torch import Tensor, nn

from dpaudit.training import DPSGD, SGD, Hook, Seeds, Training, initialize
from dpaudit.training.data import Dataset, random_images
from dpaudit.training.models import conv_net, purchase_mlp, wide_resnet

__all__ = [
    "CLIP",
    "CONV_NET",
    "LEARNING_RATE",
    "MLP",
    "WIDE_RESNET",
    "Case",
    "Step",
    "cpu_seconds",
    "fixed_indices",
    "in_turns",
    "ratio",
    "restart_in_environment",
    "training",
]

CLIP, LEARNING_RATE = 1.0, 0.1
STEPS_AN_EPOCH = 4
WARM_UP = 2  # turns
# The C library reads these before Python starts. By default it gives memory back to the system after every
# step, which makes per-example gradients three to four times slower.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}
ENVIRONMENT = MALLOC | ONE_THREAD

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model with its batch size, and how long it is measured: times anew, turns each, steps a turn."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    anew: int
    turns: int
    steps: int = 1
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        """Always with the same weights."""
        return initialize(self.build, seed=0).to(self.dtype)

    def data(self) -> Dataset:
        """Noise, of which every step takes the same batch."""
        size = STEPS_AN_EPOCH * self.batch_size
        noise = random_images(size, shape=self.shape, num_classes=self.num_classes)
        return replace(noise, inputs=noise.inputs.to(self.dtype).div(127.5).sub(1.0))


MLP = Case("MLP 600-256-128-100", purchase_mlp, (600,), 100, 256, anew=6, turns=15, steps=5)
CONV_NET = Case("ConvNet", conv_net, (3, 32, 32), 10, 128, anew=3, turns=8)
WIDE_RESNET = Case("WRN-16-4", wide_resnet, (3, 32, 32), 10, 32, anew=2, turns=4)


def fixed_indices(batch_size: int) -> Tensor:
    """The same examples in every step, so that all steps have the same to do."""
    return torch.arange(batch_size)


@dataclass(frozen=True)
class FixedBatch:
    """A sampling that is none."""

    size: int

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        return fixed_indices(self.size)


def training(case: Case, hooks: Sequence[Hook] = (), noise_multiplier: float = 1.0) -> Training:
    """What is measured: dpaudit's own DP-SGD."""
    settings = DPSGD(
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        sample_rate=1 / STEPS_AN_EPOCH,
        num_steps=1_000,
        optimizer=SGD(learning_rate=LEARNING_RATE),
    )
    batches = FixedBatch(case.batch_size)
    return Training(case.model(), case.data(), settings, seeds=Seeds.of(0), hooks=hooks, sampling=batches)


def in_turns(case: Case, make: Mapping[str, Callable[[Case], Step]]) -> dict[str, list[float]]:
    """CPU seconds of one step of each kind, in all turns."""
    times: dict[str, list[float]] = {name: [] for name in make}
    for _ in range(case.anew):
        steps = {name: build(case) for name, build in make.items()}
        for turn in range(WARM_UP + case.turns):
            for name in _rotated(list(steps), turn):
                seconds = cpu_seconds(steps[name], case.steps)
                if turn >= WARM_UP:
                    times[name].append(seconds)
    return times


def _rotated(names: list[str], by: int) -> list[str]:
    """Nobody always comes after the same other, who leaves the caches to it."""
    first = by % len(names)
    return names[first:] + names[:first]


def cpu_seconds(step: Step, count: int = 1) -> float:
    """Of one step, on average over ``count``."""
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """The median over turns."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def restart_in_environment(python: str = sys.executable) -> None:
    """Become a process with one thread and with memory that is kept, unless this one is such already."""
    # The interpreter by a note to itself: sys.executable may spell the same path in another way.
    wanted = ENVIRONMENT | {"DPAUDIT_BENCHMARK_PYTHON": python}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(python, [python, *sys.argv], os.environ | wanted)
    torch.set_num_threads(1)
