"""Canaries as vectors of torch, without their zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpaudit.canaries import Directions

__all__ = ["CanaryVectors"]


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
