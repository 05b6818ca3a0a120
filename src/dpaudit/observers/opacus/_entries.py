"""Which canaries join a step: by coins, or as entries of the data set that the loader's sampler draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from opacus.data_loader import CollateFnWithEmpty, wrap_collate_with_empty
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch.utils.data import DataLoader

from dpaudit.canaries import Draws
from dpaudit.errors import InputError
from dpaudit.observers.opacus._enlarge import enlarge
from dpaudit.stats._types import IntArray

__all__ = ["Coins", "Entries"]

_PLACES = 3  # a purpose of chance, besides those of Draws


class Coins:
    """The usual case: each canary by a fair coin in each step."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def attach(self) -> None:
        """Begin; everything is put back by ``detach``."""

    def detach(self) -> None:
        """Leave everything as it was."""

    def numbers(self, index: int) -> IntArray:
        """The canaries that join this step."""
        return np.flatnonzero(self._draws.coins(index))


class Entries(Coins):
    """Lets the loader's batch sampler draw canaries too, and takes them out of the batches again.

    They are at random places among the examples. The sampler is ahead of the steps if processes load
    examples: what it drew waits in line.
    """

    def __init__(self, draws: Draws, optimizer: DPOptimizer, loader: Any) -> None:
        super().__init__(draws)
        self._optimizer, self._loader = optimizer, loader
        self._sampler = _batch_sampler(loader)
        canaries = np.flatnonzero(draws.entries())
        self._enlarged = enlarge(self._sampler, len(canaries))
        total = self._enlarged.num_examples + len(canaries)
        places = draws.chance(0, _PLACES).choice(total, len(canaries), replace=False, shuffle=False)
        self._canary = np.full(total, -1)
        self._canary[np.sort(places)] = canaries
        self._example = np.cumsum(self._canary < 0) - 1
        self._waiting: deque[IntArray] = deque()

    def attach(self) -> None:
        self._own_class, self._own_collate = type(self._sampler), self._loader.collate_fn
        # how an object is iterated over is looked up in its class; a BatchMemoryManager holds the sampler
        # itself, whether it is made before or after this
        self._sampler.__class__ = _watched(self._own_class, self._batches)
        if not isinstance(self._own_collate, CollateFnWithEmpty):
            # a batch of canaries only is an empty one
            self._loader.collate_fn = wrap_collate_with_empty(collate_fn=self._own_collate)

    def detach(self) -> None:
        self._sampler.__class__ = self._own_class
        self._loader.collate_fn = self._own_collate

    def numbers(self, index: int) -> IntArray:
        batches = self._optimizer.accumulated_iterations
        if len(self._waiting) < batches:
            raise InputError(
                f"Expected a batch of the loader before step {index}, got none: give the loader that the "
                "loop goes over as loader=..., and begin the loop inside of the with block."
            )
        return np.concatenate([self._waiting.popleft() for _ in range(batches)])

    def _batches(self, start: Callable[[], Iterator[Any]]) -> Iterator[list[int]]:
        """The batches of an epoch, without canaries."""
        self._waiting.clear()  # what is left of an epoch was never used
        with self._enlarged.drawing():
            drawn = iter(start())
        while True:
            with self._enlarged.drawing():
                batch = next(drawn, None)
            if batch is None:
                return
            places = np.asarray(batch, dtype=np.int64)
            canaries = self._canary[places]
            self._waiting.append(canaries[canaries >= 0])
            yield self._example[places[canaries < 0]].tolist()


def _watched(own: type, batches: Callable[[Callable[[], Iterator[Any]]], Iterator[list[int]]]) -> type:
    """A class whose objects are the same, but iterated over through ``batches``."""

    def iterate(sampler: Any) -> Iterator[list[int]]:
        return batches(lambda: own.__iter__(sampler))  # type: ignore[attr-defined]

    return type(own.__name__, (own,), {"__iter__": iterate, "__module__": own.__module__})


def _batch_sampler(loader: Any) -> Any:
    """The one that decides, which may be inside of one that splits batches."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise InputError(
            "Expected loader=..., the loader of batches that make_private returned, with sampling=True: its "
            f"sampler decides which steps canaries join; got {type(loader).__name__}."
        )
    sampler = loader.batch_sampler
    return sampler.sampler if isinstance(sampler, BatchSplittingSampler) else sampler
