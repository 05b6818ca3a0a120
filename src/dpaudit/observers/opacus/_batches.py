"""The batches that the loader of a training loop draws.

:class:`LoaderBatches` follows the batch sampler of the loader that the user passed. Workers and wrappers may
draw ahead: which batch belongs to which step is decided in ``BatchRecord``, by the number of rows. Canaries
that the sampler draws need more certainty, so :class:`BatchQueue` assigns each batch to one step or raises.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from dpaudit._types import IntArray
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding
from dpaudit.diagnostics._sum_checks import BatchRecord
from dpaudit.errors import InputError
from dpaudit.observers.opacus._lints import FrozenLints

Epoch: TypeAlias = Callable[[], Iterator[Any]]
"""A function that starts drawing the batches of an epoch."""

_MIN_COMPARED, _MAX_COMPARED = 8, 64  # steps whose numbers of rows are compared with Poisson sampling
_MAX_PROBABILITY = 1e-9  # of sizes of batches under Poisson sampling that are no coincidence
_MAX_STANDARD_ERRORS = 8.0  # of the mean size


class LoaderBatches:
    """The batches of ``loader``, if it is given and draws by index; ``record`` keeps them."""

    def __init__(self, loader: Any, *, is_distributed: bool, is_followed: bool = True) -> None:
        self.loader, self._is_followed = loader, is_followed
        self.record = BatchRecord(
            "batches are not tested, and rows are not compared with drawn examples: pass loader=..., the "
            "loader that make_private returned, and start the loop over it inside the with block"
        )
        self._num_batches = 0
        self._sampler = drawing_sampler(loader) if isinstance(loader, DataLoader) else None
        self._subset: IntArray | None = None
        inside = getattr(self._sampler, "sampler", self._sampler)
        if isinstance(inside, SubsetRandomSampler):
            self._subset = np.unique(np.asarray(inside.indices, dtype=np.int64))
        self._num_examples = _num_examples(loader) if self._subset is None else self._subset.size
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            self._sampler = None
            self.record.unobserved = (
                "batches are not tested: an IterableDataset draws its examples itself, without indices"
            )
        elif self._sampler is not None and (is_distributed or self._num_examples is None):
            self.record.tests_sampling = False
            self.record.unobserved = (
                "batches of several processes are not tested against Poisson sampling: each process draws "
                "from its own part of the data"
                if is_distributed
                else "batches are not tested against Poisson sampling: the data set of the loader has no "
                "length"
            )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the loader inside the block, unless another hook does."""
        if not self._is_followed or not hasattr(self._sampler, "__dict__"):
            yield
            return
        with iterated_by(self._sampler, self._noting):
            yield

    def _noting(self, epoch: Epoch) -> Iterator[Any]:
        for batch in epoch():
            self._num_batches += 1
            indices = np.asarray(batch, dtype=np.int64).reshape(-1)
            if self._subset is not None:
                indices = np.searchsorted(self._subset, indices).astype(np.int64)
            self.record.add_drawn_batch(indices, self._num_examples or 0)
            yield batch

    @property
    def is_unused(self) -> bool:
        """Whether the loader has drawn no batch yet, although it could."""
        return self._is_followed and self._sampler is not None and self._num_batches == 0

    def results(self, claimed: ClaimedStep | None = None) -> CheckResults:  # noqa: ARG002
        """Return a finding if the loop certainly does not use the given loader."""
        rows = [size for size in self.record.step_rows[:_MAX_COMPARED] if size is not None]
        is_drawing = 2 * self._num_batches >= len(self.record.step_rows)
        if len(rows) < _MIN_COMPARED or is_drawing or not self._are_impossible(np.array(rows)):
            return CheckResults()
        described = (
            f"all have {rows[0]} rows" if len(set(rows)) == 1 else f"have {np.mean(rows):.4g} rows on average"
        )
        sentence = (
            f"The loop does not use the batches of loader=: its first {len(rows)} steps {described}, which "
            "batches of that loader do not."
        )
        cause = (
            "does the loop iterate over the original loader instead of the one that make_private returned?"
        )
        return CheckResults(certain=(replace(Finding.certain("rows-drawn", sentence), cause=cause),))

    def frozen(self, sample_rate: float | None) -> FrozenLints:  # noqa: ARG002
        """Return the same result without loaders; see ``LiveCheck``."""
        return FrozenLints(others=self.results().certain)

    def _are_impossible(self, rows: IntArray) -> bool:
        """Return whether Poisson sampling of the loader certainly has other sizes."""
        samplers = UniformWithReplacementSampler, DistributedUniformWithReplacementSampler
        if not isinstance(self._sampler, samplers) or self._num_examples is None:
            return False
        mean = self._num_examples * float(self._sampler.sample_rate)
        variance = mean * (1 - float(self._sampler.sample_rate))
        if variance < 1 or not self._is_followed or not self.record.tests_sampling or not rows.any():
            return False
        most_likely = 1 / math.sqrt(2 * math.pi * variance)
        if np.ptp(rows) == 0:
            return bool(most_likely ** (rows.size - 1) < _MAX_PROBABILITY)
        return bool(abs(rows.mean() - mean) > _MAX_STANDARD_ERRORS * math.sqrt(variance / rows.size))


def drawing_sampler(loader: Any) -> Any:
    """Return the batch sampler that draws examples, also inside one that splits batches."""
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.sampler if isinstance(sampler, BatchSplittingSampler) else sampler


def _num_examples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):  # a data set that is only iterated
        return None


@contextmanager
def iterated_by(
    sampler: Any, batches: Callable[[Epoch], Iterator[list[int]]], **attributes: Any
) -> Iterator[None]:
    """Iterate over a sampler through ``batches``, which receives the sampler's own epochs.

    ``__iter__`` is looked up on the class, so the class is replaced, by one with these ``attributes``. The
    object stays the same because a BatchMemoryManager, created before or after this, holds a reference to it.
    """
    original = type(sampler)

    def iterate(self: Any) -> Iterator[list[int]]:
        return batches(lambda: original.__iter__(self))

    names = {"__iter__": iterate, "__module__": original.__module__, **attributes}
    sampler.__class__ = type(original.__name__, (original,), names)
    try:
        yield
    finally:
        sampler.__class__ = original


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
            raise InputError(f"Expected a batch of the loader before step {index}, got none: {advice}")
        count = self._num_used(passes)
        if count is None:
            raise InputError(
                f"Expected step {index} to use the next batch of the loader, which has "
                f"{self._batches[0][1]} examples, got gradients of {' + '.join(map(str, passes))}: "
                f"{_mismatch([size for _, size in self._batches], passes)}."
            )
        self._num_steps += 1
        return np.concatenate([self._batches.popleft()[0] for _ in range(count)])

    def check_consumed(self, pending: list[int]) -> None:
        """Raise if batches were not used in any step, except at the end of a loop that was left early."""
        left = len(self._batches) - (self._num_used(self._passes + pending) or 0)
        if left > self._num_prefetched + (not self._ended):
            raise InputError(
                "Expected the loop to use every batch of the loader in a step, including empty ones, got "
                f"{left} unused batches: their canaries were not added to any step."
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
