"""The batches that the loader of a training loop draws.

:class:`LoaderBatches` follows the batch sampler of the loader that the user passed. Workers and wrappers may
draw ahead: which batch belongs to which step is decided in ``BatchRecord``, by the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from dpaudit._types import IntArray
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding
from dpaudit.diagnostics._sum_checks import BatchRecord
from dpaudit.observers.opacus._lints import FrozenLints
from dpaudit.observers.opacus._prepared import PreparedTraining

Epoch: TypeAlias = Callable[[], Iterator[Any]]
"""A function that starts drawing the batches of an epoch."""

_MIN_COMPARED, _MAX_COMPARED = 8, 64  # steps whose numbers of rows are compared with Poisson sampling
_MAX_PROBABILITY = 1e-9  # of sizes of batches under Poisson sampling that are no coincidence
_MAX_STANDARD_ERRORS = 8.0  # of the mean size


class LoaderBatches:
    """The batches of the loader, if it is given and draws by index; ``record`` keeps them."""

    def __init__(self, training: PreparedTraining, *, is_distributed: bool, is_followed: bool = True) -> None:
        self._is_followed, self._num_batches = is_followed, 0
        self.record = BatchRecord(
            "batches are not tested, and rows are not compared with drawn examples: pass loader=..., the "
            "loader that make_private returned, and start the loop over it inside the with block"
        )
        self._sampler = training.sampler if isinstance(training.loader, DataLoader) else None
        self._subset: IntArray | None = None
        inside = getattr(self._sampler, "sampler", self._sampler)
        if isinstance(inside, SubsetRandomSampler):
            self._subset = np.unique(np.asarray(inside.indices, dtype=np.int64))
        self._num_examples = training.num_examples if self._subset is None else self._subset.size
        if isinstance(getattr(training.loader, "dataset", None), IterableDataset):
            self._sampler = None
            self.record.unobserved = (
                "batches are not tested: an IterableDataset draws its examples itself, without indices"
            )
        elif self._sampler is not None and is_distributed:
            self.record.tests_sampling = False
            self.record.unobserved = (
                "batches of several processes are not tested against Poisson sampling: each process draws "
                "from its own part of the data"
            )
        elif self._sampler is not None and self._num_examples is None:
            self.record.tests_sampling = False
            self.record.unobserved = (
                "batches are not tested against Poisson sampling: the data set of the loader has no length"
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
