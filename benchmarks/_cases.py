"""Models to train, and functions that compare the time of their steps.

Times are CPU times of one thread. The kinds of steps to compare take turns, and a ratio is the median over
turns, so that temporary load on the machine affects all of them. After some turns everything is rebuilt,
because the memory layout is random and changes times by a few percent.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
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
    "training",
]

CLIP, LEARNING_RATE = 1.0, 0.1
STEPS_PER_EPOCH = 4
WARM_UP = 2  # turns
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model, its batch size, and how long it is measured: rebuilds, turns per rebuild, steps per turn."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    num_classes: int
    batch_size: int
    rebuilds: int
    turns: int
    steps: int = 1
    dtype: torch.dtype = torch.float32

    def model(self) -> nn.Module:
        """Return the model, always with the same weights."""
        return initialize(self.build, seed=0).to(self.dtype)

    def data(self) -> Dataset:
        """Return random data."""
        size = STEPS_PER_EPOCH * self.batch_size
        noise = random_images(size, shape=self.shape, num_classes=self.num_classes)
        return replace(noise, inputs=noise.inputs.to(self.dtype).div(127.5).sub(1.0))


MLP = Case("MLP 600-256-128-100", purchase_mlp, (600,), 100, 256, rebuilds=6, turns=15, steps=5)
CONV_NET = Case("ConvNet", conv_net, (3, 32, 32), 10, 128, rebuilds=3, turns=8)
WIDE_RESNET = Case("WRN-16-4", wide_resnet, (3, 32, 32), 10, 32, rebuilds=2, turns=4)


def fixed_indices(batch_size: int) -> Tensor:
    """Return the indices of a fixed batch, so that all steps do the same work."""
    return torch.arange(batch_size)


@dataclass(frozen=True)
class FixedBatch:
    """Sampling that always returns the same batch."""

    size: int

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        return fixed_indices(self.size)


def training(
    case: Case,
    hooks: Sequence[Hook] = (),
    noise_multiplier: float = 1.0,
    num_steps: int = 1_000,
    *,
    is_poisson: bool = False,
) -> Training:
    """Return the native DP-SGD training run to be measured; steps after ``num_steps`` are not audited.

    All steps have the same batch, unless batches are Poisson sampled, as claimed.
    """
    settings = DPSGD(
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP,
        sample_rate=1 / STEPS_PER_EPOCH,
        num_steps=num_steps,
        optimizer=SGD(learning_rate=LEARNING_RATE),
    )
    batches = None if is_poisson else FixedBatch(case.batch_size)
    return Training(case.model(), case.data(), settings, seeds=Seeds.of(0), hooks=hooks, sampling=batches)


def in_turns(case: Case, make: Mapping[str, Callable[[Case], Step]]) -> dict[str, list[float]]:
    """Return CPU seconds per step of each kind, for every turn."""
    times: dict[str, list[float]] = {name: [] for name in make}
    for _ in range(case.rebuilds):
        steps = {name: build(case) for name, build in make.items()}
        for turn in range(WARM_UP + case.turns):
            for name in _rotated(list(steps), turn):
                seconds = cpu_seconds(steps[name], case.steps)
                if turn >= WARM_UP:
                    times[name].append(seconds)
    return times


def _rotated(names: list[str], by: int) -> list[str]:
    """Return the names rotated, so that none always runs after the same other one, which warms its caches."""
    first = by % len(names)
    return names[first:] + names[:first]


def cpu_seconds(step: Step, count: int = 1) -> float:
    """Return CPU seconds per step, averaged over ``count`` steps."""
    start = time.process_time()
    for _ in range(count):
        step()
    return (time.process_time() - start) / count


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median ratio over turns."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))
