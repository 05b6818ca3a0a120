"""Canaries as gradients that a mechanism can clip and add, without their zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpaudit.canaries import Directions

__all__ = ["CanaryRows", "CanaryVectors"]


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

    def project(self, vector: Tensor) -> Tensor:
        """The dot product of each canary's direction with ``vector``."""
        return (self.values * self._entries(vector)).sum(dim=0)

    def _entries(self, vector: Tensor) -> Tensor:
        """The entries of ``vector`` that the values stand on."""
        if self.coordinates is not None:
            return vector[self.coordinates]
        missing = self.values.numel() - vector.numel()
        return torch.nn.functional.pad(vector, (0, missing)).view_as(self.values)

    def add(self, weights: Tensor, out: Tensor) -> None:
        """Add each direction times its weight."""
        weighted = (self.values * weights).view(-1)
        if self.coordinates is not None:
            out.index_add_(0, self.coordinates.view(-1), weighted)
        else:
            out.add_(weighted[: self.num_parameters])


@dataclass(frozen=True, eq=False)
class CanaryRows:
    """Those canaries that are present, of ``length`` each."""

    vectors: CanaryVectors
    present: Tensor  # their numbers
    length: float

    def norms(self) -> Tensor:
        return torch.full(self.present.shape, self.length, device=self.present.device)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        all_weights = out.new_zeros(self.vectors.num_canaries)
        all_weights[self.present] = weights.to(out.dtype) * self.length
        self.vectors.add(all_weights, out)
