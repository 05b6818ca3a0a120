"""The batches that the loader of a training loop draws.

:class:`LoaderBatches` follows the batch sampler of a loader. If no loader is given, it follows every loader
that is iterated while it is installed, and keeps the one that drew the batch of the first step. Workers and
wrappers may draw ahead: which batch belongs to which step is decided in ``BatchRecord``. If a loader is
given, others are followed as well, because the loop may use one of them instead.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler

from dpaudit._types import IntArray
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding
from dpaudit.diagnostics._sum_checks import BatchRecord
from dpaudit.observers.opacus._lints import FrozenLints
from dpaudit.observers.opacus._sampling import iterated_by
from dpaudit.recording._claim_source import SAME_RATE

_NO_LOADER = (
    "batches are not tested, and rows are not compared with drawn examples: pass loader=..., the loader that "
    "make_private returned, and start the loop over it inside the with block"
)
_DISTRIBUTED = (
    "batches of several processes are not tested against Poisson sampling: each process draws from its own "
    "part of the data"
)
_ITERATED = "batches are not tested: an IterableDataset draws its examples itself, without indices"
_NO_LENGTH = "batches are not tested against Poisson sampling: the data set of the loader has no length"
_POISSON = UniformWithReplacementSampler, DistributedUniformWithReplacementSampler
_MIN_COMPARED, _MAX_COMPARED = 8, 64  # steps whose numbers of rows are compared with all sizes of batches
_MAX_AHEAD = 192  # batches that may be drawn before the first step, as by a pass for evaluation
_ANOTHER = "does the loop iterate over the original loader instead of the one that make_private returned?"
_KEPT = 64  # batches of a loader that may turn out to be that of the loop


class LoaderBatches:
    """The batches of ``loader``, or of the one that the loop turns out to use; ``record`` keeps them."""

    def __init__(self, loader: Any, *, is_distributed: bool, is_followed: bool = True) -> None:
        self.record = BatchRecord(_NO_LOADER)
        self.loader, self._is_distributed, self._is_followed = loader, is_distributed, is_followed
        self._candidates: dict[int, _DrawingLoader] = {}  # by the identity of their samplers
        self._num_draws = 0
        self._is_given = self._is_chosen = loader is not None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the loader inside the block, unless another hook does."""
        with ExitStack() as self._undo:
            if self._is_followed:
                self._undo.enter_context(_iteration_noted(self._follow))
                if self.loader is not None:
                    self._follow(self.loader)
            yield

    def _follow(self, loader: Any) -> None:
        """Note the batches that ``loader`` draws, if that is possible."""
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            if loader is self.loader:
                self.record.unobserved = _ITERATED
            return
        sampler = getattr(loader, "batch_sampler", None)
        inner = sampler.sampler if isinstance(sampler, BatchSplittingSampler) else sampler
        if (
            not isinstance(loader, DataLoader)
            or not hasattr(inner, "__dict__")
            or id(inner) in self._candidates
        ):
            return
        if self._is_chosen and self._candidates and not self._is_given:
            return
        found = _DrawingLoader(loader, inner)
        self._candidates[id(inner)] = found
        if self._is_given and loader is self.loader:
            self._choose(found)

        def drawn(epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
            for batch in epoch():
                self._draw(found, batch)
                yield batch

        self._undo.enter_context(iterated_by(inner, drawn))

    def _draw(self, loader: _DrawingLoader, batch: Any) -> None:
        self._num_draws += 1
        if len(loader.first_sizes) < _MAX_COMPARED + _MAX_AHEAD and hasattr(batch, "__len__"):
            loader.first_sizes.append(len(batch))
        if self._is_given and not loader.is_chosen:  # its indices do not matter
            return
        indices = np.asarray(batch, dtype=np.int64).reshape(-1)
        if loader.is_chosen:
            self.record.add_drawn_batch(loader.positions(indices), loader.num_examples or 0)
        elif not self._is_chosen:
            loader.drawn.append(indices)
            loader.last_draw = self._num_draws

    def choose(self, rows: int) -> None:
        """Choose the loader of the loop when the first rows, this number of them, are clipped.

        If only one loader has Poisson sampling, it is the one; otherwise the one that drew last, if the size
        of its batch is right.
        """
        if self._is_chosen or rows == 0:
            return
        self._is_chosen = True
        drawing = sorted(
            (one for one in self._candidates.values() if one.drawn), key=lambda one: -one.last_draw
        )
        poisson = [one for one in drawing if one.is_poisson]
        fitting = [one for one in drawing if one.fits(rows)]
        found = poisson if len(poisson) == 1 else fitting[:1]
        if not found:
            return
        self._choose(found[0])
        for indices in found[0].drawn:
            self.record.add_drawn_batch(found[0].positions(indices), found[0].num_examples or 0)

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return a finding if the loop uses another loader than the given one.

        One with Poisson sampling at the claimed rate is as good.
        """
        rows = self.record.step_rows[:_MAX_COMPARED]
        sizes = [size for size in rows if size is not None]
        if not self._is_given or len(sizes) < _MIN_COMPARED:
            return CheckResults()
        chosen = [one for one in self._candidates.values() if one.is_chosen]
        # batches of one size show which loader draws them only if those of the given loader vary
        if any(one.drew(rows) for one in chosen) or not (
            len(set(sizes)) > 1 or any(one.is_poisson for one in chosen)
        ):
            return CheckResults()
        for other in self._candidates.values():
            if other.drew(rows) and not other.is_as_claimed(claimed.sample_rate):
                sentence = (
                    f"The loop does not use the batches of loader=: its first {len(rows)} steps have as "
                    f"many rows as batches of another loader, with {other.described}."
                )
                finding = replace(Finding.certain("rows-drawn", sentence), cause=_ANOTHER)
                return CheckResults(certain=(finding,))
        return CheckResults()

    def frozen(self, sample_rate: float | None) -> FrozenLints:
        """Return the same result without loaders; see ``LiveCheck``."""
        found = self.results(ClaimedStep(noise_multiplier=1.0, sample_rate=sample_rate))
        return FrozenLints(others=found.certain)

    def _choose(self, loader: _DrawingLoader) -> None:
        self.loader, loader.is_chosen = loader.loader, True
        if self._is_distributed or loader.num_examples is None:
            self.record.tests_sampling = False
            self.record.unobserved = _DISTRIBUTED if self._is_distributed else _NO_LENGTH


class _DrawingLoader:
    """A loader that draws batches, and the examples that its sampler may draw, numbered from 0."""

    def __init__(self, loader: Any, sampler: Any) -> None:
        self.loader = loader
        self.is_poisson, self.is_chosen = isinstance(sampler, _POISSON), False
        self._rate = float(getattr(sampler, "sample_rate", math.nan))
        self.drawn: deque[IntArray] = deque(maxlen=_KEPT)
        self.first_sizes: list[int] = []
        self.last_draw = 0
        self._is_split = isinstance(loader.batch_sampler, BatchSplittingSampler)
        inside = getattr(sampler, "sampler", sampler)
        self._subset: IntArray | None = None
        if isinstance(inside, SubsetRandomSampler):
            self._subset = np.unique(np.asarray(inside.indices, dtype=np.int64))
        self.num_examples = _num_examples(loader) if self._subset is None else self._subset.size

    def fits(self, rows: int) -> bool:
        """Return whether the batch that was drawn last may have this number of rows."""
        size = self.drawn[-1].size
        return rows == size or (self._is_split and rows < size)

    def drew(self, rows: list[int | None]) -> bool:
        """Return whether consecutive batches have the sizes of steps, as far as these are known.

        An empty batch may be filled by one example.
        """
        drawn, known = np.asarray(self.first_sizes), np.array([size is not None for size in rows])
        if drawn.size < len(rows):
            return False
        sizes = np.array([size or 0 for size in rows])
        windows = np.lib.stride_tricks.sliding_window_view(drawn, len(rows))
        same = (windows == sizes) | ((windows == 0) & (sizes == 1)) | ~known
        return bool(same.all(axis=1).any())

    def is_as_claimed(self, sample_rate: float | None) -> bool:
        """Return whether the loader has Poisson sampling at this rate, or at any if none is claimed."""
        if not self.is_poisson or sample_rate is None:
            return self.is_poisson
        return math.isclose(self._rate, sample_rate, rel_tol=SAME_RATE)

    @property
    def described(self) -> str:
        """How the loader draws its batches."""
        sampler = getattr(self.loader, "batch_sampler", None)
        if self.is_poisson or not isinstance(sampler, BatchSampler):
            return f"a {type(sampler).__name__}"
        return f"batches of {sampler.batch_size} from a {type(sampler.sampler).__name__}"

    def positions(self, indices: IntArray) -> IntArray:
        """Return the numbers of examples, given by index in the data set."""
        if self._subset is None:
            return indices
        return np.searchsorted(self._subset, indices).astype(np.int64)


def _num_examples(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except TypeError:  # a data set that is only iterated
        return None


@contextmanager
def _iteration_noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note`` with every loader that starts an epoch inside the block."""
    own: Any = DataLoader.__iter__

    def iterate(loader: Any) -> Any:
        note(loader)
        return own(loader)

    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = own  # type: ignore[method-assign]
