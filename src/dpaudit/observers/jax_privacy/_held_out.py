"""Arrays that a training does not get: what canaries are made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.canaries import InputCanary, split_places
from dpaudit.errors import InputError

__all__ = ["Given", "HeldOutArrays", "hold_out"]

_SPLIT = object()  # the mark of what was split off


@dataclass(frozen=True, eq=False)
class HeldOutArrays:
    """Inputs and their classes; only :func:`hold_out` makes one, so that nobody passes a batch by mistake."""

    inputs: np.ndarray
    targets: np.ndarray
    num_classes: int
    _mark: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self._mark is not _SPLIT:
            raise InputError(
                "Expected held-out examples to be split off by hold_out(inputs, targets, ...), got arrays: "
                "canaries must not be made from what the training sees."
            )

    def __repr__(self) -> str:
        return f"HeldOutArrays({len(self):,} examples, {self.num_classes} classes)"

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class Given(InputCanary):
    """Examples of your own: each is a canary."""

    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        _require_pairs(np.asarray(self.inputs), np.asarray(self.targets))


def hold_out(
    inputs: Any, targets: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[tuple[np.ndarray, np.ndarray], HeldOutArrays]:
    """Inputs and targets without ``num_held_out`` examples, drawn at random, and those examples.

    Train on the first part, which nothing else makes sure of: compiled steps show no data set to look into.
    So never split a batch. Held-out examples that the first part has too, as duplicates, are left out of the
    second.
    Classes are those that the targets have, unless ``num_classes`` says how many there are.
    """
    inputs, targets = np.asarray(inputs), np.asarray(targets)
    _require_pairs(inputs, targets)
    kept, held = split_places(len(targets), num_held_out, seed)
    known = {row.tobytes() for row in inputs[kept]}
    held = held[[row.tobytes() not in known for row in inputs[held]]]
    if len(held) == 0:
        raise InputError(
            f"Expected held-out examples that the training does not see, but it sees all {num_held_out}."
        )
    count = 1 + int(targets.max()) if num_classes is None else num_classes
    _validate.whole("num_classes", count, low=2)
    return (inputs[kept], targets[kept]), HeldOutArrays(inputs[held], targets[held], count, _SPLIT)


def _require_pairs(inputs: np.ndarray, targets: np.ndarray) -> None:
    if targets.ndim != 1 or inputs.ndim < 2 or len(inputs) != len(targets) or len(targets) == 0:
        raise InputError(
            f"Expected inputs and a class for each, got arrays of shapes {inputs.shape} and {targets.shape}."
        )
