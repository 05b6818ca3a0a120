"""Claims that an observer with 64 canaries makes a step of Opacus at most 1.15 times as long.

One thread and CPU time. The two kinds of step run in turns, and the ratio is the median over neighbours, so
that what disturbs the machine for a while disturbs both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from _measure import ONE_THREAD, Table, finish, milliseconds
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe
from dpaudit.training.models import conv_net

LIMIT, CANARIES, BATCH = 1.15, 64, 128
# The C library reads these before Python starts; see dpsgd_step.py.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
}
ENVIRONMENT = MALLOC | ONE_THREAD


def stepper(mode: str, observed: contextlib.ExitStack | None) -> Callable[[], None]:
    """A step of always the same batch, observed until the stack is closed."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    model, criterion = conv_net(), nn.CrossEntropyLoss()
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(inputs, targets), batch_size=BATCH),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    model, optimizer, criterion = made[0], made[1], made[2] if len(made) == 4 else criterion
    if observed is not None:
        module = model if mode == "ghost" else None
        observed.enter_context(observe(optimizer, num_canaries=CANARIES, module=module, seed=0))

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return step


def cpu_seconds(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


def measure(mode: str, repetitions: int) -> list[tuple[float, float]]:
    """Seconds of steps without and with an observer, after two of each to warm up."""
    with contextlib.ExitStack() as stack:
        plain, observed = stepper(mode, None), stepper(mode, stack)
        pairs = [(cpu_seconds(plain), cpu_seconds(observed)) for _ in range(2 + repetitions)]
    return pairs[2:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Opacus warns in every step
    columns = ("mode", "batch", "canaries", "without", "with", "ratio", "limit")
    table = Table("A step of Opacus, ConvNet", columns)
    for mode in ("hooks", "ghost"):
        pairs = measure(mode, repetitions)
        plain, observed = (milliseconds(statistics.median(times)) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        cells = mode, str(BATCH), str(CANARIES), plain, observed, f"{ratio:.2f}x", f"{LIMIT:g}x"
        table.add(*cells, met=ratio <= LIMIT)
    return finish(table)


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    sys.exit(main())
