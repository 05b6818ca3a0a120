"""Gradient canaries for Opacus: vectors of known direction and norm that are added to the sum of a step.

:meth:`GradientCanaries.added` passes them to the optimizer's own code, which clips them and adds them to
``p.summed_grad`` (``_clipping.py``). The :class:`CanaryProjection` that it returns scores the canaries in the
release. ``_observer.py`` calls both in each step and subtracts the canaries again. Input canaries are in
``_input_canaries.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._torch import CanaryVectors
from dpaudit._types import FloatArray, IntArray
from dpaudit.canaries import (
    CanaryCoins,
    CanaryPlan,
    Directions,
    GradientCanary,
    Mixture,
    ParameterLayout,
    SharedPlaces,
)
from dpaudit.errors import InputError
from dpaudit.observers.opacus._clipping import (
    CoordinateIndex,
    OpacusClip,
    StandIns,
    at_least_single,
    copied_sums,
    precision,
    summed,
)
from dpaudit.observers.opacus._prepared import PreparedTraining
from dpaudit.recording import ObservedCanaries

_MIN_NORM_SHARE = 0.85  # one of four layers with equal norms may be left out
_FULL_NORM_SHARE = 0.99
_MAX_ENTRIES = 2**20  # of a matrix of rows at the coordinates of all canaries
_CHUNK_ROWS = 160  # at which a matrix of one chunk takes as long as a call of the library for one layer


@dataclass(frozen=True, eq=False)
class CanaryProjection:
    """One direction per canary of a step, scaled by the largest clipped contribution of the canary."""

    index: CoordinateIndex
    """The coordinates that are read in this step: those of the canaries, and others to test the noise."""
    project: Callable[[Tensor], Tensor]
    """Return the component along each canary of a vector at the coordinates of the index."""
    others: Tensor | float = 0.0
    """The contribution of the other canaries along each one; zero if they are orthogonal."""
    lengths: FloatArray | None = None
    """The clipped length of each canary, in clipping norms; None if known before the first step."""


class StepCanaries(ABC):
    """Canaries that an observer adds to the sum of each step."""

    @property
    @abstractmethod
    def coins(self) -> CanaryCoins | CanaryPlan:
        """Which canaries are present in each step, unless a sampler draws them."""

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """What a recorder must know about these canaries."""

    @abstractmethod
    def index(self, index: int) -> CoordinateIndex:
        """Return the coordinates that are read in a step."""

    @abstractmethod
    def added(self, index: int, members: IntArray, before: Tensor) -> tuple[CanaryProjection, Tensor]:
        """Add the ``members``, by number, to the sum ``before`` with the library's own code.

        Sums are at the coordinates of the step; those of the optimizer stay as they are. Return the
        projection onto all canaries of the step, members or not, and the new sum.
        """


class GradientCanaries(StepCanaries):
    """Orthogonal gradients of known norm, drawn again only if the canaries move.

    Flat clipping does not change a canary's direction, but per-layer clipping does. With per-layer clipping a
    canary has a component in each layer with that layer's norm, so that the whole canary reaches the norm
    that the noise is calibrated to. ``sampled`` are further coordinates that are read in each step.
    """

    def __init__(
        self, training: PreparedTraining, plan: CanaryPlan, clip: OpacusClip, sampled: IntArray
    ) -> None:
        self._optimizer, self._plan, self._clip = training.optimizer, plan, clip
        self._layout, self._sampled = parameter_layout(training), sampled
        self._room = CanaryRoom(training.optimizer, plan.canary)
        self._drawn: dict[int, _PlacedCanaries] = {}
        self._placed(0)

    @property
    def coins(self) -> CanaryPlan:
        return self._plan

    @property
    def options(self) -> dict[str, Any]:
        eps, share = precision(self._optimizer.params), self._room.norm_share(self._plan.num_canaries)
        not_covered: tuple[str, ...] = ()
        if share < _FULL_NORM_SHARE:
            num_places = self._plan.num_canaries * self._plan.canary.places_per_canary
            not_covered = (
                f"layers with fewer than {num_places} parameters contain no canary: canaries reach only "
                f"{100 * share:.0f} % of the clipping norm",
            )
        observed = ObservedCanaries(
            self._plan.canary, self._directions, lambda: self._layout, lambda: eps, share
        )
        return {"reach": share, "not_covered": not_covered, "canaries": observed}

    def index(self, index: int) -> CoordinateIndex:
        return self._placed(index).index

    def added(self, index: int, members: IntArray, before: Tensor) -> tuple[CanaryProjection, Tensor]:
        placed, norms = self._placed(index), self._room.norms(self._plan.num_canaries)
        norm = float(self._optimizer.max_grad_norm) if norms is None else math.hypot(*norms)
        projection = CanaryProjection(placed.index, lambda vector: placed.project(vector) / norm)
        if not len(members):
            return projection, before
        lengths = norm * self._plan.canary.lengths(placed.directions)
        groups = placed.rows(np.sort(members), lengths)  # a sampler draws them in any order
        if self._clip.is_of_opacus:
            after = before.clone()
            for rows, columns in groups:
                sums = after.index_select(0, columns.positions)
                after.index_copy_(0, columns.positions, self._clip.add_rows(rows, sums, columns.stand_ins))
            return projection, after
        with copied_sums(self._optimizer):
            for rows, columns in groups:
                index_of_rows = CoordinateIndex(columns.coordinates, self._optimizer.params)
                self._clip.add_to_parameters(rows, index_of_rows)
            return projection, placed.index.read(summed(self._optimizer))

    def _directions(self, index: int) -> Directions:
        """Return the directions of the canaries of a step."""
        return self._placed(index).directions

    def _placed(self, index: int) -> _PlacedCanaries:
        """Place the canaries of a step, or return those of an earlier one with the same directions."""
        variant = self._plan.canary.variant(index)
        if variant in self._drawn:
            return self._drawn[variant]
        norms = self._room.norms(self._plan.num_canaries)
        if self._plan.canary.moving:
            self._drawn.clear()
        if norms is None:
            directions = self._plan.directions(index, self._layout)
        else:
            shares = np.asarray(norms) / math.hypot(*norms)
            directions = _layer_directions(self._plan, index, self._layout, shares)
        placed = self._drawn[variant] = _PlacedCanaries(directions, self._optimizer, self._sampled)
        return placed


class _Columns:
    """Coordinates of some canaries, and the stand-ins on which their rows are clipped."""

    def __init__(self, optimizer: DPOptimizer, coordinates: IntArray, index: CoordinateIndex) -> None:
        self._optimizer, self.coordinates = optimizer, coordinates
        device = optimizer.params[0].device
        self.positions = torch.as_tensor(index.positions(coordinates), device=device)

    @cached_property
    def stand_ins(self) -> StandIns:
        """Parameters that consist of these coordinates."""
        return StandIns(self._optimizer, CoordinateIndex(self.coordinates, self._optimizer.params))


class _PlacedCanaries:
    """The directions of a variant of canaries, at the coordinates that are read in its steps."""

    def __init__(self, directions: Directions, optimizer: DPOptimizer, sampled: IntArray) -> None:
        self.directions, self._optimizer = directions, optimizer
        self._like = at_least_single(optimizer.params[0].detach().new_empty(0))
        shared = directions.shared
        if directions.coordinates is None:
            self.index, compact = CoordinateIndex.complete(optimizer.params), directions
        else:
            coordinates = [directions.coordinates.reshape(-1), sampled]
            coordinates += [] if shared is None else [shared.places]
            self.index = CoordinateIndex(np.unique(np.concatenate(coordinates)), optimizer.params)
            compact = replace(
                directions,
                coordinates=self.index.positions(directions.coordinates),
                num_parameters=len(self.index),
                shared=shared and replace(shared, places=self.index.positions(shared.places)),
            )
        self._vectors = CanaryVectors.of(compact, self._like)
        self._apart = np.minimum(directions.explicit_coordinates, directions.num_parameters - 1)
        self._scaled: tuple[FloatArray, Tensor] | None = None
        self._shared = None if shared is None else _Columns(optimizer, shared.places, self.index)

    def project(self, vector: Tensor) -> Tensor:
        """Return the component of a vector, at the coordinates of the index, along each canary."""
        return self._vectors.project(vector.to(self._like.dtype))

    @cached_property
    def _all_apart(self) -> _Columns:
        """The coordinates of all canaries that share none with others."""
        return _Columns(self._optimizer, np.unique(self._apart), self.index)

    def rows(self, members: IntArray, lengths: FloatArray) -> Iterator[tuple[Tensor, _Columns]]:
        """Yield the gradients of ``members``, in increasing order, and the coordinates of their columns.

        ``lengths`` are those of all canaries.
        """
        first = int(np.searchsorted(members, self.directions.num_apart))
        apart, rest = members[:first], members[first:]
        if apart.size and apart.size * self._apart.size <= _MAX_ENTRIES:
            yield self._matrix(apart, lengths, self._all_apart), self._all_apart
        elif apart.size:  # few rows at a time, whose matrices have only their own columns
            num_layers = len(self._optimizer.params)
            size = max(1, round(_CHUNK_ROWS * math.sqrt(num_layers / len(self._apart))))
            for start in range(0, apart.size, size):
                chunk = apart[start : start + size]
                is_used = self.directions.values[:, chunk] != 0  # zeros are padding
                columns = _Columns(self._optimizer, np.unique(self._apart[:, chunk][is_used]), self.index)
                yield self._matrix(chunk, lengths, columns), columns
        if rest.size and self._shared is not None:
            numbers = torch.as_tensor(rest - self.directions.num_apart, device=self._like.device)
            yield self._shared_rows(lengths).index_select(0, numbers), self._shared

    def _shared_rows(self, lengths: FloatArray) -> Tensor:
        """Return the gradients of all canaries that share coordinates, computed again if lengths change."""
        assert self.directions.shared is not None
        wanted = lengths[self.directions.num_apart :]
        if self._scaled is None or not np.array_equal(self._scaled[0], wanted):
            self._scaled = wanted, self._tensor(self.directions.shared.values.T * wanted[:, None])
        return self._scaled[1]

    def _matrix(self, members: IntArray, lengths: FloatArray, columns: _Columns) -> Tensor:
        """Return the gradients of ``members``, which share no coordinates, at some columns."""
        values = self.directions.values[:, members] * lengths[members]
        entries, rows = np.nonzero(values)
        where = np.searchsorted(columns.coordinates, self._apart[:, members][entries, rows])
        matrix = self._like.new_zeros(len(members), columns.coordinates.size)
        flat = torch.as_tensor(rows * columns.coordinates.size + where, device=matrix.device)
        matrix.view(-1).index_copy_(0, flat, self._tensor(values[entries, rows]))
        return matrix

    def _tensor(self, values: FloatArray) -> Tensor:
        return torch.as_tensor(values, dtype=self._like.dtype, device=self._like.device)


def _layer_directions(
    draws: CanaryPlan, index: int, layout: ParameterLayout, shares: FloatArray
) -> Directions:
    """Draw canaries with a component in every layer whose share is not 0."""
    rng, variant, canary = draws.direction_rng(index), draws.canary.variant(index), draws.canary
    values, coordinates, places, codes = [], [], [], []
    starts = np.cumsum(layout.sizes) - layout.sizes
    for number, (start, share) in enumerate(zip(starts, shares, strict=True)):
        if share > 0:
            directions = canary.directions(draws.num_canaries, layout.only(number), rng, variant)
            values.append(share * directions.values)
            coordinates.append(start + _layer_coordinates(directions, int(layout.sizes[number])))
            if directions.shared is not None:
                places.append(start + directions.shared.places)
                codes.append(share * directions.shared.values)
    shared = SharedPlaces(np.concatenate(places), np.concatenate(codes)) if places else None
    labels = None if directions.labels is None else directions.labels.in_several_parameters()
    return Directions(
        np.concatenate(values),
        np.concatenate(coordinates),
        layout.num_parameters,
        shared=shared,
        lengths=directions.lengths,
        labels=labels,
    )


def _layer_coordinates(directions: Directions, size: int) -> IntArray:
    """Return the coordinates of the values in their layer; those of padding zeros are arbitrary."""
    if directions.coordinates is not None:
        return directions.coordinates
    return np.minimum(np.arange(directions.values.size).reshape(directions.values.shape), size - 1)


@dataclass(frozen=True, eq=False)
class CanaryRoom:
    """How many canaries the parameters of an optimizer have room for: each layer, if it clips layers.

    With per-layer clipping, canaries do not share parameters of a layer, and a layer without room for all of
    them contains none.
    """

    optimizer: DPOptimizer
    canary: GradientCanary

    @property
    def _layer_norms(self) -> list[float] | None:
        norms = getattr(self.optimizer, "max_grad_norms", None)
        return None if norms is None else list(map(float, norms))

    @cached_property
    def _places(self) -> list[int]:
        """The number of canaries for which each layer has room."""
        return [parameter.numel() // self.canary.places_per_canary for parameter in self.optimizer.params]

    def _in_all(self) -> int:
        num_parameters: int = sum(parameter.numel() for parameter in self.optimizer.params)
        return num_parameters // self.canary.places_per_canary

    def default_number(self, *, needs_full_rows: bool) -> int:
        """Return 1,024, or as many as fit in a smaller model; 64 if they are clipped as full rows.

        With per-layer clipping, they fit in every layer of at least 64 parameters.
        """
        few = 64  # canaries whose cost is small even as full rows
        limit = few if needs_full_rows else 1024
        if self._layer_norms is None:
            return max(1, min(limit, self._in_all()))
        large = [number for number in self._places if number >= few // self.canary.places_per_canary]
        return max(1, min(limit, min(large, default=max(self._places))))

    def default_number_of_entries(self) -> int:
        """Return the number that fits, at most 8,192, or fewer so that they reach enough layers."""
        limit, fewest = 8192, 32
        if self._layer_norms is None:
            return min(limit, self._in_all())
        counts = {min(limit, number) for number in self._places if number >= fewest}
        sufficient = (number for number in counts if self.norm_share(number) >= _MIN_NORM_SHARE)
        return max(sufficient, default=max(self._places))

    def norms(self, num_canaries: int) -> list[float] | None:
        """Return each layer's clipping norm, 0 if it has no room for all canaries; None if flat."""
        if self._layer_norms is None:
            return None
        if num_canaries > max(self._places):
            raise InputError(
                f"num_canaries must be at most {max(self._places)}, as many as the largest layer has room "
                f"for, got {num_canaries}: with per-layer clipping, canaries do not share parameters."
            )
        layers = zip(self._layer_norms, self._places, strict=True)
        return [norm if number >= num_canaries else 0.0 for norm, number in layers]

    def norm_share(self, num_canaries: int) -> float:
        """Return the fraction of the clipping norm that a canary reaches."""
        norms = self.norms(num_canaries)
        return 1.0 if norms is None else math.hypot(*norms) / math.hypot(*self._layer_norms or ())

    def require_norm_share(self, num_canaries: int) -> None:
        """Raise if whole-run scores cannot be compared with noise that is calibrated to the whole norm."""
        share = self.norm_share(num_canaries)
        if share < _MIN_NORM_SHARE:
            raise InputError(
                f"Canaries reach only layers with {100 * share:.0f} % of the clipping norm with "
                f"num_canaries={num_canaries}; at least {100 * _MIN_NORM_SHARE:.0f} % are needed. With "
                "per-layer clipping, a layer needs its own parameters for each canary. Pass fewer "
                "canaries, or audit single steps, without sampling=True."
            )


