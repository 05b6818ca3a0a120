"""Gradient canaries for Opacus: vectors of known direction and norm that are added to the sum of a step.

:meth:`GradientCanaries.add_to_sum` passes them to the optimizer's own code, which clips them and adds them to
``p.summed_grad`` (``_clipping.py``). The :class:`CanaryProjection` that it returns scores the canaries in the
release. ``_observer.py`` calls both in each step and subtracts the canaries again. Input canaries are in
``_input_canaries.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._torch import CanaryVectors, SparseRows
from dpaudit._types import FloatArray, IntArray
from dpaudit.canaries import Directions, Draws
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clipping import OpacusClip

_MIN_NORM_SHARE = 0.85  # one of four layers with equal norms may be left out
_FULL_NORM_SHARE = 0.99
_MIN_SAMPLED = 32  # canaries that are entries of a data set
_DEFAULT_NUM_CANARIES, _DEFAULT_NUM_SAMPLED = 1024, 8192  # if the model has at least as many parameters
_FEW = 64  # canaries whose cost is small even as full rows


class CanaryProjection(ABC):
    """One direction per canary of a step, scaled by the largest clipped contribution of the canary."""

    norm: float
    """The largest norm of a clipped example along the canaries."""
    others: Tensor | float = 0.0
    """The contribution of the other canaries along each one; zero if they are orthogonal."""

    @property
    def lengths(self) -> FloatArray | None:
        """The clipped length of each canary, in clipping norms; None if known before the first step."""
        return None

    @abstractmethod
    def project(self, vector: Tensor) -> Tensor:
        """Return the component of ``vector`` along each canary: 1 if it is the canary itself."""


class StepCanaries(ABC):
    """Canaries that an observer adds to the sum of each step."""

    num_canaries: int

    @abstractmethod
    def add_to_sum(self, index: int, members: IntArray, *, inserts: bool) -> CanaryProjection:
        """Add the ``members``, by number, to ``p.summed_grad`` with the library's own code.

        If ``inserts`` is false, another rank adds them. Return the projection onto all canaries of the step,
        members or not.
        """


class GradientCanaries(StepCanaries):
    """Orthogonal gradients of known norm, redrawn in each step only if the canaries move.

    Flat clipping does not change a canary's direction, but per-layer clipping does. With per-layer clipping a
    canary has a component in each layer with that layer's norm, so that the whole canary reaches the norm
    that the noise is calibrated to.
    """

    def __init__(self, optimizer: DPOptimizer, draws: Draws, clip: OpacusClip) -> None:
        self._optimizer, self._draws, self._clip = optimizer, draws, clip
        self.num_canaries = draws.num_canaries
        self._draw(0)

    def add_to_sum(self, index: int, members: IntArray, *, inserts: bool) -> CanaryProjection:
        if self._draws.canary.moving and index != self._index:
            self._draw(index)
        norm, like = self._norm(), self._optimizer.params[0].detach()
        if inserts and len(members):
            length = self._draws.canary.scale * norm
            self._clip.add_canaries(SparseRows.of(self._directions, members, length, like))
        return ClippedCanaries(self._vectors, norm)

    def _norm(self) -> float:
        """Return the current clipping norm over the layers in which canaries have a component."""
        norms = self._layer_norms()
        return float(self._optimizer.max_grad_norm) if norms is None else math.hypot(*norms)

    def _layer_norms(self) -> list[float] | None:
        count, largest = self._draws.num_canaries, max(_sizes(self._optimizer))
        norms = _layer_norms(self._optimizer, count)
        if norms is not None and count > largest:
            raise InputError(
                f"Expected num_canaries={count} to be at most {largest}, the size of the largest layer: with "
                "per-layer clipping, canaries do not share parameters."
            )
        return norms

    def _draw(self, index: int) -> None:
        """Draw the directions of a step."""
        sizes, norms = _sizes(self._optimizer), self._layer_norms()
        if norms is None:
            self._directions = self._draws.directions(index, sum(sizes))
        else:
            shares = np.asarray(norms) / self._norm()
            self._directions = _layer_directions(self._draws, index, sizes, shares)
        self._index = index
        self._vectors = CanaryVectors.of(self._directions, self._optimizer.params[0].detach())


@dataclass(frozen=True, eq=False)
class ClippedCanaries(CanaryProjection):
    """Unit vectors, and the norm to which clipping reduces a longer canary."""

    vectors: CanaryVectors
    norm: float

    def project(self, vector: Tensor) -> Tensor:
        return self.vectors.project(vector) / self.norm


def _layer_directions(draws: Draws, index: int, sizes: list[int], shares: FloatArray) -> Directions:
    """Draw canaries with a component in every layer whose share is not 0."""
    rng = draws.direction_rng(index)
    values, coordinates = [], []
    for start, size, share in zip(np.cumsum([0, *sizes]), sizes, shares, strict=False):
        if share > 0:
            part = draws.canary.directions(draws.num_canaries, size, rng)
            values.append(share * part.values)
            coordinates.append(start + _layer_coordinates(part, size))
    return Directions(np.concatenate(values), np.concatenate(coordinates), sum(sizes))


def _layer_coordinates(part: Directions, size: int) -> IntArray:
    """Return the coordinates of the values in their layer; those of padding zeros are arbitrary."""
    if part.coordinates is not None:
        return part.coordinates
    return np.minimum(np.arange(part.values.size).reshape(part.values.shape), size - 1)


def default_num_canaries(optimizer: DPOptimizer, clip: OpacusClip) -> int:
    """Return 1,024, or as many as fit in a smaller model; 64 if they are clipped as full rows.

    With per-layer clipping, they fit in every layer of at least 64 parameters.
    """
    limit, sizes = _FEW if clip.needs_full_rows else _DEFAULT_NUM_CANARIES, _sizes(optimizer)
    if not hasattr(optimizer, "max_grad_norms"):
        return min(limit, sum(sizes))
    return min(limit, min((size for size in sizes if size >= _FEW), default=max(sizes)))


def default_num_sampled(optimizer: DPOptimizer) -> int:
    """Return the number of parameters, at most 8,192, or fewer so that canaries reach enough layers."""
    sizes, limit = _sizes(optimizer), _DEFAULT_NUM_SAMPLED
    if not hasattr(optimizer, "max_grad_norms"):
        return min(limit, sum(sizes))
    counts = {min(limit, size) for size in sizes if size >= _MIN_SAMPLED}
    return max((n for n in counts if norm_share(optimizer, n) >= _MIN_NORM_SHARE), default=max(sizes))


def norm_share(optimizer: DPOptimizer, num_canaries: int) -> float:
    """Return the fraction of the clipping norm that a canary reaches without layers that are too small."""
    norms = _layer_norms(optimizer, num_canaries)
    return 1.0 if norms is None else math.hypot(*norms) / math.hypot(*map(float, optimizer.max_grad_norms))


def check_norm_share(share: float, num_canaries: int) -> None:
    """Raise if the share is too small to compare whole-run scores with noise for the whole norm."""
    if share < _MIN_NORM_SHARE:
        raise InputError(
            f"Expected canaries to reach layers with {100 * _MIN_NORM_SHARE:.0f} % of the clipping norm, got "
            f"{100 * share:.0f} % with num_canaries={num_canaries}: with per-layer clipping, a layer needs "
            "one parameter per canary. Pass fewer canaries, or audit single steps, without sampling=True."
        )


def uncovered_layers(share: float, num_canaries: int) -> tuple[str, ...]:
    """Return the limitation to report if canaries do not reach some layers."""
    if share >= _FULL_NORM_SHARE:
        return ()
    return (
        f"layers with fewer than {num_canaries} parameters contain no canary: canaries reach only "
        f"{100 * share:.0f} % of the clipping norm",
    )


def _layer_norms(optimizer: DPOptimizer, num_canaries: int) -> list[float] | None:
    """Return each layer's clipping norm, 0 if it has fewer parameters than canaries; None if flat."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        return None
    layers = zip(norms, _sizes(optimizer), strict=True)
    return [float(norm) if size >= num_canaries else 0.0 for norm, size in layers]


def _sizes(optimizer: DPOptimizer) -> list[int]:
    return [parameter.numel() for parameter in optimizer.params]
