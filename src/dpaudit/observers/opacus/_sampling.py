"""Canaries that are entries of the data set, which the loader's own sampler draws.

:class:`SampledMembership` determines which canaries are present in a step: :class:`SamplerWithCanaries` draws
them at the rate of the loader's sampler, and :class:`BatchQueue` assigns batches to steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import Any, TypeAlias

import numpy as np
from opacus.data_loader import CollateFnWithEmpty, wrap_collate_with_empty
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from dpaudit._types import IntArray
from dpaudit.canaries import CanaryCoins, CanaryPlan
from dpaudit.diagnostics import BatchRecord
from dpaudit.errors import InputError
from dpaudit.observers._session import StepRecorder
from dpaudit.observers.opacus._clipping import OpacusClip, watched
from dpaudit.observers.opacus._prepared import Epoch, PreparedTraining, iterated_by

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


class SampledMembership:
    """Canaries drawn by the loader's batch sampler, and then removed from the batches.

    They are at random positions among the examples. The canaries of a batch are added to the same step as its
    examples.
    """

    def __init__(
        self,
        draws: CanaryCoins | CanaryPlan,
        training: PreparedTraining,
        clip: OpacusClip,
        drawn: BatchRecord,
    ) -> None:
        loader = self._loader = training.loader
        self._optimizer, self._clip, self._drawn = training.optimizer, clip, drawn
        sampler, canaries = _batch_sampler(training), np.flatnonzero(draws.entries())
        self._sampler = SamplerWithCanaries.of(sampler, len(canaries))
        total = self._sampler.num_examples + len(canaries)
        positions = draws.rng(0, _POSITIONS).choice(total, len(canaries), replace=False, shuffle=False)
        self._canary = np.full(total, -1)  # the number of the canary at each position, -1 for an example
        self._canary[np.sort(positions)] = canaries
        self._example = np.cumsum(self._canary < 0) - 1
        self._num_batches, self._num_drawn, self._num_added = 0, 0, 0
        self._error: InputError | None = None
        num_prefetched = int(loader.num_workers * (loader.prefetch_factor or 0))
        self._queue = BatchQueue(num_prefetched, getattr(loader.collate_fn, "rand_on_empty", False))

    @contextmanager
    def installed(self, steps: StepRecorder) -> Iterator[None]:
        self._steps = steps

        @steps.guarded
        def note_backward() -> None:
            self._queue.note_backward(self._clip.batch_sizes())

        with ExitStack() as undo:
            undo.enter_context(self._sampler.iterated_by(self._batches))
            undo.callback(setattr, self._loader, "collate_fn", self._loader.collate_fn)
            self._loader.collate_fn = _collate_with_empty(self._loader)
            undo.enter_context(watched(self._optimizer, "pre_step", before=note_backward))
            yield

    def members(self, index: int) -> IntArray:
        return self._queue.pop_step(index)

    def check_complete(self, claimed_rate: float) -> None:
        """Raise before a verdict if a batch was used in no step, or the sampler drew too few canaries."""
        if self._error is not None:
            raise self._error
        if not self._steps.is_over:
            self._queue.check_consumed(self._clip.pending_batch_sizes())
        if self._sampler.is_trusted:
            return
        rate = claimed_rate if self._sampler.rate is None else min(self._sampler.rate, claimed_rate)
        expected = rate * int((self._canary >= 0).sum()) * self._num_batches
        if self._num_drawn < expected - _MAX_DEVIATION * math.sqrt(expected):
            raise InputError(
                f"The {self._sampler.name} drew canaries {self._num_drawn} times, instead of about "
                f"{expected:.0f}: its batches do not grow with the number of entries, so it draws examples "
                "less often than without the audit."
            )

    def _batches(self, epoch: Epoch) -> Iterator[list[int]]:
        """Yield the batches of an epoch, without canaries."""
        with self._steps.guard():
            self._queue.start_epoch(self._clip.pending_batch_sizes())
        if self._steps.is_over:
            yield from epoch()
            return
        num_entries = 0
        for batch in self._sampler.batches(epoch, self._auditable):
            entries = np.asarray(batch, dtype=np.int64)
            canaries, num_entries = self._canary[entries], num_entries + len(entries)
            examples = self._example[entries[canaries < 0]]
            self._steps.guarded(self._note)(entries, canaries[canaries >= 0], examples)
            yield examples.tolist()
        with self._auditable():
            self._end_epoch(num_entries)

    @contextmanager
    def _auditable(self) -> Iterator[None]:
        """Keep an error that shows that canaries are no entries of the data set: there is no verdict."""
        with self._steps.guard():
            try:
                yield
            except InputError as error:
                self._error = self._error or error
                raise

    def _note(self, entries: IntArray, members: IntArray, examples: IntArray) -> None:
        self._num_batches += 1
        self._num_drawn += len(members)
        self._num_added += int((entries >= self._sampler.num_examples).sum())
        self._queue.push(members, len(examples))
        self._drawn.add_drawn_batch(examples, self._sampler.num_examples)

    def _end_epoch(self, num_entries: int) -> None:
        """Raise if the sampler keeps an earlier list of entries, which would omit examples."""
        self._queue.end_epoch()
        old, total = self._sampler.num_examples, len(self._canary)
        expected = num_entries * (total - old) / total
        if self._num_added == 0 and not self._sampler.is_trusted and expected > _MIN_EXPECTED:
            raise InputError(
                f"The {self._sampler.name} drew only from the first {old} of {total} entries in an epoch: "
                "canaries cannot become entries of its data set."
            )


def _batch_sampler(training: PreparedTraining) -> Any:
    """Return the batch sampler, which may be inside one that splits batches."""
    if not isinstance(training.loader, DataLoader) or training.sampler is None:
        raise InputError(
            "sampling=True needs loader=..., the loader that make_private returned, whose sampler draws "
            f"the canaries, got {type(training.loader).__name__}."
        )
    if hasattr(type(training.sampler), _MARK):
        raise InputError("The loader already has another observer; observe it only once.")
    return training.sampler


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

    def batches(self, epoch: Epoch, guard: Callable[[], AbstractContextManager[None]]) -> Iterator[list[int]]:
        """Yield the batches of an epoch, including canaries; other sizes than stated are an error."""
        with _changed(self._changes):
            drawn = iter(epoch())
        for size in repeat(None) if self._sizes is None else self._sizes:
            sized = {} if size is None else {(self._sampler, "batch_size"): size}
            with _changed(self._changes | sized):
                batch: list[int] | None = next(drawn, None)
            with guard():
                self._require_size(size, len(batch or ()))
            if batch is None and size != 0:
                return
            yield batch or []

    def _require_size(self, size: int | None, actual: int) -> None:
        if size not in (None, actual):
            raise InputError(
                f"The {type(self._sampler.sampler).__name__} must have {size} entries for a batch, got "
                f"{actual}: it draws from another number of entries than it states."
            )


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
        f"A {type(sampler).__name__} does not state its number of entries in num_samples or data_source, so "
        "canaries cannot become entries of its data set; pass the loader that make_private returned."
    )


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:
        raise InputError(
            f"A {type(sampler).__name__} has no length; without it, there is no way to check that canaries "
            "do not change the sample rate."
        ) from None


def _check_length(sampler: Any, before: int, after: int, expected: int, num_canaries: int) -> None:
    if abs(after - expected) > (expected != before):
        raise InputError(
            f"The {type(sampler).__name__} must have length {expected} with {num_canaries} canaries among "
            f"its entries, got {after}: its sample rate would change."
        )


def _batch_sizes(sampler: BatchSampler, before: int, after: int) -> list[int]:
    """Return batch sizes in the same proportions as before, each rounded to a whole entry."""
    cuts = [min(n * sampler.batch_size, before) * after / before for n in range(len(sampler) + 1)]
    return [round(end) - round(start) for start, end in pairwise(cuts)]


class BatchQueue:
    """Drawn batches, assigned to steps by the sizes of their backward passes.

    A step may use several batches, and a batch may be split into several passes; only an empty batch gives an
    empty pass. Worker processes of a loader draw up to ``num_prefetched`` batches that may never be used.
    With ``fills_empty``, an empty batch is replaced by a single artificial example.
    """

    def __init__(self, num_prefetched: int, fills_empty: bool) -> None:
        self._num_prefetched, self._min_size = num_prefetched, int(fills_empty)
        self._batches: deque[tuple[IntArray, int]] = deque()  # canaries, and the number of examples
        self._passes: list[int] = []
        self._num_steps = 0
        self._ended = True

    def start_epoch(self, pending: list[int]) -> None:
        """Start an epoch while the gradients of ``pending`` passes wait for the next step."""
        self.check_consumed(pending)
        num_used = self._num_used(self._passes + pending) or 0
        self._batches = deque(list(self._batches)[:num_used])  # the loop ended before the others were used
        self._ended = False

    def push(self, canaries: IntArray, size: int) -> None:
        """Add a drawn batch."""
        self._batches.append((canaries, max(size, self._min_size)))

    def end_epoch(self) -> None:
        """End an epoch whose loop ran to completion."""
        self._ended = True

    def note_backward(self, sizes: Iterable[int]) -> None:
        """Note the backward passes that are about to be clipped, for this step or a later one."""
        self._passes += sizes

    def pop_step(self, index: int) -> IntArray:
        """Return the canaries of all batches used since the last step."""
        passes, self._passes = self._passes, []
        if not passes or not self._batches:
            advice = (
                "is a batch used twice, or is one drawn by another loader?"
                if passes and self._num_steps
                else "pass the loader that the loop iterates over as loader=..., and start the loop inside "
                "the with block."
            )
            raise InputError(f"No batch of the loader was drawn before step {index}: {advice}")
        count = self._num_used(passes)
        if count is None:
            raise InputError(
                f"Step {index} must use the next batch of the loader, which has {self._batches[0][1]} "
                f"examples, got gradients of {' + '.join(map(str, passes))}: "
                f"{_mismatch([size for _, size in self._batches], passes)}."
            )
        self._num_steps += 1
        return np.concatenate([self._batches.popleft()[0] for _ in range(count)])

    def check_consumed(self, pending: list[int]) -> None:
        """Raise if batches were not used in any step, except at the end of a loop that was left early."""
        left = len(self._batches) - (self._num_used(self._passes + pending) or 0)
        if left > self._num_prefetched + (not self._ended):
            raise InputError(
                f"The loop did not use {left} batches of the loader, so their canaries were not added to "
                "any step; use every batch in a step, including empty ones."
            )

    def _num_used(self, passes: list[int]) -> int | None:
        """Return the number of leading batches that make up exactly these passes; None if there is none."""
        rest, count = deque(passes), 0
        for _, size in self._batches:
            if not rest:
                break
            if (size == 0) != (rest[0] == 0):
                return None
            left = size - rest.popleft()
            while left > 0 and rest and rest[0] > 0:
                left -= rest.popleft()
            if left != 0:
                return None
            count += 1
        return None if rest else count


def _mismatch(sizes: list[int], passes: list[int]) -> str:
    """Return the likely reason why no leading batches of these sizes make up the passes of a step."""
    total = sum(passes)
    if skipped := _skipped(sizes, total):
        return (
            f"the loop skips {skipped}, but with sampling=True it must use every batch in a step, "
            "including empty ones"
        )
    if 0 in passes:
        return "a batch that is not empty has a backward pass without examples"
    if sizes[0] and total > sizes[0] and total % sizes[0] == 0:
        return f"each example has {total // sizes[0]} rows, or batches have a fixed size"
    if total > sizes[0]:
        return "it has more rows than examples were drawn, from padding, another loader or a batch used twice"
    return "examples of the batch are left out, or batches are cut to a fixed size"


def _skipped(sizes: list[int], total: int) -> str | None:
    """Return which leading batches a step skipped if those after them have ``total`` examples."""
    for start in range(1, len(sizes)):
        if total and total in np.cumsum(sizes[start:]):
            if start > 1:
                return f"{start} batches"
            return "an empty batch" if sizes[0] == 0 else "a batch"
    return None
