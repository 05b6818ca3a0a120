"""Scenarios in Opacus on two processes, each of which restores one of its past faults."""

from __future__ import annotations

import math
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from dpaudit._io import open_file
from dpaudit._types import FloatArray
from dpaudit.canaries import Dirac
from dpaudit.diagnostics import Diagnostics
from dpaudit.recording import SupportsDiagnose
from dpaudit.zoo._evidence import NOISE, Evidence, Scenario, Scores, keep_checkpoint, paper_claim
from dpaudit.zoo._opacus import flat, recorded  # before Opacus: its error message explains how to install it

# isort: split
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, TensorDataset

_PROCESSES = 2
# Batches are large enough never to be empty: some processes would skip the step while the others wait.
_EXAMPLES, _RATE, _STEPS = 400, 0.1, 200
_BATCH = _EXAMPLES * _RATE
_CANARIES = 128
_SHORT_STEPS = 20  # steps of the run that compares the noise of the processes

_Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
_RankFunction: TypeAlias = Callable[[int, bool, int], _Arrays]
"""Function of a rank, whether the code is broken, and a seed, that returns arrays."""


def ddp_batch(is_broken: bool, seed: int) -> Evidence:
    """Divide by the batch size of all processes on each of them, although the results are averaged."""
    arrays = _on_processes(_released_mean, is_broken, seed)[0]
    return _evidence(arrays, _diagnosed(arrays["noise"]))


def ddp_rank_noise(is_broken: bool, seed: int) -> Evidence:
    """Run training twice with noise on every process.

    In the first run, the noise of all processes is too small for their sum. In the second, shorter run, the
    noise of each process is tested, one after another.
    """
    ranks = _on_processes(_scores_and_noise, is_broken, seed)
    record = Diagnostics()
    for step in zip(*(arrays["noise"] for arrays in ranks), strict=True):
        for vector in step:
            record.observe_noise(vector)
    return _evidence(ranks[0], {_SHORT_STEPS: record})


def _diagnosed(noise: FloatArray) -> dict[int, SupportsDiagnose]:
    """Return the diagnostics of noise, steps x coordinates, at each checkpoint."""
    record, copies = Diagnostics(), dict[int, SupportsDiagnose]()
    for number, row in enumerate(noise, 1):
        record.observe_noise(row)
        keep_checkpoint(copies, record, number, len(noise))
    return copies


def _evidence(arrays: _Arrays, diagnostics: dict[int, SupportsDiagnose]) -> Evidence:
    scores = Scores(values=arrays["values"], present=arrays["present"])
    return Evidence(claim=paper_claim(), num_steps=_STEPS, scores=scores, diagnostics=diagnostics)


def _released_mean(rank: int, is_broken: bool, seed: int) -> _Arrays:
    model, optimizer, loader = _make_private(seed, rank)
    if is_broken:
        optimizer.expected_batch_size *= _PROCESSES  # undo the division by the engine
    noise: list[FloatArray] = []
    scores = _scored(model, optimizer, loader, seed, lambda: noise.append(_released_noise(optimizer)))
    return {**scores, "noise": np.stack(noise)}


def _scores_and_noise(rank: int, is_broken: bool, seed: int) -> _Arrays:
    """Return the scores of a run, and the noise of another that adds enough of it for the sum everywhere.

    The noise of a broken process has the seed of all others.
    """
    model, optimizer, loader = _make_private(seed, rank)
    if is_broken:
        _add_noise_everywhere(optimizer, 1 / _PROCESSES)
    scores = _scored(model, optimizer, loader, seed)
    model, optimizer, loader = _make_private(seed, 0 if is_broken else rank)
    share = 1 / math.sqrt(_PROCESSES)
    _add_noise_everywhere(optimizer, share)
    noise: list[FloatArray] = []
    optimizer.attach_step_hook(lambda _: noise.append(_own_noise(optimizer)))
    for _ in _steps(model, optimizer, loader, _SHORT_STEPS):
        pass
    return {**scores, "noise": np.stack(noise) / share}


