"""Check that a step of Opacus takes at most 1.10 times as long with an observer of 4,096 canaries.

Times are CPU times of one thread. All kinds of steps take turns, and the ratio is the median over turns, so
that temporary load on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import warnings
from collections.abc import Callable

import torch
from _cases import cpu_seconds, ratio
from _measure import Table, finish, milliseconds, restart_in_environment
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe
from dpaudit.training.models import conv_net

LIMIT, CANARIES, BATCH = 1.10, (64, 1024, 4096), 128


def stepper(mode: str, num_canaries: int, observed: contextlib.ExitStack) -> Callable[[], None]:
    """Return a step on a fixed batch, observed until the stack is closed unless there are no canaries."""
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
    if num_canaries:
        module = model if mode == "ghost" else None
        observed.enter_context(observe(optimizer, num_canaries=num_canaries, module=module, seed=0))

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()

    return step


def measure(mode: str, repetitions: int) -> dict[int, list[float]]:
    """Return seconds per step for each number of canaries, after two warm-up turns."""
    numbers = [0, *CANARIES]
    times: dict[int, list[float]] = {number: [] for number in numbers}
    with contextlib.ExitStack() as stack:
        steps = {number: stepper(mode, number, stack) for number in numbers}
        for turn in range(2 + repetitions):
            first = turn % len(numbers)  # none always runs after the same other one, which warms its caches
            for number in numbers[first:] + numbers[:first]:
                seconds = cpu_seconds(steps[number])
                if turn >= 2:
                    times[number].append(seconds)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=16)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Opacus warns in every step
    columns = ("mode", "batch", "canaries", "without", "with", "ratio", "limit")
    table = Table("One Opacus step, ConvNet", columns)
    for mode in ("hooks", "ghost"):
        times = measure(mode, repetitions)
        plain = milliseconds(statistics.median(times[0]))
        for number in CANARIES:
            slower = ratio(times[number], times[0])
            cells = mode, str(BATCH), f"{number:,}", plain, milliseconds(statistics.median(times[number]))
            table.add(*cells, f"{slower:.3f}x", f"{LIMIT:g}x", met=slower <= LIMIT)
    return finish(table)


if __name__ == "__main__":
    restart_in_environment()
    sys.exit(main())