def planned(
    training: PreparedTraining,
    canary: GradientCanary,
    num_canaries: int | None,
    seed: int,
    clip: OpacusClip,
    *,
    sampling: bool,
) -> CanaryPlan:
    """Return the plan of gradient canaries, by default of as many as the model has room for."""
    if sampling and isinstance(canary, Mixture):  # all entries of a data set are long, and in every step
        canary = replace(canary, short=False)
    room = CanaryRoom(training.optimizer, canary)
    if num_canaries is None and sampling:
        num_canaries = room.default_number_of_entries()
    elif num_canaries is None:
        num_canaries = room.default_number(needs_full_rows=clip.needs_full_rows)
    plan = CanaryPlan(canary, num_canaries, seed)
    if sampling:
        room.require_norm_share(num_canaries)
    return plan


def parameter_layout(training: PreparedTraining) -> ParameterLayout:
    """Return the named parameters of the optimizer."""
    parameters, room_for_squares = training.optimizer.params, 16.0  # below the root of the largest number
    largest = min(torch.finfo(parameter.dtype).max for parameter in parameters)
    return ParameterLayout(
        tuple(training.names),
        tuple(tuple(value.shape) for value in parameters),
        math.sqrt(largest) / room_for_squares / float(training.optimizer.max_grad_norm),
    )