def _add_noise_everywhere(optimizer: Any, share: float) -> None:
    """Add noise on every process; the distributed optimizer adds it only on the first."""
    optimizer.noise_multiplier *= share
    optimizer.add_noise = partial(DPOptimizer.add_noise, optimizer)


def _scored(
    model: Any, optimizer: Any, loader: Any, seed: int, after: Callable[[], None] = lambda: None
) -> _Arrays:
    options: dict[str, Any] = {"num_steps": _STEPS, "num_canaries": _CANARIES, "seed": seed}
    with recorded(optimizer, canary=Dirac(), sample_rate=_RATE, **options) as recorder:
        for _ in _steps(model, optimizer, loader, _STEPS):
            after()
    state = recorder.state_dict()
    return {"values": state["scores"], "present": state["present"]}


def _steps(model: Any, optimizer: Any, loader: Any, num_steps: int) -> Iterator[None]:
    for _ in range(round(num_steps * _RATE)):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield


def _released_noise(optimizer: Any) -> FloatArray:
    """Return the noise in the released mean: the mean times the claimed batch size, minus the sum."""
    total = flat(optimizer, "summed_grad")
    distributed.all_reduce(total)
    return _in_noise_units(_BATCH * flat(optimizer, "grad") - total)


def _own_noise(optimizer: Any) -> FloatArray:
    """Return the noise that this process added to its sum; hooks run before communication."""
    mean = flat(optimizer, "grad") * optimizer.expected_batch_size
    return _in_noise_units(mean - flat(optimizer, "summed_grad"))


def _in_noise_units(noise: Tensor) -> FloatArray:
    scaled: FloatArray = noise.double().numpy() / NOISE
    return scaled


def _make_private(seed: int, offset: int) -> Any:
    """Return a model, its optimizer and its batches; ``seed`` and ``offset`` seed the RNG of this process."""
    torch.manual_seed(seed)  # the same model and data everywhere
    inputs = torch.randn(_EXAMPLES, 8)
    data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    module = DifferentiallyPrivateDistributedDataParallel(model)
    torch.manual_seed(seed + 1 + offset)
    return PrivacyEngine(accountant="rdp").make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        data_loader=DataLoader(data, batch_size=round(_BATCH)),
        noise_multiplier=NOISE,
        max_grad_norm=1.0,
    )


def _on_processes(work: _RankFunction, is_broken: bool, seed: int) -> list[_Arrays]:
    """Run the function on all processes and return the arrays of each."""
    with tempfile.TemporaryDirectory() as name:
        with _interrupts_blocked():
            running = spawn(  # type: ignore[no-untyped-call]
                _process, args=(name, work, is_broken, seed), nprocs=_PROCESSES, join=False
            )
        try:
            while not running.join():
                pass
        finally:
            for process in running.processes:
                process.terminate()
            for process in running.processes:
                process.join()
        return [_loaded(Path(name) / f"{rank}.npz") for rank in range(_PROCESSES)]


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in child processes, where it would print a traceback during imports.

    In this process, an interrupt takes effect afterwards.
    """
    resource_tracker.ensure_running()  # starting it later would unblock interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _loaded(path: Path) -> _Arrays:
    with open_file(path) as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays)


def _process(rank: int, folder: str, work: _RankFunction, is_broken: bool, seed: int) -> None:
    # from here on, an interrupt or the end of the parent process ends this one silently
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    warnings.simplefilter("ignore")  # Opacus warns about what is deliberately broken here
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=_PROCESSES
    )
    np.savez(Path(folder) / f"{rank}.npz", **work(rank, is_broken, seed))  # type: ignore[arg-type]
    distributed.destroy_process_group()


SCENARIOS: Mapping[str, Scenario] = {"ddp-batch": ddp_batch, "ddp-rank-noise": ddp_rank_noise}
