"""Examples that no training sees: what canaries are made from.

Canaries as vectors of torch, without their zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit.canaries import Directions
from dpaudit.errors import InputError

_SPLIT = object()  # the mark of what was split off


@dataclass(frozen=True, eq=False)
class HeldOutData:
    """Inputs, ready for a model, and their classes; only splitting a data set makes one.

    Canaries are crafted from this type and from nothing else. So nobody crafts them from a batch by mistake:
    the adversary of the paper knows examples like those of the training, and not the training's own.
    """

    inputs: Tensor
    targets: Tensor
    num_classes: int
    _mark: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self._mark is not _SPLIT:
            raise InputError(
                "Expected held-out examples to be split off by hold_out(data, ...), got tensors: canaries "
                "must not be made from what the training sees."
            )

    def __repr__(self) -> str:
        return f"HeldOutData({len(self):,} examples, {self.num_classes} classes)"

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> HeldOutData:
        """The same on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def num_among(self, others: set[int]) -> int:
        """How many of the inputs have one of these fingerprints."""
        return sum(one in others for one in fingerprints(self.inputs))

    def apart_from(self, others: set[int]) -> HeldOutData:
        """Those whose inputs have none of these fingerprints."""
        kept = torch.tensor([one not in others for one in fingerprints(self.inputs)])
        if not kept.any():
            raise InputError(
                f"Expected held-out examples that the training does not see, but it sees all {len(self)}."
            )
        places = kept.nonzero().view(-1).to(self.inputs.device)
        return replace(self, inputs=self.inputs[places], targets=self.targets[places])


def held_out(inputs: Tensor, targets: Tensor, num_classes: int) -> HeldOutData:
    """For those who split a data set: the part that its training does not get."""
    return HeldOutData(inputs, targets, num_classes, _SPLIT)


def require_fitting(model: nn.Module, loss: Callable[..., Any], data: HeldOutData) -> None:
    """Let the model and its loss look at one example, so that others than it takes are told at once."""
    target = torch.full_like(data.targets[:1], data.num_classes - 1)
    was_training = model.training
    model.eval()  # nothing is remembered of what is only looked at
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss(model(data.inputs[:1]), target)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shape, reason = tuple(data.inputs.shape[1:]), str(error).strip().partition("\n")[0]
        raise InputError(
            f"Expected held-out examples that the model and its loss take, but inputs of shape {shape} with "
            f"{data.num_classes} classes raise {type(error).__name__}: {reason}"
        ) from error
    finally:
        model.train(was_training)


def fingerprints(inputs: Tensor) -> list[int]:
    """A number for each input, the same for equal ones; others have the same once in 2**64."""
    rows: Any = np.ascontiguousarray(inputs.detach().cpu().numpy())
    return [hash(row.tobytes()) for row in rows]


@dataclass(frozen=True, eq=False)
class CanaryVectors:
    """The directions of a step's canaries, on the training's device."""

    values: Tensor  # entries x canaries
    coordinates: Tensor | None
    num_parameters: int

    @classmethod
    def of(cls, directions: Directions, like: Tensor) -> CanaryVectors:
        """The same vectors, for gradients like this one."""
        values = torch.as_tensor(directions.values, dtype=like.dtype, device=like.device)
        places = directions.coordinates
        coordinates = None if places is None else torch.as_tensor(places, device=like.device)
        return cls(values, coordinates, directions.num_parameters)

    @property
    def num_canaries(self) -> int:
        """How many there are."""
        return self.values.shape[1]

    def project(self, vector: Tensor, without: Tensor | None = None) -> Tensor:
        """The dot product of each canary's direction with ``vector``, or with its difference to another."""
        entries = self._entries(vector)
        if without is not None:
            entries = entries - self._entries(without)
        products = self.values * entries
        return products[0] if len(products) == 1 else products.sum(dim=0)

    def _entries(self, vector: Tensor) -> Tensor:
        """The entries of ``vector`` that the values stand on."""
        if self.coordinates is not None:
            return vector.index_select(0, self.coordinates.view(-1)).view_as(self.values)
        missing = self.values.numel() - vector.numel()
        return torch.nn.functional.pad(vector, (0, missing)).view_as(self.values)

    def add(self, weights: Tensor, out: Tensor) -> None:
        """Add each direction times its weight."""
        weighted = (self.values * weights).view(-1)
        if self.coordinates is not None:
            out.index_add_(0, self.coordinates.view(-1), weighted)
        else:
            out.add_(weighted[: self.num_parameters])

    def rows(self, numbers: Tensor, length: float) -> Tensor:
        """The canaries with these numbers as gradients of ``length``, zeros and all: a row each."""
        values = self.values[:, numbers].T * length
        if self.coordinates is not None:
            out = values.new_zeros(len(numbers), self.num_parameters)
            return out.scatter_add_(1, self.coordinates[:, numbers].T, values)
        dealt = values.new_zeros(len(numbers), *self.values.shape)
        dealt[torch.arange(len(numbers), device=values.device), :, numbers] = values
        return dealt.view(len(numbers), -1)[:, : self.num_parameters]
