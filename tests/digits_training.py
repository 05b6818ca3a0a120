"""Short trainings of a small model on the embedded digits: the set-up of tests and of benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import dpaudit
from dpaudit.training import DPSGD, SGD, Hook, Seeds, Training, initialize
from dpaudit.training.data import Dataset, digits
from dpaudit.training.models import mlp

DELTA = 1e-5


def small_mlp() -> nn.Module:
    return mlp(64, 16, 10)


def dpsgd(
    *,
    epsilon: float = 8.0,
    noise_multiplier: float | None = None,
    max_grad_norm: float = 1.0,
    sample_rate: float = 0.1,
    num_steps: int = 30,
    learning_rate: float = 0.5,
    **more: Any,
) -> DPSGD:
    """Return settings with the noise for ``epsilon``, unless a noise multiplier is given."""
    if noise_multiplier is None:
        noise_multiplier = dpaudit.noise_for_epsilon(
            epsilon, sample_rate=sample_rate, num_steps=num_steps, delta=DELTA
        )
    return DPSGD(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        sample_rate=sample_rate,
        num_steps=num_steps,
        **{"optimizer": SGD(learning_rate=learning_rate), **more},
    )


def dpsgd_training(
    *hooks: Hook,
    build: Callable[[], nn.Module] = small_mlp,
    data: Dataset | None = None,
    seed: int = 0,
    fault: Callable[..., Any] | None = None,
    sampling: Callable[[float], Any] | None = None,
    **settings: Any,
) -> Training:
    """Return a training that has not started; ``settings`` are those of :func:`dpsgd`."""
    chosen, seeds = dpsgd(**settings), Seeds.of(seed)
    noise = {"noise_multiplier": chosen.noise_multiplier, "max_grad_norm": chosen.max_grad_norm}
    return Training(
        initialize(build, seeds.initialization),
        digits().split(1500)[0] if data is None else data,
        chosen,
        seeds=seeds,
        hooks=hooks,
        mechanism=fault and fault(**noise),
        sampling=sampling and sampling(chosen.sample_rate),
    )


def finished(training: Training) -> Training:
    """Make all steps that are left."""
    for _ in training.run():
        pass
    return training
