"""Check that a step of Opacus takes at most 1.15 times as long with an observer of 64 canaries.

Times are CPU times of one thread. Both kinds of steps take turns, and the ratio is the median over turns, so
that temporary load on the machine affects both.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import warnings
from collections.abc import Callable

import torch
from _cases import cpu_seconds, ratio, restart_in_environment
from _measure import Table, finish, milliseconds
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe
from dpaudit.training.models import conv_net

LIMIT, CANARIES, BATCH = 1.15, 64, 128


def stepper(mode: str, observed: contextlib.ExitStack | None) -> Callable[[], None]:
    """Return a step on a fixed batch, observed until the stack is closed."""
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


def measure(mode: str, repetitions: int) -> tuple[list[float], list[float]]:
    """Return seconds per step without and with an observer, after two warm-up steps of each."""
    with contextlib.ExitStack() as stack:
        plain, observed = stepper(mode, None), stepper(mode, stack)
        pairs = [(cpu_seconds(plain), cpu_seconds(observed)) for _ in range(2 + repetitions)]
    plain_times, observed_times = (list(times) for times in zip(*pairs[2:], strict=True))
    return plain_times, observed_times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Opacus warns in every step
    columns = ("mode", "batch", "canaries", "without", "with", "ratio", "limit")
    table = Table("One Opacus step, ConvNet", columns)
    for mode in ("hooks", "ghost"):
        plain, observed = measure(mode, repetitions)
        slower = ratio(observed, plain)
        times = (milliseconds(statistics.median(times)) for times in (plain, observed))
        table.add(
            mode, str(BATCH), str(CANARIES), *times, f"{slower:.2f}x", f"{LIMIT:g}x", met=slower <= LIMIT
        )
    return finish(table)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
