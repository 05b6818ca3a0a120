"""Membership: which canaries are present in a step, decided by fair coins or by the loader's own sampler.

With :class:`SampledMembership`, canaries are entries of the data set: :class:`SamplerWithCanaries` draws them
at the rate of the loader's sampler, and :class:`BatchQueue` assigns batches to steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from opacus.data_loader import CollateFnWithEmpty, wrap_collate_with_empty
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from dpaudit._types import IntArray
from dpaudit.canaries import CanaryCoins, CanaryPlan
from dpaudit.diagnostics._sum_checks import BatchRecord
from dpaudit.errors import InputError
from dpaudit.observers._patching import replaced
from dpaudit.observers.opacus._batches import BatchQueue, Epoch, drawing_sampler, iterated_by
from dpaudit.observers.opacus._clipping import OpacusClip

_Changes: TypeAlias = dict[tuple[Any, str], Any]  # new values of attributes, by object and name

_POSITIONS = 3  # purpose of a random stream, besides those of CanaryPlan
_MIN_EXPECTED = 20  # expected draws; the probability of seeing none is then two in a billion
_MAX_DEVIATION = 6.0  # standard errors
_MARK = "_observed_by_dpaudit"
_UNSUPPORTED = ("weights", "num_replicas")  # attributes of samplers that depend on more
_TRUSTED = (  # these read their number of entries whenever they start drawing
    RandomSampler,
    SequentialSampler,
    UniformWithReplacementSampler,
    DistributedUniformWithReplacementSampler,
)


class Membership(ABC):
    """The rule that determines which canaries are present in a step."""

    @abstractmethod
    def installed(self) -> AbstractContextManager[None]:
        """Follow the training loop inside the block; everything is restored at its end."""

    @abstractmethod
    def members(self, index: int) -> IntArray:
        """Return the numbers of the canaries present in this step."""


class CoinMembership(Membership):
    """The usual case: a fair coin per canary and step decides which canaries are present."""

    def __init__(self, draws: CanaryPlan | CanaryCoins) -> None:
        self._draws = draws

    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()

    def members(self, index: int) -> IntArray:
        return np.flatnonzero(self._draws.coins(index))


class SampledMembership(Membership):
    """Canaries drawn by the loader's batch sampler, and then removed from the batches.

    They are at random positions among the examples. The canaries of a batch are added to the same step as its
    examples.
    """

    def __init__(
        self, draws: CanaryPlan, optimizer: DPOptimizer, loader: Any, clip: OpacusClip, drawn: BatchRecord
    ) -> None:
        self._optimizer, self._loader, self._clip, self._drawn = optimizer, loader, clip, drawn
        sampler, canaries = _batch_sampler(loader), np.flatnonzero(draws.entries())
        self._sampler = SamplerWithCanaries.of(sampler, len(canaries))
        total = self._sampler.num_examples + len(canaries)
        positions = draws.rng(0, _POSITIONS).choice(total, len(canaries), replace=False, shuffle=False)
        self._canary = np.full(total, -1)  # the number of the canary at each position, -1 for an example
        self._canary[np.sort(positions)] = canaries
        self._example = np.cumsum(self._canary < 0) - 1
        self._num_batches, self._num_drawn, self._num_added = 0, 0, 0
        num_prefetched = int(loader.num_workers * (loader.prefetch_factor or 0))
        self._queue = BatchQueue(num_prefetched, getattr(loader.collate_fn, "rand_on_empty", False))

    @contextmanager
    def installed(self) -> Iterator[None]:
        pre_step = self._optimizer.pre_step

        def noting_pre_step(*arguments: Any, **options: Any) -> Any:
            self._queue.note_backward(self._clip.batch_sizes())
            return pre_step(*arguments, **options)

        with ExitStack() as undo:
            undo.enter_context(self._sampler.iterated_by(self._batches))
            undo.callback(setattr, self._loader, "collate_fn", self._loader.collate_fn)
            self._loader.collate_fn = _collate_with_empty(self._loader)
            undo.enter_context(replaced(self._optimizer, "pre_step", noting_pre_step))
            yield

    def members(self, index: int) -> IntArray:
        return self._queue.pop_step(index)

    def check_complete(self, claimed_rate: float) -> None:
        """Raise before a verdict if a batch was used in no step, or the sampler drew too few canaries."""
        self._queue.check_consumed(self._clip.pending_batch_sizes())
        if self._sampler.is_trusted:
            return
        rate = claimed_rate if self._sampler.rate is None else min(self._sampler.rate, claimed_rate)
        expected = rate * int((self._canary >= 0).sum()) * self._num_batches
        if self._num_drawn < expected - _MAX_DEVIATION * math.sqrt(expected):
            raise InputError(
                f"Expected the {self._sampler.name} to draw canaries about {expected:.0f} times, got "
                f"{self._num_drawn}: its batches do not grow with the number of entries, so it draws "
                "examples less often than without the audit."
            )

    def _batches(self, epoch: Epoch) -> Iterator[list[int]]:
        """Yield the batches of an epoch, without canaries."""
        self._queue.start_epoch(self._clip.pending_batch_sizes())
        num_entries = 0
        for batch in self._sampler.batches(epoch):
            entries = np.asarray(batch, dtype=np.int64)
            canaries = self._canary[entries]
            members = canaries[canaries >= 0]
            self._num_batches += 1
            self._num_drawn += len(members)
            self._num_added += int((entries >= self._sampler.num_examples).sum())
            num_entries += len(entries)
            self._queue.push(members, len(entries) - len(members))
            examples = self._example[entries[canaries < 0]]
            self._drawn.add_drawn_batch(examples, self._sampler.num_examples)
            yield examples.tolist()
        self._queue.end_epoch()
        self._check_new_entries(num_entries)

    def _check_new_entries(self, num_entries: int) -> None:
        """Raise if the sampler keeps an earlier list of entries, which would omit examples."""
        old, total = self._sampler.num_examples, len(self._canary)
        expected = num_entries * (total - old) / total
        if self._num_added == 0 and not self._sampler.is_trusted and expected > _MIN_EXPECTED:
            raise InputError(
                f"Expected the {self._sampler.name} to draw from {total} entries, got only the first {old} "
                "in an epoch: canaries cannot become entries of its data set."
            )


def _batch_sampler(loader: Any) -> Any:
    """Return the batch sampler, which may be inside one that splits batches."""
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
        raise InputError(
            "Expected loader=..., the loader that make_private returned, with sampling=True: its sampler "
            f"draws the canaries; got {type(loader).__name__}."
        )
    inner = drawing_sampler(loader)
    if hasattr(type(inner), _MARK):
        raise InputError("Expected a loader that is not yet observed, got one with another observer.")
    return inner


def _collate_with_empty(loader: Any) -> Any:
    """Return a function that collates a batch of canaries only, which may come first, as an empty batch."""
    collate = loader.collate_fn
    if isinstance(collate, CollateFnWithEmpty):
        return collate
    collate_with_empty = wrap_collate_with_empty(collate_fn=collate)
    collate_with_empty([loader.dataset[0]])
    return collate_with_empty


@dataclass(frozen=True, eq=False)
class SamplerWithCanaries:
    """A batch sampler whose number of entries is increased while it draws.

    ``rate`` is its stated probability that an entry is in a batch, or None. If it is not ``is_trusted``, only
    its draws show whether it uses the increased number of entries.
    """

    num_examples: int
    rate: float | None
    is_trusted: bool
    _sampler: Any
    _changes: _Changes
    _sizes: list[int] | None = None  # batch sizes of an epoch, where they determine the rate

    @classmethod
    def of(cls, sampler: Any, num_canaries: int) -> SamplerWithCanaries:
        """Add canaries to a batch sampler; its number of batches and its sample rate stay the same."""
        cuts = isinstance(sampler, BatchSampler)
        inner = sampler.sampler if cuts else sampler
        if cuts and type(sampler).__iter__ is not BatchSampler.__iter__:
            raise _unknown_entries(sampler)
        old, attributes = _with_canaries(inner, num_canaries)
        changes: _Changes = {(inner, name): value for name, value in attributes.items()}
        is_trusted = type(inner) in _TRUSTED
        before = _length(inner)
        with _changed(changes):
            after = _length(inner)
        if not cuts:
            _check_length(sampler, before, after, before, num_canaries)
            return cls(old, getattr(sampler, "sample_rate", None), is_trusted, sampler, changes)
        _check_length(inner, before, after, round(before * (old + num_canaries) / old), num_canaries)
        sizes = _batch_sizes(sampler, before, after)
        used = len(sizes) * sampler.batch_size if sampler.drop_last else before
        changes[sampler, "drop_last"] = False  # nothing to drop, because every batch has its own size
        return cls(old, used / (old * len(sizes)), is_trusted, sampler, changes, sizes)

    @property
    def name(self) -> str:
        """The class name of the sampler."""
        return type(self._sampler).__name__

    def iterated_by(self, batches: Callable[[Epoch], Iterator[list[int]]]) -> AbstractContextManager[None]:
        """Iterate over the sampler through ``batches``, which receives the sampler's own epochs."""
        return iterated_by(self._sampler, batches, **{_MARK: True})

    def batches(self, epoch: Epoch) -> Iterator[list[int]]:
        """Yield the batches of an epoch, including canaries."""
        with _changed(self._changes):
            drawn = iter(epoch())
        if self._sizes is not None:
            yield from self._sized(drawn, self._sizes)
            return
        while True:
            with _changed(self._changes):
                batch = next(drawn, None)
            if batch is None:
                return
            yield batch

    def _sized(self, drawn: Iterator[Any], sizes: list[int]) -> Iterator[list[int]]:
        for size in sizes:
            with _changed(self._changes | {(self._sampler, "batch_size"): size}):
                batch: list[int] = next(drawn, [])
            if len(batch) != size:
                raise InputError(
                    f"Expected the {type(self._sampler.sampler).__name__} to have {size} entries for a "
                    f"batch, got {len(batch)}: it draws from another number of entries than it states."
                )
            yield batch


