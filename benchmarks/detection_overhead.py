"""Check that a whole audit with default settings slows training by at most 15 %.

    python benchmarks/detection_overhead.py [--steps 100] [--native-steps 2500]

Everything counts: canaries, live records of noise and batches, and audit() with its bound and all tests.
Times are CPU times of one thread. Audited and plain steps take turns, so that temporary load on the machine
affects both; the cost of audit() is spread over the steps. Libraries are imported before.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import scipy.stats
import torch
from _cases import CONV_NET, MLP, Case, cpu_seconds, training
from _measure import Table, finish, milliseconds, restart_in_environment
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpaudit
from dpaudit.observers.opacus import observe
from dpaudit.training import Diagnose, OneRun

LIMIT, DELTA = 1.15, 1e-5
WARM_UP = 3  # steps
Step = Callable[[], object]


def native(case: Case, num_steps: int) -> tuple[Step, Step, Step]:
    """Return a plain step, an audited step and the audit of the native engine."""
    audit, tests = OneRun(delta=DELTA, seed=0), Diagnose()
    # with a batch that is always the same, there would be findings, whose explanation takes time
    plain = training(case, is_poisson=True)
    audited = training(case, [audit, tests], num_steps=num_steps, is_poisson=True)
    return plain.step, audited.step, audit.recorder.audit  # the training run attached the audit


def opacus(case: Case, mode: str, num_steps: int, undo: contextlib.ExitStack) -> tuple[Step, Step, Step]:
    """Return the same for a training loop with Opacus."""
    plain, *_ = _opacus_step(case, mode)
    audited, module, optimizer, loader = _opacus_step(case, mode)
    options = {"module": module} if mode == "ghost" else {}
    recorder = undo.enter_context(
        observe(
            optimizer,
            noise_multiplier=1.0,
            loader=loader,
            num_steps=num_steps,
            delta=DELTA,
            seed=0,
            **options,
        )
    )

    return plain, audited, recorder.audit


def _opacus_step(case: Case, mode: str) -> tuple[Step, Any, Any, Any]:
    """Return a step on Poisson batches, with the model, optimizer and loader that it uses."""
    torch.manual_seed(0)
    model, data = case.model(), case.data()
    criterion: Any = nn.CrossEntropyLoss()
    module, optimizer, *own, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(data.inputs, data.targets), batch_size=case.batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    criterion = own[0] if own else criterion
    batches: Any = iter(())

    def step() -> None:
        nonlocal batches
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        optimizer.zero_grad()
        criterion(module(batch[0]), batch[1]).backward()
        optimizer.step()

    return step, module, optimizer, loader


def measure(plain: Step, audited: Step, judge: Step, num_steps: int) -> tuple[float, float, float]:
    """Return CPU seconds of a plain step, of an audited step, and of the audit."""
    times: dict[Step, list[float]] = {plain: [], audited: []}
    for turn in range(num_steps):
        for step in (plain, audited) if turn % 2 else (audited, plain):
            times[step].append(cpu_seconds(step))
    means = [statistics.fmean(times[step][WARM_UP:]) for step in (plain, audited)]
    return means[0], means[1], cpu_seconds(judge)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--native-steps", type=int, default=2500)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus warns in every step
    _ = scipy.stats.norm  # imported on first use, as tests of noise do
    _ = dpaudit.Claim.dpsgd(noise_multiplier=2.0, sample_rate=0.5, num_steps=9, delta=DELTA).epsilon
    columns = ("training run", "steps", "step", "audited step", "audit()", "ratio", "limit")
    table = Table("Training with an audit", columns)
    steps = arguments.steps
    with contextlib.ExitStack() as undo:
        kinds = {
            f"native {MLP.name}": (arguments.native_steps, lambda: native(MLP, arguments.native_steps)),
            "Opacus ConvNet": (steps, lambda: opacus(CONV_NET, "hooks", steps, undo)),
            "Opacus ConvNet, ghost": (steps, lambda: opacus(CONV_NET, "ghost", steps, undo)),
        }
        for name, (num_steps, make) in kinds.items():
            plain, audited, judged = measure(*make(), num_steps)
            slower = (audited + judged / num_steps) / plain
            cells = name, f"{num_steps:,}", *map(milliseconds, (plain, audited, judged))
            table.add(*cells, f"{slower:.3f}x", f"{LIMIT:g}x", met=slower <= LIMIT)
    return finish(table)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
