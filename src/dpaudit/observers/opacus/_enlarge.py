"""More entries for the samplers of torch and of Opacus, at the rate that they have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.utils.data import BatchSampler

from dpaudit.errors import InputError

__all__ = ["Enlarged", "enlarge"]

_ODD = ("weights", "num_replicas")  # of samplers whose number of entries is not all that they go by


@dataclass(frozen=True)
class Enlarged:
    """A sampler that draws from more entries than it has, but only while ``drawing``."""

    num_examples: int
    _changes: dict[tuple[Any, str], Any]

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """The sampler has more entries here; everybody else sees it as it is."""
        before = {place: getattr(*place) for place in self._changes}
        _set(self._changes)
        try:
            yield
        finally:
            _set(before)


def _set(values: dict[tuple[Any, str], Any]) -> None:
    for (owner, name), value in values.items():
        setattr(owner, name, value)


def enlarge(sampler: Any, more: int) -> Enlarged:
    """``sampler`` is a batch sampler; it keeps its number of batches and the share that each draws."""
    inner = sampler.sampler if isinstance(sampler, BatchSampler) else sampler
    entries = _num_entries(inner)
    changes = {(inner, name): value for name, value in _with_entries(inner, entries + more).items()}
    if isinstance(sampler, BatchSampler):
        changes[sampler, "batch_size"] = _batch_size(sampler, entries, entries + more)
    found = Enlarged(entries, changes)
    _require_length(sampler, found, more)
    return found


def _num_entries(sampler: Any) -> int:
    known = vars(sampler)
    if isinstance(sampler, DistributedUniformWithReplacementSampler):
        return int(sampler.total_size)
    if known.get("_num_samples") is None and not any(name in known for name in _ODD):
        if isinstance(known.get("num_samples"), int):
            return int(known["num_samples"])
        if hasattr(known.get("data_source"), "__len__"):
            return len(known["data_source"])
    raise InputError(
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


def _batch_size(sampler: BatchSampler, entries: int, total: int) -> int:
    """As large a share of all entries as before, and as many batches."""
    batches = len(sampler)
    share = sampler.batch_size * total / entries
    if sampler.drop_last:
        return max(math.floor(share), total // (batches + 1) + 1)
    return min(math.ceil(share), (total - 1) // (batches - 1)) if batches > 1 else total


def _require_length(sampler: Any, enlarged: Enlarged, more: int) -> None:
    before = len(sampler)
    with enlarged.drawing():
        after = len(sampler)
    if before != after:
        raise InputError(
            f"Expected the {type(sampler).__name__} to make {before} batches also with {more} canaries among "
            f"its entries, got {after}: so its sample rate would be another one."
        )
