"""Tensors behind canaries: held-out examples, and directions stored without their zeros."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpaudit.canaries import Directions, HeldOutExamples, fingerprints, unseen_indices
from dpaudit.errors import InputError


@dataclass(frozen=True, eq=False, repr=False)
class HeldOutData(HeldOutExamples[Tensor]):
    """Preprocessed inputs and their classes; created only by splitting a data set."""

    _expected: ClassVar[str] = "hold_out(data, ...)"

    def to(self, device: torch.device | str) -> HeldOutData:
        """Return a copy on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def apart_from(self, seen: set[int]) -> HeldOutData:
        """Return the examples whose input fingerprints are not in ``seen``."""
        unseen = torch.from_numpy(unseen_indices(tensor_fingerprints(self.inputs), seen))
        unseen = unseen.to(self.inputs.device)
        return replace(self, inputs=self.inputs[unseen], targets=self.targets[unseen])

    def require_apart(self, seen: set[int], data: str, advice: str = "") -> None:
        """Raise if an input has a fingerprint that was ``seen`` in the training ``data``."""
        count = sum(fingerprint in seen for fingerprint in tensor_fingerprints(self.inputs))
        if count:
            raise InputError(
                f"held_out and {data} must be disjoint, but {count} of {len(self)} held-out examples are in "
                f"both; train on the first part that hold_out() returns{advice}."
            )


def tensor_fingerprints(inputs: Tensor) -> list[int]:
    """Return a number for each input; equal inputs have equal numbers."""
    values = inputs.detach().cpu()
    return fingerprints((values.float() if values.dtype == torch.bfloat16 else values).numpy())


def require_fitting(model: nn.Module, loss: Callable[..., Any], data: HeldOutData) -> None:
    """Raise if the model or its loss does not accept a held-out example; call this before training starts."""
    target = torch.full_like(data.targets[:1], data.num_classes - 1)
    was_training = model.training
    model.eval()  # so that running statistics do not change
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss(model(data.inputs[:1]), target)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shape, reason = tuple(data.inputs.shape[1:]), str(error).strip().partition("\n")[0]
        raise InputError(
            f"The model and its loss do not accept the held-out examples: inputs of shape {shape} with "
            f"{data.num_classes} classes raise {type(error).__name__}: {reason}"
        ) from error
    finally:
        model.train(was_training)


def largest_absolute(vector: Tensor) -> Tensor:
    """Return the largest absolute value, NaN if there is one; the norm of order infinity is much slower."""
    low, high = vector.aminmax()
    return torch.maximum(-low, high)


@dataclass(frozen=True, eq=False)
class CanaryVectors:
    """The directions of a step's canaries, on the device of the model."""

    values: Tensor  # entries x canaries
    coordinates: Tensor | None
    num_parameters: int
    places: Tensor | None = None  # of canaries that share them, which are numbered after the others
    shared: Tensor | None = None  # places x canaries
    together: Tensor | None = None  # coordinates and then places, if no canary apart has several entries

    @classmethod
    def of(cls, directions: Directions, like: Tensor) -> CanaryVectors:
        """Return the vectors with the dtype and device of the gradient ``like``."""
        values = torch.as_tensor(directions.values, dtype=like.dtype, device=like.device)
        coordinates, shared = directions.coordinates, directions.shared
        moved = None if coordinates is None else torch.as_tensor(coordinates, device=like.device)
        if shared is None:
            return cls(values, moved, directions.num_parameters)
        places = torch.as_tensor(shared.places, device=like.device)
        codes = torch.as_tensor(shared.values, dtype=like.dtype, device=like.device)
        together = None if moved is None or len(moved) > 1 else torch.cat([moved[0], places])
        return cls(values, moved, directions.num_parameters, places, codes, together)

    @property
    def num_canaries(self) -> int:
        """The number of canaries."""
        return self.num_apart + (0 if self.shared is None else self.shared.shape[1])

    @property
    def num_apart(self) -> int:
        """The number of canaries that share no coordinate with others; they come first."""
        return self.values.shape[1]

    def project(self, vector: Tensor, without: Tensor | None = None) -> Tensor:
        """Return the dot product of each direction with ``vector``, minus ``without`` if given."""
        if self.together is not None:  # fewer calls, which take most of the time
            return self.products(self.read(vector, without))
        entries = self._entries(vector)
        if without is not None:
            entries = entries - self._entries(without)
        products = self.values * entries
        apart = products[0] if len(products) == 1 else products.sum(dim=0)
        if self.places is None or self.shared is None:
            return apart
        shared_entries = vector.index_select(0, self.places)
        if without is not None:
            shared_entries = shared_entries - without.index_select(0, self.places)
        return torch.cat([apart, shared_entries @ self.shared])

    def read(self, vector: Tensor, without: Tensor | None = None) -> Tensor:
        """Return the numbers that :meth:`products` needs, if all coordinates are ``together``."""
        assert self.together is not None
        numbers = vector.index_select(0, self.together)
        return numbers if without is None else numbers - without.index_select(0, self.together)

    def products(self, found: Tensor) -> Tensor:
        """Return the dot products of all directions with the vector that was :meth:`read`."""
        assert self.shared is not None
        apart, shared_numbers = found[: self.num_apart], found[self.num_apart :]
        return torch.cat([apart * self.values[0], shared_numbers @ self.shared])

    def _entries(self, vector: Tensor) -> Tensor:
        """Return the entries of ``vector`` at the coordinates of the values."""
        if self.coordinates is not None:
            return vector.index_select(0, self.coordinates.view(-1)).view_as(self.values)
        missing = self.values.numel() - vector.numel()
        return torch.nn.functional.pad(vector, (0, missing)).view_as(self.values)

    def add_some(self, numbers: Tensor, weights: Tensor, out: Tensor) -> None:
        """Add the directions with these numbers, in increasing order, to ``out``, each times its weight."""
        if self.together is not None and self.shared is not None:
            # zeros for the others: selecting columns would take longer than multiplying all
            each = weights.new_zeros(self.num_canaries).index_add_(0, numbers, weights)
            apart, rest = each[: self.num_apart], each[self.num_apart :]
            added = torch.cat([apart * self.values[0], self.shared @ rest])
            out.index_add_(0, self.together, added)
            return
        if self.places is not None and self.shared is not None:
            first = int(torch.searchsorted(numbers, self.num_apart))
            codes = self.shared.index_select(1, numbers[first:] - self.num_apart)
            out.index_add_(0, self.places, codes @ weights[first:])
            numbers, weights = numbers[:first], weights[:first]
        if self.coordinates is not None and len(self.coordinates) == 1:  # Dirac canaries
            coordinates = self.coordinates[0].index_select(0, numbers)
            out.index_add_(0, coordinates, self.values[0].index_select(0, numbers) * weights)
            return
        weighted = (self.values * out.new_zeros(self.num_apart).index_add_(0, numbers, weights)).view(-1)
        if self.coordinates is not None:
            out.index_add_(0, self.coordinates.view(-1), weighted)
        else:
            out.add_(weighted[: self.num_parameters])
