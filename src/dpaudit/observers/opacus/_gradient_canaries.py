"""Gradient canaries for Opacus: vectors of known direction and norm that are added to the sum of a step.

:meth:`GradientCanaries.add_to_sum` passes them to the optimizer's own code, which clips them and adds them to
``p.summed_grad`` (``_clipping.py``). The :class:`CanaryProjection` that it returns scores the canaries in the
release. ``_observer.py`` calls both in each step and subtracts the canaries again. Input canaries are in
``_input_canaries.py``.
"""

from __future__ import annotations

import gc
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from dpaudit._torch import CanaryVectors, gradient_rows
from dpaudit._types import FloatArray, IntArray
from dpaudit.canaries import CanaryPlan, Directions, GradientCanary, ParameterLayout, SharedPlaces
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clipping import OpacusClip, at_least_single

_MIN_NORM_SHARE = 0.85  # one of four layers with equal norms may be left out
_FULL_NORM_SHARE = 0.99
_MIN_SAMPLED = 32  # canaries that are entries of a data set
_DEFAULT_NUM_CANARIES, _DEFAULT_NUM_SAMPLED = 1024, 8192  # if the model has at least as many parameters
_ROOM_FOR_SQUARES = 16.0  # between the square root of the largest number and the longest canary
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
    """Orthogonal gradients of known norm, drawn again only if the canaries move.

    Flat clipping does not change a canary's direction, but per-layer clipping does. With per-layer clipping a
    canary has a component in each layer with that layer's norm, so that the whole canary reaches the norm
    that the noise is calibrated to.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        draws: CanaryPlan,
        clip: OpacusClip,
        layout: ParameterLayout | None = None,
    ) -> None:
        self._optimizer, self._draws, self._clip = optimizer, draws, clip
        self._layout = parameter_layout(optimizer) if layout is None else layout
        self.num_canaries = draws.num_canaries
        self._drawn: dict[int, tuple[Directions, CanaryVectors]] = {}
        self._draw(0)

    def add_to_sum(self, index: int, members: IntArray, *, inserts: bool) -> CanaryProjection:
        directions, vectors = self._draw(index)
        norm, like = self._norm(), vectors.values
        if inserts and len(members):
            lengths = norm * self._draws.canary.lengths(directions)
            for rows in gradient_rows(directions, members, lengths, like):
                self._clip.add_canaries(rows)
        return ClippedCanaries(vectors, norm)

    def directions(self, index: int) -> Directions:
        """Return the directions of the canaries of a step."""
        return self._draw(index)[0]

    def _norm(self) -> float:
        """Return the current clipping norm over the layers in which canaries have a component."""
        norms = self._layer_norms()
        return float(self._optimizer.max_grad_norm) if norms is None else math.hypot(*norms)

    def _layer_norms(self) -> list[float] | None:
        count, canary = self._draws.num_canaries, self._draws.canary
        largest = max(_sizes(self._optimizer)) // canary.places_per_canary
        norms = _layer_norms(self._optimizer, count, canary)
        if norms is not None and count > largest:
            raise InputError(
                f"Expected num_canaries={count} to be at most {largest}, as many as the largest layer has "
                "room for: with per-layer clipping, canaries do not share parameters."
            )
        return norms

    def _draw(self, index: int) -> tuple[Directions, CanaryVectors]:
        """Draw the directions of a step, or return those of an earlier one with the same."""
        variant, norms = self._draws.canary.variant(index), self._layer_norms()
        if variant in self._drawn:
            return self._drawn[variant]
        if self._draws.canary.moving:
            self._drawn.clear()
        if norms is None:
            made = self._draws.directions(index, self._layout)
        else:
            made = _layer_directions(self._draws, index, self._layout, np.asarray(norms) / self._norm())
        found = made, CanaryVectors.of(made, at_least_single(self._optimizer.params[0].detach().new_empty(0)))
        self._drawn[variant] = found
        return found


@dataclass(frozen=True, eq=False)
class ClippedCanaries(CanaryProjection):
    """Unit vectors, and the norm to which clipping reduces a longer canary."""

    vectors: CanaryVectors
    norm: float

    def project(self, vector: Tensor) -> Tensor:
        return self.vectors.project(vector.to(self.vectors.values.dtype)) / self.norm


def _layer_directions(
    draws: CanaryPlan, index: int, layout: ParameterLayout, shares: FloatArray
) -> Directions:
    """Draw canaries with a component in every layer whose share is not 0."""
    rng, variant, canary = draws.direction_rng(index), draws.canary.variant(index), draws.canary
    values, coordinates, places, codes = [], [], [], []
    starts = np.cumsum(layout.sizes) - layout.sizes
    for number, (start, share) in enumerate(zip(starts, shares, strict=True)):
        if share > 0:
            part = canary.directions(draws.num_canaries, layout.only(number), rng, variant)
            values.append(share * part.values)
            coordinates.append(start + _layer_coordinates(part, int(layout.sizes[number])))
            if part.shared is not None:
                places.append(start + part.shared.places)
                codes.append(share * part.shared.values)
    shared = SharedPlaces(np.concatenate(places), np.concatenate(codes)) if places else None
    labels = None if part.labels is None else part.labels.in_several_parameters()
    return Directions(
        np.concatenate(values),
        np.concatenate(coordinates),
        layout.num_parameters,
        shared=shared,
        lengths=part.lengths,
        labels=labels,
    )


def _layer_coordinates(part: Directions, size: int) -> IntArray:
    """Return the coordinates of the values in their layer; those of padding zeros are arbitrary."""
    if part.coordinates is not None:
        return part.coordinates
    return np.minimum(np.arange(part.values.size).reshape(part.values.shape), size - 1)


def default_num_canaries(optimizer: DPOptimizer, clip: OpacusClip, canary: GradientCanary) -> int:
    """Return 1,024, or as many as fit in a smaller model; 64 if they are clipped as full rows.

    With per-layer clipping, they fit in every layer of at least 64 parameters.
    """
    limit = _FEW if clip.needs_full_rows else _DEFAULT_NUM_CANARIES
    rooms = _rooms(optimizer, canary)
    if not hasattr(optimizer, "max_grad_norms"):
        return max(1, min(limit, sum(_sizes(optimizer)) // canary.places_per_canary))
    fewest = _FEW // canary.places_per_canary
    return max(1, min(limit, min((room for room in rooms if room >= fewest), default=max(rooms))))


def default_num_sampled(optimizer: DPOptimizer, canary: GradientCanary) -> int:
    """Return the number of canaries that fit, at most 8,192, or fewer so that they reach enough layers."""
    rooms, limit = _rooms(optimizer, canary), _DEFAULT_NUM_SAMPLED
    if not hasattr(optimizer, "max_grad_norms"):
        return min(limit, sum(_sizes(optimizer)) // canary.places_per_canary)
    counts = {min(limit, room) for room in rooms if room >= _MIN_SAMPLED}
    return max((n for n in counts if norm_share(optimizer, n, canary) >= _MIN_NORM_SHARE), default=max(rooms))


def norm_share(optimizer: DPOptimizer, num_canaries: int, canary: GradientCanary) -> float:
    """Return the fraction of the clipping norm that a canary reaches without layers that are too small."""
    norms = _layer_norms(optimizer, num_canaries, canary)
    return 1.0 if norms is None else math.hypot(*norms) / math.hypot(*map(float, optimizer.max_grad_norms))


def check_norm_share(share: float, num_canaries: int) -> None:
    """Raise if the share is too small to compare whole-run scores with noise for the whole norm."""
    if share < _MIN_NORM_SHARE:
        raise InputError(
            f"Expected canaries to reach layers with {100 * _MIN_NORM_SHARE:.0f} % of the clipping norm, got "
            f"{100 * share:.0f} % with num_canaries={num_canaries}: with per-layer clipping, a layer needs "
            "its own parameters for each canary. Pass fewer canaries, or audit single steps, without "
            "sampling=True."
        )


def uncovered_layers(share: float, num_canaries: int, canary: GradientCanary) -> tuple[str, ...]:
    """Return the limitation to report if canaries do not reach some layers."""
    if share >= _FULL_NORM_SHARE:
        return ()
    return (
        f"layers with fewer than {num_canaries * canary.places_per_canary} parameters contain no canary: "
        "canaries reach only "
        f"{100 * share:.0f} % of the clipping norm",
    )


def _layer_norms(optimizer: DPOptimizer, num_canaries: int, canary: GradientCanary) -> list[float] | None:
    """Return each layer's clipping norm, 0 if it has no room for all canaries; None if flat."""
    norms = getattr(optimizer, "max_grad_norms", None)
    if norms is None:
        return None
    layers = zip(norms, _rooms(optimizer, canary), strict=True)
    return [float(norm) if room >= num_canaries else 0.0 for norm, room in layers]


