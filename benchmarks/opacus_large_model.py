"""Check that an observed step of a large Opacus model costs what it reads.

    python benchmarks/opacus_large_model.py [--turns 12] [--only ghost]

Observed and plain steps take turns in one process, so that temporary load on the machine affects both. Times
are CPU times of one thread with default settings of ``observe``. The memory is the peak of tensors that a
step allocates beyond those of a plain step, in units of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from _cases import cpu_seconds, ratio
from _measure import Table, finish, milliseconds
from opacus import PrivacyEngine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from dpaudit.observers.opacus import observe

WARM_UP = 3  # turns
NUM_STEPS, DELTA = 10_000, 1e-5
MAX_MEMORY = 1.5  # weights
LARGE, SMALL = (1024, 1536, 1536, 512, 10), (64, 256, 10)
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model of linear layers, how it is clipped, and what an observed step may cost."""

    name: str
    widths: tuple[int, ...]
    mode: str
    batch_size: int
    max_ratio: float | None = None
    max_milliseconds: float | None = None
    steps_per_turn: int = 1

    @property
    def num_weights(self) -> int:
        """The number of parameters."""
        return sum(
            inside * outside + outside for inside, outside in zip(self.widths, self.widths[1:], strict=False)
        )

    def step(self, undo: contextlib.ExitStack, *, observed: bool) -> Step:
        """Return a step on Poisson batches, observed until ``undo`` is closed."""
        torch.manual_seed(0)
        layers = [
            part
            for pair in zip(self.widths, self.widths[1:], strict=False)
            for part in (nn.Linear(*pair), nn.ReLU())
        ]
        model = nn.Sequential(*layers[:-1])
        size = 8 * self.batch_size
        examples = TensorDataset(
            torch.randn(size, self.widths[0]), torch.randint(0, self.widths[-1], (size,))
        )
        criterion: Any = nn.CrossEntropyLoss()
        module, optimizer, *ghost_loss, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=criterion,
            data_loader=DataLoader(examples, batch_size=self.batch_size),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=self.mode,
        )
        criterion = ghost_loss[0] if ghost_loss else criterion
        if observed:
            undo.enter_context(
                observe(optimizer, module=module, loader=loader, num_steps=NUM_STEPS, delta=DELTA, seed=0)
            )
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

        return step


CASES = (
    Case("4.7 M, ghost", LARGE, "ghost", 64, max_ratio=1.25),
    Case("4.7 M, hooks", LARGE, "hooks", 16, max_ratio=1.12),
    Case("19 k, hooks", SMALL, "hooks", 50, max_milliseconds=2.0, steps_per_turn=20),
)


class PeakMemory(TorchDispatchMode):
    """The most bytes of tensors that are alive at once and were created inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Count the storages that the operation returns, until they are freed."""
        del types
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        self._alive = {address: held for address, held in self._alive.items() if not _is_freed(held)}
        self._alive.setdefault(storage._cdata, (storage._weak_ref(), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))


def _is_freed(held: tuple[int, int]) -> bool:
    return bool(torch.UntypedStorage._expired(held[0]))


def extra_memory(case: Case) -> float:
    """Return the peak of an observed step above that of a plain one, in units of the weights."""
    peaks = {}
    for observed in (False, True):
        with contextlib.ExitStack() as undo:
            step = case.step(undo, observed=observed)
            for _ in range(WARM_UP):
                step()
            with PeakMemory() as memory:
                step()
            peaks[observed] = memory.peak
    return (peaks[True] - peaks[False]) / (4 * case.num_weights)


def in_turns(case: Case, num_turns: int) -> tuple[list[float], list[float]]:
    """Return CPU seconds of plain and of observed steps."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with contextlib.ExitStack() as undo:
        steps = {observed: case.step(undo, observed=observed) for observed in times}
        for turn in range(WARM_UP + num_turns):
            for observed in (False, True) if turn % 2 else (True, False):
                seconds = cpu_seconds(steps[observed], case.steps_per_turn)
                if turn >= WARM_UP:
                    times[observed].append(seconds)
    return times[False], times[True]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus warns in every step
    columns = ("model", "step", "observed step", "more", "ratio", "limit", "memory, in weights")
    table = Table("An observed step of Opacus", columns)
    for case in CASES:
        if arguments.only not in case.name:
            continue
        plain, observed = in_turns(case, arguments.turns)
        slower, more = ratio(observed, plain), median(map(float.__sub__, observed, plain))
        memory = extra_memory(case)
        met = memory <= MAX_MEMORY or case.max_ratio is None
        if case.max_ratio is not None:
            limit, met = f"{case.max_ratio:g}x", met and slower <= case.max_ratio
        else:
            limit, met = f"{case.max_milliseconds:g} ms", met and 1e3 * more <= (case.max_milliseconds or 0.0)
        cells = *map(milliseconds, (median(plain), median(observed), more)), f"{slower:.2f}x", limit
        table.add(case.name, *cells, f"{memory:.2f}", met=met)
    return finish(table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