@contextmanager
def _changed(values: _Changes) -> Iterator[None]:
    """Set attributes inside the block only."""
    with ExitStack() as undo:
        for (owner, name), value in values.items():
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _with_canaries(sampler: Any, num_canaries: int) -> tuple[int, dict[str, Any]]:
    """Return the number of entries of a sampler, and its attributes with ``num_canaries`` more."""
    attributes = getattr(sampler, "__dict__", {})
    if isinstance(sampler, DistributedUniformWithReplacementSampler):
        total = sampler.total_size + num_canaries
        entries = range(sampler.rank, total, sampler.num_replicas)
        return int(sampler.total_size), {"total_size": total, "num_samples": len(entries)}
    if attributes.get("_num_samples") is not None or any(name in attributes for name in _UNSUPPORTED):
        raise _unknown_entries(sampler)
    if isinstance(attributes.get("num_samples"), int):
        old = int(attributes["num_samples"])
    elif hasattr(attributes.get("data_source"), "__len__"):
        old = len(attributes["data_source"])
    else:
        raise _unknown_entries(sampler)
    total = old + num_canaries
    return old, {"num_samples": total} if "num_samples" in attributes else {"data_source": range(total)}


def _unknown_entries(sampler: Any) -> InputError:
    return InputError(
        "Expected a loader whose sampler has its number of entries in num_samples or data_source, such as "
        f"the one that make_private returned, got a {type(sampler).__name__}: canaries cannot become entries "
        "of its data set."
    )


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise InputError(
            f"Expected a loader whose sampler has a length, got a {type(sampler).__name__} without one: "
            "without it, there is no way to check that canaries do not change the sample rate."
        ) from None


def _check_length(sampler: Any, before: int, after: int, expected: int, num_canaries: int) -> None:
    if abs(after - expected) > (expected != before):
        raise InputError(
            f"Expected the {type(sampler).__name__} to have length {expected} with {num_canaries} canaries "
            f"among its entries, got {after}: its sample rate would change."
        )


def _batch_sizes(sampler: BatchSampler, before: int, after: int) -> list[int]:
    """Return batch sizes in the same proportions as before, each rounded to a whole entry."""
    cuts = [min(n * sampler.batch_size, before) * after / before for n in range(len(sampler) + 1)]
    return [round(end) - round(start) for start, end in pairwise(cuts)]
