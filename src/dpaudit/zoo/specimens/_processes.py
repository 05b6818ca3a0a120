"""Opacus on two processes, with a fault that it once had."""

from __future__ import annotations

import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe  # first: it says how Opacus is installed
from dpaudit.recording import Recorder
from dpaudit.zoo._evidence import Evidence, Scores
from dpaudit.zoo.specimens._claim import DELTA, NOISE, papers_claim

# isort: split
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers.optimizer import _generate_noise

__all__ = ["ddp_batch", "ddp_rank_noise"]

_PROCESSES = 2
# Batches are large enough never to be empty: of an empty one some processes make no step, and others wait.
_EXAMPLES, _RATE, _STEPS = 400, 0.1, 200
_CANARIES = 128


def ddp_batch(is_broken: bool, seed: int) -> Evidence:
    """Noise for a mean over the examples of all processes, added to that of one process."""
    return _trained("first" if is_broken else None, seed)


def ddp_rank_noise(is_broken: bool, seed: int) -> Evidence:
    """Every process adds the noise, and what they made is averaged."""
    return _trained("every" if is_broken else None, seed)


def _trained(noisy: str | None, seed: int) -> Evidence:
    with tempfile.TemporaryDirectory() as name:
        spawn(_work, args=(name, noisy, seed), nprocs=_PROCESSES)  # type: ignore[no-untyped-call]
        with np.load(Path(name) / "scores.npz") as arrays:
            scores = Scores(**arrays)
    return Evidence(claim=papers_claim(), num_steps=_STEPS, scores=scores)


def _work(rank: int, folder: str, noisy: str | None, seed: int) -> None:
    """What each process does; the first one keeps the scores, which all of them have."""
    warnings.simplefilter("ignore")  # Opacus has advice for trainings that are not broken on purpose
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=_PROCESSES
    )
    scores = _scored(rank, noisy, seed)
    if rank == 0:
        np.savez(Path(folder) / "scores.npz", values=scores.values, present=scores.present)
    distributed.destroy_process_group()


def _scored(rank: int, noisy: str | None, seed: int) -> Scores:
    model, optimizer, loader = _private(rank, seed)
    if noisy is not None:
        optimizer.add_noise = partial(_add_noise, optimizer, on_every=noisy == "every")
    options: dict[str, Any] = {
        "noise_multiplier": NOISE,
        "sample_rate": _RATE,
        "num_steps": _STEPS,
        "delta": DELTA,
    }
    with observe(optimizer, num_canaries=_CANARIES, seed=seed, **options) as recorder:
        for _ in range(round(_STEPS * _RATE)):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    assert isinstance(recorder, Recorder)  # of steps, and not of canaries that are sampled
    return Scores.of(recorder)


def _private(rank: int, seed: int) -> Any:
    torch.manual_seed(seed)  # the same model and data everywhere
    inputs = torch.randn(_EXAMPLES, 8)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    module = DifferentiallyPrivateDistributedDataParallel(model)
    torch.manual_seed(seed + 1 + rank)  # noise and batches of its own
    return PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=round(_RATE * _EXAMPLES)),
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
    )


def _add_noise(optimizer: Any, *, on_every: bool) -> None:
    """Noise that is smaller by the number of processes, on the first one or on all.

    As it is when noise is divided by the batch of all processes, and what they made is averaged.
    """
    std = optimizer.noise_multiplier * optimizer.max_grad_norm / optimizer.world_size
    for parameter in optimizer.params:
        parameter.grad = parameter.summed_grad.clone()
        if on_every or optimizer.rank == 0:
            parameter.grad += _generate_noise(std, parameter.summed_grad)
