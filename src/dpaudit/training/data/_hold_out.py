"""Examples apart from those of a training, for canaries to be made from."""

from __future__ import annotations

from dataclasses import replace

import torch

from dpaudit._torch import HeldOutData, fingerprints, held_out
from dpaudit.canaries import split_places
from dpaudit.training.data._dataset import Dataset

__all__ = ["fingerprints_of", "hold_out"]

_AT_ONCE = 1_000


def hold_out(
    data: Dataset, num_held_out: int, *, seed: int = 0, apart_from: Dataset | None = None
) -> tuple[Dataset, HeldOutData]:
    """The data without ``num_held_out`` examples, drawn at random, and those examples.

    Train on the first part (or test, if the training has other data): an audit refuses held-out examples
    that the training has. Data sets have duplicates: those that are in the first part too, or in
    ``apart_from``, are left out of the second.

    >>> from dpaudit.training.data import digits
    >>> hold_out(digits(), 297)
    (Dataset(1,500 examples of 1 x 8 x 8, 10 classes), HeldOutData(297 examples, 10 classes))
    """
    kept, held = map(torch.from_numpy, split_places(len(data), num_held_out, seed))
    rest = replace(data, inputs=data.inputs[kept], targets=data.targets[kept])
    inputs, targets = data.at(held)
    known = fingerprints_of(rest) | (set() if apart_from is None else fingerprints_of(apart_from))
    return rest, held_out(inputs, targets, data.num_classes).apart_from(known)


def fingerprints_of(data: Dataset) -> set[int]:
    """Those of all inputs, as a model gets them."""
    places = torch.arange(len(data)).split(_AT_ONCE)  # type: ignore[no-untyped-call]
    return {one for part in places for one in fingerprints(data.at(part)[0])}