def _rooms(optimizer: DPOptimizer, canary: GradientCanary) -> list[int]:
    """Return the number of canaries for which each layer has room."""
    return [size // canary.places_per_canary for size in _sizes(optimizer)]


def parameter_layout(optimizer: DPOptimizer, module: Any = None) -> ParameterLayout:
    """Return the named parameters of the optimizer; names are those in ``module``, if it has them."""
    known = {} if module is None else {id(value): name for name, value in module.named_parameters()}
    parameters = optimizer.params
    names = [known.get(id(value), f"parameter {i}") for i, value in enumerate(parameters)]
    largest = min(torch.finfo(parameter.dtype).max for parameter in parameters)
    return ParameterLayout(
        tuple(name.removeprefix("_module.") for name in names),
        tuple(tuple(value.shape) for value in parameters),
        math.sqrt(largest) / _ROOM_FOR_SQUARES / float(optimizer.max_grad_norm),
    )


def owning_module(optimizer: DPOptimizer) -> nn.Module | None:
    """Return the model of the parameters, if it is in memory: the optimizer has no reference to it."""
    wanted, found = {id(value) for value in optimizer.params}, None
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, nn.Module)}  # a million objects
    for candidate in (one for one in objects if type(one) in kinds):
        if wanted <= {id(value) for value in candidate.parameters()}:
            is_plain = not isinstance(candidate, AbstractGradSampleModule)  # the one that computes gradients
            key = is_plain, sum(1 for _ in candidate.modules()), id(candidate)
            found = min((*key, candidate), found or (True, math.inf, 0, None))
    return None if found is None else found[3]


def _sizes(optimizer: DPOptimizer) -> list[int]:
    return [parameter.numel() for parameter in optimizer.params]
