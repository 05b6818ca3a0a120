"""More entries for the samplers of torch and of Opacus, at the rate that they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from dpaudit.errors import InputError

__all__ = ["Enlarged", "enlarge"]

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
