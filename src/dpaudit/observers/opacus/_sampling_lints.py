"""Lints of the data and the sampling of a training run, compared with its accounting.

Opacus computes the sample rate as 1 / (number of batches) and divides the noisy sum by int(n * rate). Both
may differ between n examples and n - 1 or n + 1, while accounting assumes the same mechanism for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from opacus.accountants import GaussianAccountant
from torch.utils.data import BatchSampler, ConcatDataset, IterableDataset, Subset

from dpaudit._types import IntArray
from dpaudit.diagnostics import Finding
from dpaudit.observers.opacus._prepared import PreparedTraining, attached_accounting

SAME = 0.01  # relative difference of numbers that a user rounded
EQUAL = 1e-6  # the same for numbers of which one is computed from the other
_MUCH = 0.05  # rounding in Opacus makes the accountant's rate up to 2 % larger than the loader's


def data_lints(training: PreparedTraining) -> Iterator[Finding | str]:
    """Yield findings and notes about the data set of the loader."""
    if training.num_examples is None:
        return
    repeated = num_repeated(training.loader.dataset)
    if repeated:
        yield Finding.certain(
            "repeated-entries",
            f"{repeated} of the {training.num_examples} entries of the data set are examples that occur "
            "before: each of them counts more than once, beyond the clipping norm.",
        )
    yield from _size_lints(training)


def num_repeated(dataset: Any) -> int:
    """Return how many entries of subsets and concatenations are the same entry of a data set again."""
    if not isinstance(dataset, Subset | ConcatDataset):
        return 0
    try:
        owners, indices = _entries(dataset)
    except (TypeError, ValueError, IndexError):
        return 0  # entries that are not numbered
    return len(indices) - len(np.unique(np.stack([owners, indices]), axis=1).T)


def _entries(dataset: Any) -> tuple[IntArray, IntArray]:
    """Return the data set that holds each entry, as a number, and the index there."""
    if isinstance(dataset, Subset):
        owners, indices = _entries(dataset.dataset)
        chosen = np.asarray([int(index) for index in dataset.indices], dtype=np.int64)
        return owners[chosen], indices[chosen]
    if isinstance(dataset, ConcatDataset):
        parts = [_entries(part) for part in dataset.datasets]
        owners, indices = (np.concatenate(column) for column in zip(*parts, strict=True))
        return owners, indices
    return np.full(len(dataset), id(dataset)), np.arange(len(dataset))


def _size_lints(training: PreparedTraining) -> Iterator[str]:
    """Compare the sample rate and the divisor at n examples with those at n - 1 and n + 1."""
    size, rate, sampler = training.num_examples, training.drawn_rate, training.sampler
    divisor = training.optimizer.expected_batch_size
    if size is None or rate is None or divisor is None or not hasattr(sampler, "__len__"):
        return
    num_batches, length, ranks = round(1 / rate), len(sampler), getattr(sampler, "num_replicas", 1)
    if not math.isclose(divisor * ranks, _divisor(size, length)):
        return  # it was not computed by make_private
    is_mean, batch_size = training.optimizer.loss_reduction == "mean", _batch_size(size, num_batches)
    changes = []
    for other in (size - 1, size + 1):
        changed = num_batches if batch_size is None else math.ceil(other / batch_size)
        if changed != num_batches:
            divided = f" and divides by {_divisor(other, changed)}" if is_mean else ""
            changes.append(f"with {other:,} at batch size {batch_size}, it draws at 1/{changed}{divided}")
        elif is_mean and _divisor(other, length) != _divisor(size, length):
            changes.append(f"with {other:,}, it divides by {_divisor(other, length)}")
    if changes:
        own = f" and divides by {_divisor(size, length)}" if is_mean else ""
        yield (
            f"The mechanism depends on the number of examples: with {size:,}, Opacus draws at a rate of "
            f"1/{num_batches}{own}; {'; '.join(changes)}. The accounting holds if the number of examples is "
            "public or the same in neighboring data sets."
        )


def _divisor(size: int, num_batches: int) -> int:
    """Return the number by which Opacus divides the sum, computed as Opacus does."""
    return int(size * (1 / max(num_batches, 1)))


def _batch_size(size: int, num_batches: int) -> int | None:
    """Return the batch size of the original loader if the number of batches then differs at a neighbor.

    Only the number of batches is left of that loader, so that this is one of several possible sizes.
    """
    if size % num_batches == 0:
        return size // num_batches
    if num_batches > 1 and (size - 1) % (num_batches - 1) == 0:
        return (size - 1) // (num_batches - 1)
    return None


def rate_lints(training: PreparedTraining, claimed: float | None) -> Iterator[Finding | str]:
    """Compare the loader's sampling with that of the accountant and the claim."""
    accounting = attached_accounting(training.optimizer)
    accounted = None if accounting is None else accounting.sample_rate
    drawn = training.drawn_rate
    if drawn is None:
        yield from _fixed_batch_lints(training, accounted if claimed is None else claimed)
        return
    for rate, whose, tolerance in (
        (accounted, "accountant's", EQUAL),
        (claimed, "claimed", SAME),
    ):
        if rate is not None and drawn > rate * (1 + tolerance):
            yield Finding.certain(
                "loader-rate",
                f"The loader draws each example with probability {drawn:.6g}, more than the {whose} sample "
                f"rate of {rate:.6g}.",
            )
            return
    if accounted is not None and drawn < accounted * (1 - _MUCH):
        yield (
            f"The loader draws each example with probability {drawn:.6g}, less than the accountant's sample "
            f"rate of {accounted:.6g}: epsilon is overestimated."
        )


def _fixed_batch_lints(training: PreparedTraining, rate: float | None) -> Iterator[Finding | str]:
    """Check a loader without Poisson sampling; one batch of all examples needs none."""
    sampler = training.sampler
    if type(sampler) is not BatchSampler or _is_single_batch(sampler) or (rate or 0.0) >= 1:
        return
    is_iterated = isinstance(training.loader.dataset, IterableDataset)  # whose sampler has no indices
    whence = "an IterableDataset, in its own order" if is_iterated else f"a {_sampler_name(sampler)}"
    fact = f"The loader has batches of {sampler.batch_size} from {whence}"
    accounting = attached_accounting(training.optimizer)
    if accounting is not None and isinstance(accounting.accountant, GaussianAccountant):
        yield f"{fact}: call get_epsilon(poisson=False), which is for batches of one size."
    elif rate is not None:
        sentence = f"{fact}, but the sample rate {rate:.6g} is accounted for as Poisson sampling."
        yield Finding.certain("batch-sampler", sentence)
    else:
        yield f"{fact}: a claim that assumes Poisson sampling does not apply."


def _is_single_batch(sampler: BatchSampler) -> bool:
    try:
        return len(sampler) <= 1
    except TypeError:  # it draws from a data set that is only iterated
        return False


def _sampler_name(sampler: Any) -> str:
    """Return the class name of the sampler inside a batch sampler."""
    return type(getattr(sampler, "sampler", sampler)).__name__
