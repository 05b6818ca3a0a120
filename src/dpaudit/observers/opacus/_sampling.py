"""Which canaries join a step: by coins, or as entries of the data set that the loader's sampler draws.

More entries for the samplers of torch and of Opacus, at the rate that they have. Batches that were drawn wait
in line for the step that uses them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from opacus.data_loader import CollateFnWithEmpty, wrap_collate_with_empty
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from dpaudit._types import IntArray
from dpaudit.canaries import Coins as Chance
from dpaudit.canaries import Draws
from dpaudit.errors import InputError
from dpaudit.observers._patching import replaced
from dpaudit.observers.opacus._clipping import Clip

_Changes = dict[tuple[Any, str], Any]  # of an object's attribute

_ODD = ("weights", "num_replicas")  # of samplers whose number of entries is not all that they go by
_READ = (  # these look up their number of entries whenever they begin to draw
    RandomSampler,
    SequentialSampler,
    UniformWithReplacementSampler,
    DistributedUniformWithReplacementSampler,
)


@dataclass(frozen=True, eq=False)
class Enlarged:
    """A batch sampler that draws from more entries than it has, but only while it draws.

    ``rate`` is how likely it says that an entry is to enter a batch, None if it does not. Whether one that
    is not ``known`` goes by what was changed is to be seen in what it draws.
    """

    num_examples: int
    rate: float | None
    known: bool
    _sampler: Any
    _changes: _Changes
    _sizes: list[int] | None  # of the batches of an epoch, where they are what keeps the rate

    def batches(self, start: Callable[[], Iterator[Any]]) -> Iterator[list[int]]:
        """Those of an epoch, canaries among them; ``start`` begins it."""
        with self._drawing():
            drawn = iter(start())
        if self._sizes is not None:
            yield from self._sized(drawn)
            return
        while True:
            with self._drawing():
                batch = next(drawn, None)
            if batch is None:
                return
            yield batch

    def _sized(self, drawn: Iterator[Any]) -> Iterator[list[int]]:
        for size in self._sizes or ():
            with self._drawing({(self._sampler, "batch_size"): size}):
                batch: list[int] = next(drawn, [])
            if len(batch) != size:
                raise InputError(
                    f"Expected the {type(self._sampler.sampler).__name__} to have {size} entries for a "
                    f"batch, got {len(batch)}: it does not draw from as many entries as it says."
                )
            yield batch

    def _drawing(self, more: _Changes | None = None) -> AbstractContextManager[None]:
        """The sampler has more entries here; everybody else sees it as it is."""
        return _changed(self._changes | (more or {}))


@contextmanager
def _changed(values: _Changes) -> Iterator[None]:
    before = {place: getattr(*place) for place in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: _Changes) -> None:
    for (owner, name), value in values.items():
        setattr(owner, name, value)


def enlarge(sampler: Any, more: int) -> Enlarged:
    """``sampler`` is a batch sampler; it keeps its number of batches and the share that each draws."""
    cuts = isinstance(sampler, BatchSampler)
    inner = sampler.sampler if cuts else sampler
    if cuts and type(sampler).__iter__ is not BatchSampler.__iter__:
        raise _not_understood(sampler)
    entries = _num_entries(inner)
    changes: _Changes = {(inner, name): value for name, value in _with_entries(inner, entries + more).items()}
    known = type(inner) in _READ
    before = _length(inner)
    with _changed(changes):
        after = _length(inner)
    if not cuts:
        _require_length(sampler, before, after, before, more)
        return Enlarged(entries, getattr(sampler, "sample_rate", None), known, sampler, changes, None)
    _require_length(inner, before, after, round(before * (entries + more) / entries), more)
    sizes = _sizes(sampler, before, after)
    used = len(sizes) * sampler.batch_size if sampler.drop_last else before
    changes[sampler, "drop_last"] = False  # there is nothing to drop where every batch has its own size
    return Enlarged(entries, used / (entries * len(sizes)), known, sampler, changes, sizes)


def _num_entries(sampler: Any) -> int:
    known = getattr(sampler, "__dict__", {})
    if isinstance(sampler, DistributedUniformWithReplacementSampler):
        return int(sampler.total_size)
    if known.get("_num_samples") is None and not any(name in known for name in _ODD):
        if isinstance(known.get("num_samples"), int):
            return int(known["num_samples"])
        if hasattr(known.get("data_source"), "__len__"):
            return len(known["data_source"])
    raise _not_understood(sampler)


def _not_understood(sampler: Any) -> InputError:
    return InputError(
        "Expected a loader whose sampler says by num_samples or data_source how many entries it draws from, "
        f"such as the one that make_private returned, got a {type(sampler).__name__}: canaries cannot become "
        "entries of its data set."
    )


def _with_entries(sampler: Any, total: int) -> dict[str, Any]:
    """The attributes of a sampler with so many entries."""
    if isinstance(sampler, DistributedUniformWithReplacementSampler):
        own = range(sampler.rank, total, sampler.num_replicas)
        return {"total_size": total, "num_samples": len(own)}
    return {"num_samples": total} if "num_samples" in vars(sampler) else {"data_source": range(total)}


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise InputError(
            f"Expected a loader whose sampler has a length, got a {type(sampler).__name__} without: it is "
            "not to be seen whether canaries change how often an example is drawn."
        ) from None


def _require_length(sampler: Any, before: int, after: int, expected: int, more: int) -> None:
    if abs(after - expected) > (expected != before):
        raise InputError(
            f"Expected the {type(sampler).__name__} to have length {expected} with {more} canaries among its "
            f"entries, got {after}: so its sample rate would be another one."
        )


def _sizes(sampler: BatchSampler, before: int, after: int) -> list[int]:
    """Batches are cut at the same shares of an epoch as before, each rounded to a whole entry."""
    whole = len(sampler)
    cuts = [min(place * sampler.batch_size, before) * after / before for place in range(whole + 1)]
    return [round(end) - round(start) for start, end in pairwise(cuts)]


@dataclass(frozen=True, eq=False)
class _Batch:
    canaries: IntArray
    size: int  # how many examples


class Line:
    """Finds the batches of a step by the sizes of its backward passes.

    A step may use several batches, and a batch may be split into several passes; only an empty batch makes
    an empty pass. Processes that load examples draw up to ``ahead`` batches that are perhaps never used. With
    ``filled``, an empty batch becomes one of a single made-up example.
    """

    def __init__(self, ahead: int, filled: bool) -> None:
        self._ahead, self._fewest = ahead, int(filled)
        self._waiting: deque[_Batch] = deque()
        self._passes: list[int] = []
        self._ended = True

    def begin(self, pending: list[int]) -> None:
        """An epoch begins, while gradients of ``pending`` passes wait for the next step."""
        self.require_used(pending)
        kept = self._num_used(self._passes + pending) or 0
        self._waiting = deque(list(self._waiting)[:kept])  # the others were drawn, but the loop ended
        self._ended = False

    def add(self, canaries: IntArray, size: int) -> None:
        """One more batch was drawn."""
        self._waiting.append(_Batch(canaries, max(size, self._fewest)))

    def end(self) -> None:
        """The epoch is over; the loop did not break it off."""
        self._ended = True

    def used(self, passes: Iterable[int]) -> None:
        """Backward passes that are clipped now, for this step or a later one."""
        self._passes += passes

    def of_step(self, index: int) -> IntArray:
        """The canaries of all batches that were used since the last step."""
        passes, self._passes = self._passes, []
        if not passes or not self._waiting:
            raise InputError(
                f"Expected a batch of the loader before step {index}, got none: give the loader that the "
                "loop goes over as loader=..., and begin the loop inside of the with block."
            )
        count = self._num_used(passes)
        if count is None:
            raise InputError(
                f"Expected step {index} to use the next batch that the loader drew, of "
                f"{self._waiting[0].size} examples, got gradients of {' + '.join(map(str, passes))}: with "
                "sampling=True the loop has to make a step of every batch, also of an empty one."
            )
        return np.concatenate([self._waiting.popleft().canaries for _ in range(count)])

    def require_used(self, pending: list[int]) -> None:
        """Every batch became part of a step, but for those at the end of a loop that was broken off."""
        left = len(self._waiting) - (self._num_used(self._passes + pending) or 0)
        if left > self._ahead + (not self._ended):
            raise InputError(
                "Expected the loop to make a step of every batch that the loader drew, also of an empty one, "
                f"got {left} batches without: canaries in them did not join any step."
            )

    def _num_used(self, passes: list[int]) -> int | None:
        """How many batches, from the first on, make up exactly these passes; None if none do."""
        rest, count = deque(passes), 0
        for batch in self._waiting:
            if not rest:
                break
            if (batch.size == 0) != (rest[0] == 0):
                return None
            left = batch.size - rest.popleft()
            while left > 0 and rest and rest[0] > 0:
                left -= rest.popleft()
            if left != 0:
                return None
            count += 1
        return None if rest else count


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
        places = draws.rng(0, _PLACES).choice(total, len(canaries), replace=False, shuffle=False)
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
