"""Where the canaries of a step are looked for in what it releases.

Gradient canaries: rows that join the optimizer's own clipping and sum. Where the canaries of a step point,
and how far clipping lets them reach.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._torch import CanaryVectors
from dpaudit._types import FloatArray, IntArray
from dpaudit.canaries import Directions, Draws
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clipping import Clip


class Look(ABC):
    """One direction for each canary, in units of what the canary may add to the sum."""

    reach: float
    """What one example may add, where the canaries are."""

    @abstractmethod
    def project(self, vector: Tensor) -> Tensor:
        """How much of each canary is in ``vector``: 1 if it is the canary itself."""

    @property
    def others(self) -> Tensor | float:
        """How much the other canaries of the step are along each; nothing, if they are orthogonal."""
        return 0.0


class Canaries(ABC):
    """What joins the steps of an optimizer."""

    num_canaries: int

    @abstractmethod
    def join(self, index: int, numbers: IntArray, *, inserts: bool) -> Look:
        """Let those with these numbers join ``p.summed_grad`` by the library's own code, if it ``inserts``.

        Returns where all of them are to be looked for.
        """


_ENOUGH = 0.85  # of the norm: of four layers with equal norms, one may be left out
_ALL = 0.99
_FEWEST = 32  # canaries that are entries of a data set


def most_canaries(optimizer: DPOptimizer, most: int) -> int:
    """As many as fit, but ``most``: into the model, or where layers are clipped alone, into the largest."""
    sizes: list[int] = [parameter.numel() for parameter in optimizer.params]
    return min(most, max(sizes) if hasattr(optimizer, "max_grad_norms") else sum(sizes))


def usual_canaries(optimizer: DPOptimizer, most: int) -> int:
    """As many as there are parameters, but ``most``; fewer if else layers that are clipped are left out."""
    sizes: list[int] = [parameter.numel() for parameter in optimizer.params]
    if not hasattr(optimizer, "max_grad_norms"):
        return min(most, sum(sizes))
    counts = {min(most, size) for size in sizes if size >= _FEWEST}
    return max((count for count in counts if reached(optimizer, count) >= _ENOUGH), default=max(sizes))


def reached(optimizer: DPOptimizer, num_canaries: int) -> float:
    """The share of the clipping norm that a canary has; layers with too few parameters are left out."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        return 1.0
    layers = zip(optimizer.params, norms, strict=True)
    used = [float(norm) for parameter, norm in layers if parameter.numel() >= num_canaries]
    return math.hypot(*used) / math.hypot(*map(float, norms))


def require_reach(reach: float, num_canaries: int) -> None:
    """Scores of a whole run are compared with the noise, which is made for the whole norm."""
    if reach < _ENOUGH:
        raise InputError(
            f"Expected canaries to have parts in layers with {_ENOUGH:.0%} of the clipping norm, got "
            f"{reach:.0%} with num_canaries={num_canaries}: a layer that is clipped by itself needs a "
            "parameter for each canary. Pass fewer canaries, or audit single steps, without sampling=True."
        )


def left_out(reach: float, num_canaries: int) -> tuple[str, ...]:
    """What a result has to say if layers are left out."""
    if reach >= _ALL:
        return ()
    return (
        f"layers with fewer than {num_canaries} parameters have no part of a canary: canaries reach "
        f"{reach:.0%} of the clipping norm, so that a fault has to be larger than the power says",
    )


@dataclass(frozen=True, eq=False)
class Aim(Look):
    """Unit vectors, and the norm that each has after clipping if it was longer before."""

    vectors: CanaryVectors
    reach: float

    def project(self, vector: Tensor) -> Tensor:
        return self.vectors.project(vector) / self.reach


class Aims:
    """The aim of every step; it is found anew only if the canaries move.

    Flat clipping leaves a canary's direction alone. Clipping of each layer by a norm of its own does not:
    there a canary has a part in each layer, of that layer's norm, so that all of them together reach the
    norm that the noise is made for.
    """

    def __init__(self, optimizer: DPOptimizer, draws: Draws) -> None:
        self._optimizer, self._draws = optimizer, draws
        self._index = -1
        self._vectors = self._find(0)

    def at(self, index: int) -> Aim:
        """The aim of one step, at the clipping norm of this moment."""
        if self._draws.canary.moving and index != self._index:
            self._index, self._vectors = index, self._find(index)
        return Aim(self._vectors, self._reach())

    @property
    def _norms(self) -> list[float] | None:
        norms = getattr(self._optimizer, "max_grad_norms", None)
        return None if norms is None else [float(norm) for norm in norms]

    @property
    def _sizes(self) -> list[int]:
        return [parameter.numel() for parameter in self._optimizer.params]

    def _used(self, norms: list[float]) -> list[float]:
        """The norms of the layers, 0 where a layer has too few parameters for a canary each."""
        enough = [size >= self._draws.num_canaries for size in self._sizes]
        if not any(enough):
            raise InputError(
                f"Expected num_canaries={self._draws.num_canaries} to be at most {max(self._sizes)}, the "
                "size of the largest layer: with clipping of each layer, canaries do not share any parameter."
            )
        return [norm if ok else 0.0 for norm, ok in zip(norms, enough, strict=True)]

    def _reach(self) -> float:
        if self._norms is None:
            return float(self._optimizer.max_grad_norm)
        return math.hypot(*self._used(self._norms))

    def _find(self, index: int) -> CanaryVectors:
        like = self._optimizer.params[0].detach()
        if self._norms is None:
            return CanaryVectors.of(self._draws.directions(index, sum(self._sizes)), like)
        shares = np.asarray(self._used(self._norms)) / self._reach()
        return CanaryVectors.of(_by_layer(self._draws, index, self._sizes, shares), like)


def _by_layer(draws: Draws, index: int, sizes: list[int], shares: FloatArray) -> Directions:
    """Canaries with a part in every layer whose share is not 0."""
    rng = draws.direction_rng(index)
    values, places = [], []
    for start, size, share in zip(np.cumsum([0, *sizes]), sizes, shares, strict=False):
        if share > 0:
            part = draws.canary.directions(draws.num_canaries, size, rng)
            values.append(share * part.values)
            places.append(start + _inside(part, size))
    return Directions(np.concatenate(values), np.concatenate(places), sum(sizes))


def _inside(part: Directions, size: int) -> IntArray:
    """Places of the values in their layer; the zeros that fill up the last row go to any."""
    if part.coordinates is not None:
        return part.coordinates
    return np.minimum(np.arange(part.values.size).reshape(part.values.shape), size - 1)


_AT_ONCE = 2**24  # numbers of canaries' gradients that are in memory together


class GradientCanaries(Canaries):
    """Orthogonal directions of a length that is known."""

    def __init__(self, optimizer: DPOptimizer, draws: Draws, clip: Clip) -> None:
        self._draws, self._clip = draws, clip
        self._aims = Aims(optimizer, draws)
        self.num_canaries = draws.num_canaries

    def join(self, index: int, numbers: IntArray, *, inserts: bool) -> Look:
        aim = self._aims.at(index)
        length = self._draws.canary.scale * aim.reach
        if inserts:
            for some in _chunks(numbers, aim):
                self._clip.add(aim.vectors.rows(some, length))
        return aim


def _chunks(numbers: IntArray, aim: Aim) -> Iterator[Tensor]:
    """The numbers of the canaries that join, as many at once as fit."""
    all_of_them = torch.as_tensor(numbers, device=aim.vectors.values.device)
    most = max(1, _AT_ONCE // aim.vectors.num_parameters)
    return (all_of_them[start : start + most] for start in range(0, len(numbers), most))
