"""Which canaries join a step: by coins, or as entries of the data set that the loader's sampler draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from opacus.data_loader import CollateFnWithEmpty, wrap_collate_with_empty
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from torch.utils.data import DataLoader

from dpaudit.canaries import Coins as Chance
from dpaudit.canaries import Draws
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clips import Clip
from dpaudit.observers.opacus._enlarge import enlarge
from dpaudit.observers.opacus._line import Line
from dpaudit.observers.opacus._replaced import replaced
from dpaudit.stats._types import IntArray

__all__ = ["Coins", "Entries"]

_PLACES = 3  # a purpose of chance, besides those of Draws
_MANY = 20  # draws expected; to see none of them then has a chance of two in a billion
_SURELY = 6.0  # standard errors
_MARK = "_observed_by_dpaudit"


class Coins:
    """The usual case: each canary by a fair coin in each step."""

    def __init__(self, draws: Draws | Chance) -> None:
        self._draws = draws

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Everything is as it was afterwards."""
        yield

    def numbers(self, index: int) -> IntArray:
        """The canaries that join this step."""
        return np.flatnonzero(self._draws.coins(index))


class Entries(Coins):
    """Lets the loader's batch sampler draw canaries too, and takes them out of the batches again.

    They are at random places among the examples. A batch's canaries join the step that its examples join.
    """

    def __init__(self, draws: Draws, optimizer: DPOptimizer, loader: Any, clip: Clip) -> None:
        super().__init__(draws)
        self._optimizer, self._loader, self._clip = optimizer, loader, clip
        self._sampler = _batch_sampler(loader)
        canaries = np.flatnonzero(draws.entries())
        self._enlarged = enlarge(self._sampler, len(canaries))
        total = self._enlarged.num_examples + len(canaries)
        places = draws.chance(0, _PLACES).choice(total, len(canaries), replace=False, shuffle=False)
        self._canary = np.full(total, -1)
        self._canary[np.sort(places)] = canaries
        self._example = np.cumsum(self._canary < 0) - 1
        self._num_batches, self._num_drawn, self._num_late = 0, 0, 0
        self._line = Line(_loaded_ahead(loader), getattr(loader.collate_fn, "rand_on_empty", False))

    @contextmanager
    def watching(self) -> Iterator[None]:
        own = type(self._sampler)
        with ExitStack() as undo:
            # how an object is iterated over is looked up in its class; a BatchMemoryManager holds the
            # sampler itself, whether it is made before or after this
            self._sampler.__class__ = _watched(own, self._batches)
            undo.callback(setattr, self._sampler, "__class__", own)
            undo.callback(setattr, self._loader, "collate_fn", self._loader.collate_fn)
            self._loader.collate_fn = _with_empty(self._loader)
            pre_step = self._optimizer.pre_step

            def noted(*arguments: Any, **options: Any) -> Any:
                self._line.used(self._clip.passes())
                return pre_step(*arguments, **options)

            undo.enter_context(replaced(self._optimizer, "pre_step", noted))
            yield

    def numbers(self, index: int) -> IntArray:
        return self._line.of_step(index)

    def require_all(self, claimed_rate: float) -> None:
        """What is to be known before a verdict: every batch became part of a step, and had canaries."""
        self._line.require_used(self._clip.pending())
        if self._enlarged.known:
            return
        own = self._enlarged.rate
        rate = claimed_rate if own is None else min(own, claimed_rate)
        expected = rate * int((self._canary >= 0).sum()) * self._num_batches
        if self._num_drawn < expected - _SURELY * math.sqrt(expected):
            raise InputError(
                f"Expected the {type(self._sampler).__name__} to draw canaries about {expected:.0f} times, "
                f"got {self._num_drawn}: its batches do not grow with its entries, so that it draws examples "
                "less often than without audit."
            )

    def _batches(self, start: Callable[[], Iterator[Any]]) -> Iterator[list[int]]:
        """The batches of an epoch, without canaries."""
        self._line.begin(self._clip.pending())
        seen = 0
        for batch in self._enlarged.batches(start):
            places = np.asarray(batch, dtype=np.int64)
            canaries = self._canary[places]
            joining = canaries[canaries >= 0]
            self._num_batches += 1
            self._num_drawn += len(joining)
            self._num_late += int((places >= self._enlarged.num_examples).sum())
            seen += len(places)
            self._line.add(joining, len(places) - len(joining))
            yield self._example[places[canaries < 0]].tolist()
        self._line.end()
        self._require_late(seen)

    def _require_late(self, seen: int) -> None:
        """A sampler that keeps a list of entries from before would leave most examples out."""
        old, total = self._enlarged.num_examples, len(self._canary)
        if self._num_late == 0 and not self._enlarged.known and seen * (total - old) / total > _MANY:
            raise InputError(
                f"Expected the {type(self._sampler).__name__} to draw from {total} entries when it says so, "
                f"got none but the first {old} in an epoch: canaries cannot become entries of its data set."
            )


def _watched(own: type, batches: Callable[[Callable[[], Iterator[Any]]], Iterator[list[int]]]) -> type:
    """A class whose objects are the same, but iterated over through ``batches``."""

    def iterate(sampler: Any) -> Iterator[list[int]]:
        return batches(lambda: own.__iter__(sampler))  # type: ignore[attr-defined]

    names = {"__iter__": iterate, "__module__": own.__module__, _MARK: True}
    return type(own.__name__, (own,), names)


def _with_empty(loader: Any) -> Any:
    """A batch of canaries only is an empty one, also if it is the first: it looks like that of an example."""
    own = loader.collate_fn
    if isinstance(own, CollateFnWithEmpty):
        return own
    found = wrap_collate_with_empty(collate_fn=own)
    found([loader.dataset[0]])
    return found


def _loaded_ahead(loader: Any) -> int:
    """How many batches are drawn before they are asked for."""
    return int(loader.num_workers * (loader.prefetch_factor or 0))


def _batch_sampler(loader: Any) -> Any:
    """The one that decides, which may be inside of one that splits batches."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise InputError(
            "Expected loader=..., the loader of batches that make_private returned, with sampling=True: its "
            f"sampler decides which steps canaries join; got {type(loader).__name__}."
        )
    sampler = loader.batch_sampler
    inner = sampler.sampler if isinstance(sampler, BatchSplittingSampler) else sampler
    if hasattr(type(inner), _MARK):
        raise InputError("Expected a loader that is not observed, got one that another observer is at.")
    return inner
