"""Examples of a torch data set that its training does not get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from dpaudit import _validate
from dpaudit._torch import HeldOutData, fingerprints, held_out
from dpaudit.canaries import split_places
from dpaudit.errors import InputError

__all__ = ["hold_out", "require_apart"]

_AT_ONCE = 1_000


def hold_out(
    data: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[Subset[Any], HeldOutData]:
    """The data without ``num_held_out`` examples, drawn at random, and those examples.

    ``data`` has a length and pairs of an input and its class. Train on the first part. Held-out examples that
    it has too, as duplicates, are left out of the second. Classes are those that the data have, unless
    ``num_classes`` says how many there are.
    """
    kept, held = split_places(len(data), num_held_out, seed)
    rest = Subset(data, kept.tolist())
    inputs, targets = _stacked([data[place] for place in held.tolist()])
    known, largest = _seen(rest)
    count = 1 + max(largest, int(targets.max())) if num_classes is None else num_classes
    return rest, held_out(inputs, targets, _validate.whole("num_classes", count, low=2)).apart_from(known)


def require_apart(data: HeldOutData, loader: Any) -> None:
    """Refuse held-out examples that the loader draws, such as those of a batch."""
    if not hasattr(loader, "dataset"):
        raise InputError(
            "Expected loader=..., the one that PrivacyEngine.make_private returned: held-out examples must "
            f"not be among its data; got {type(loader).__name__}."
        )
    count = data.num_among(_seen(loader.dataset)[0])
    if count:
        raise InputError(
            f"Expected held_out to be apart from the data of loader, but {count} of its {len(data)} examples "
            "are in both; train on the first part that hold_out() returns."
        )


def _seen(data: Any) -> tuple[set[int], int]:
    """The fingerprints of all inputs, and the largest class."""
    found: set[int] = set()
    largest = 0
    for pairs in _chunks(data[place] for place in range(len(data))):
        inputs, targets = _stacked(pairs)
        found.update(fingerprints(inputs))
        largest = max(largest, int(targets.max()))
    return found, largest


def _stacked(pairs: list[Any]) -> tuple[Tensor, Tensor]:
    try:
        inputs, targets = zip(*((one, float(target)) for one, target in pairs), strict=True)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"Expected data of pairs of an input and its class, got a {type(pairs[0]).__name__} that is none."
        ) from error
    classes = torch.as_tensor(targets)
    if bool((classes != classes.round()).any()):
        raise InputError(f"Expected classes that are whole numbers, got {targets[0]:g}.")
    return torch.stack([torch.as_tensor(one) for one in inputs]), classes.long()


def _chunks(pairs: Iterable[Any]) -> Iterator[list[Any]]:
    source = iter(pairs)
    while some := list(islice(source, _AT_ONCE)):
        yield some
