"""Gradient canaries: gradients that an audit inserts into a DP-SGD step, their directions, and their coins.

Each step has its own RNG, derived from the seed and the step number. So no RNG state is saved when a run is
interrupted, and several processes draw the same numbers.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.errors import InputError, quoted

_COINS, _DIRECTIONS = 0, 1  # purposes of random streams
_FEWEST = 32  # entries of a data set; one side is then empty once in two billion runs
STEPS_AT_ONCE = 64  # whose coins are drawn together: creating an RNG takes longer than drawing for a step


@dataclass(frozen=True)
class ParameterLayout:
    """The named parameter tensors of a model in the order of a flat gradient.

    ``largest`` is the largest length of a canary that its data type can represent, in clipping norms.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    largest: float = math.inf

    @classmethod
    def of(cls, sizes: Sequence[int] | Mapping[str, int]) -> ParameterLayout:
        """Return the layout of vectors with these sizes, with their names if they have any."""
        try:
            named = sizes if isinstance(sizes, Mapping) else {str(i): size for i, size in enumerate(sizes)}
        except TypeError as error:
            raise InputError(f"The layout must be the sizes of parameters, got {quoted(sizes)}.") from error
        whole = (_validate.integer(f"the size of parameter {quoted(n)}", s, low=0) for n, s in named.items())
        return cls(tuple(named), tuple((size,) for size in whole))

    def only(self, number: int) -> ParameterLayout:
        """Return the layout of a single parameter."""
        return ParameterLayout((self.names[number],), (self.shapes[number],), self.largest)

    @property
    def sizes(self) -> IntArray:
        """The number of entries of each parameter."""
        return np.array([math.prod(shape) for shape in self.shapes], dtype=np.int64)

    @property
    def num_parameters(self) -> int:
        """The number of entries of a gradient."""
        return int(self.sizes.sum())


@dataclass(frozen=True, eq=False)
class SharedPlaces:
    """Unit vectors on the same coordinates, orthogonal because of their signs."""

    places: IntArray
    """The coordinates, in increasing order."""
    values: FloatArray
    """Places x canaries."""


@dataclass(frozen=True, eq=False)
class CanaryLabels:
    """What distinguishes the canaries of a step, for a table of what arrives of them."""

    shapes: IntArray
    """The index of each canary's shape in :data:`SHAPES`."""
    parameters: IntArray
    """The index of the named parameter that contains each canary; -1 if there are several."""

    def in_several_parameters(self) -> CanaryLabels:
        """Return the labels of canaries that are in several parameters each."""
        return CanaryLabels(self.shapes, np.full_like(self.parameters, -1))


SHAPES = ("single", "dense", "block", "row")


@dataclass(frozen=True, eq=False)
class Directions:
    """Orthogonal unit vectors, one per canary.

    Only nonzero coordinates and some padding zeros are stored: at most twice as many numbers as the model
    has parameters, for any number of canaries. Vectors do not share a coordinate, except those in ``shared``.
    """

    values: FloatArray
    """Entries x canaries. Each column is a vector without its zeros, except for padding."""
    coordinates: IntArray | None
    """The coordinate of each value; if None, the values cover all parameters in row-major order."""
    num_parameters: int
    shared: SharedPlaces | None = None
    """Further canaries, which are numbered after those in ``values``."""
    lengths: FloatArray | None = None
    """The norm of each canary before clipping, in clipping norms; None if all have the canary's scale."""
    labels: CanaryLabels | None = None

    @property
    def num_canaries(self) -> int:
        """The number of directions."""
        return self.num_apart + (0 if self.shared is None else int(self.shared.values.shape[1]))

    @property
    def num_apart(self) -> int:
        """The number of directions that share no coordinate with any other; they come first."""
        return int(self.values.shape[1])

    def dense(self) -> FloatArray:
        """Return the full matrix, canaries x parameters."""
        full = np.zeros((self.num_canaries, self.num_parameters))
        coordinates = self.explicit_coordinates
        inside = coordinates < self.num_parameters
        canaries = np.broadcast_to(np.arange(self.num_apart), coordinates.shape)
        np.add.at(full, (canaries[inside], coordinates[inside]), self.values[inside])
        if self.shared is not None:
            full[self.num_apart :, self.shared.places] = self.shared.values.T
        return full

    def project(self, vector: FloatArray) -> FloatArray:
        """Return the dot product of each direction with ``vector``."""
        # padding is zero, so its coordinates do not matter
        coordinates = np.minimum(self.explicit_coordinates, self.num_parameters - 1)
        products: FloatArray = (self.values * vector[coordinates]).sum(axis=0)
        if self.shared is not None:
            products = np.concatenate([products, vector[self.shared.places] @ self.shared.values])
        return products

    def weighted_sum(self, weights: FloatArray) -> FloatArray:
        """Return the sum of all directions, each times its weight."""
        weighted: FloatArray = (self.values * weights[: self.num_apart]).reshape(-1)
        if self.coordinates is None:
            return weighted[: self.num_parameters]
        total = np.bincount(self.coordinates.reshape(-1), weighted, self.num_parameters).astype(np.float64)
        if self.shared is not None:
            total[self.shared.places] += self.shared.values @ weights[self.num_apart :]
        return total

    @property
    def explicit_coordinates(self) -> IntArray:
        """The coordinate of each value; those of padding may exceed the last parameter."""
        if self.coordinates is not None:
            return self.coordinates
        return np.arange(self.values.size).reshape(self.values.shape)

    def padded(self) -> tuple[FloatArray, IntArray]:
        """Return values and coordinates (entries x canaries) of all canaries, padded with zeros."""
        coordinates = np.minimum(self.explicit_coordinates, self.num_parameters - 1)
        if self.shared is None:
            return self.values, coordinates
        shared, places = self.shared.values, self.shared.places
        size = max(len(self.values), len(places))
        values, where = np.zeros((size, self.num_canaries)), np.zeros((size, self.num_canaries), np.int64)
        apart = slice(self.num_apart)
        values[: len(self.values), apart], where[: len(coordinates), apart] = self.values, coordinates
        values[: len(places), self.num_apart :] = shared
        where[: len(places), self.num_apart :] = places[:, None]
        return values, where


@dataclass(frozen=True)
class GradientCanary(ABC):
    """A gradient with norm ``scale`` times the clipping norm, in a new direction in each step if ``moving``.

    By default it exceeds the clipping norm, so that missing or late clipping is detected. A shorter one
    scores less than 1 and reveals less. Canaries of one step are orthogonal.
    """

    scale: float = 10.0
    moving: bool = False

    def __post_init__(self) -> None:
        _validate.positive("scale", self.scale)

    def directions(
        self,
        num_canaries: int,
        layout: int | ParameterLayout,
        rng: np.random.Generator,
        variant: int = 0,
    ) -> Directions:
        """Return unit vectors for ``num_canaries`` canaries of a model with this number of parameters."""
        named = ParameterLayout.of([layout]) if isinstance(layout, int) else layout
        num_parameters = named.num_parameters
        if _validate.integer("num_canaries", num_canaries) > num_parameters:
            raise InputError(
                f"num_canaries must be at most {num_parameters}, the number of model parameters, got "
                f"{num_canaries}: canaries of one step do not share any."
            )
        return self._placed(num_canaries, named, rng, variant)

    def _placed(
        self,
        num_canaries: int,
        layout: ParameterLayout,
        rng: np.random.Generator,
        variant: int,  # noqa: ARG002
    ) -> Directions:
        return self._directions(num_canaries, layout.num_parameters, rng)

    @abstractmethod
    def _directions(self, num_canaries: int, num_parameters: int, rng: np.random.Generator) -> Directions: ...

    def lengths(self, directions: Directions) -> FloatArray:
        """Return the norm of each canary in clipping norms, before clipping."""
        lengths = directions.lengths
        return np.full(directions.num_canaries, self.scale) if lengths is None else lengths

    @property
    def places_per_canary(self) -> int:
        """How many parameters a model needs for each canary, so that all shapes fit."""
        return 1

    @property
    def num_variants(self) -> int:
        """How many sets of directions there are, which steps take in turn unless the canary moves."""
        return 1

    def variant(self, index: int) -> int:
        """Return the number of the directions in step ``index``; equal numbers have equal directions."""
        return index if self.moving else index % self.num_variants

    def num_excluded(self, num_canaries: int) -> int:  # noqa: ARG002
        """Return how many canaries, the last ones, are too short to count for the bound."""
        return 0

    def is_counted(self, index: int) -> bool:  # noqa: ARG002
        """Return whether the scores of step ``index`` count for the bound."""
        return True

    def num_counted(self, num_steps: int) -> int:
        """Return how many of the first steps count for the bound."""
        if type(self).is_counted is GradientCanary.is_counted:
            return num_steps
        return sum(map(self.is_counted, range(num_steps)))

    def eligible(self, index: int, num_canaries: int) -> BoolArray | None:  # noqa: ARG002
        """Return which canaries may be present in step ``index``; None if all may."""
        return None


@dataclass(frozen=True)
class Dirac(GradientCanary):
    """The whole gradient on one coordinate, drawn at random.

    >>> rng = np.random.default_rng(0)
    >>> Dirac().directions(2, 5, rng).dense()
    array([[0., 0., 0., 1., 0.],
           [0., 0., 0., 0., 1.]])
    """

    def _directions(self, num_canaries: int, num_parameters: int, rng: np.random.Generator) -> Directions:
        chosen = rng.choice(num_parameters, num_canaries, replace=False, shuffle=False)
        return Directions(np.ones((1, num_canaries)), np.sort(chosen)[None, :], num_parameters)


@dataclass(frozen=True)
class Constant(GradientCanary):
    """The same value on all coordinates, which several canaries divide among themselves.

    If moving, it changes its sign at random.

    >>> np.abs(Constant().directions(2, 6, np.random.default_rng(0)).dense()).round(2)
    array([[0.58, 0.  , 0.58, 0.  , 0.58, 0.  ],
           [0.  , 0.58, 0.  , 0.58, 0.  , 0.58]])
    """

    def _directions(self, num_canaries: int, num_parameters: int, rng: np.random.Generator) -> Directions:
        signs = rng.integers(0, 2, num_canaries) * 2.0 - 1.0
        rows = math.ceil(num_parameters / num_canaries)
        return _interleaved(np.broadcast_to(signs, (rows, num_canaries)), num_parameters)


@dataclass(frozen=True)
class RandomDirection(GradientCanary):
    """Uniform over all directions; several canaries divide the coordinates among themselves.

    >>> found = RandomDirection().directions(3, 9, np.random.default_rng(0)).dense()
    >>> bool(np.allclose(found @ found.T, np.eye(3)))
    True
    """

    def _directions(self, num_canaries: int, num_parameters: int, rng: np.random.Generator) -> Directions:
        rows = math.ceil(num_parameters / num_canaries)
        return _interleaved(rng.standard_normal((rows, num_canaries), dtype=np.float32), num_parameters)


def _interleaved(values: np.ndarray, num_parameters: int) -> Directions:
    """Assign parameters to canaries round-robin, so that each canary reaches every layer."""
    filled = np.array(values, dtype=np.float32, order="C")  # so that reshape below returns a view
    filled.reshape(-1)[num_parameters:] = 0.0
    norms = np.sqrt(np.einsum("rc,rc->c", filled, filled, dtype=np.float64))
    return Directions(filled / norms, None, num_parameters)


def fresh_seed(seed: int | None) -> int:
    """Return the given seed, or a random one from the operating system."""
    return secrets.randbits(128) if seed is None else _validate.integer("seed", seed, low=0)


class _StepRandomness:
    """The random streams of canaries of any kind."""

    num_canaries: int
    seed: int
    _drawn: dict[int, BoolArray]

    def rng(self, index: int, purpose: int = _COINS) -> np.random.Generator:
        """Return the RNG of one step, or of anything else numbered by ``index``."""
        # a spawn key: a plain list that ends in zeros would equal the seed of the training run
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(0x617564, purpose, index)))

    def coins(self, index: int) -> BoolArray:
        """Return whether each canary is present in a step: one fair coin per canary."""
        block, offset = divmod(index, STEPS_AT_ONCE)
        if self._drawn.get(block) is None:
            self._drawn.clear()
            shape = (STEPS_AT_ONCE, self.num_canaries)
            self._drawn[block] = self.rng(block).integers(0, 2, shape, dtype=np.bool_)
        coins: BoolArray = self._drawn[block][offset]
        return coins

    def entries(self) -> BoolArray:
        """Return whether each canary is an entry of the data set in all steps: one fair coin per canary."""
        if self.num_canaries < _FEWEST:
            raise InputError(
                f"num_canaries must be at least {_FEWEST} in an audit of the whole run, got "
                f"{self.num_canaries}: each canary is one observation, and some must be present and some "
                "absent."
            )
        # larger than any step number
        return _StepRandomness.coins(self, 2**32 - 1)


@dataclass(frozen=True)
class CanaryCoins(_StepRandomness):
    """The coins of input canaries, whose directions are given by their gradients."""

    num_canaries: int
    seed: int
    _drawn: dict[int, BoolArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate.integer("num_canaries", self.num_canaries)


@dataclass(frozen=True)
class CanaryPlan(_StepRandomness):
    """The presence and the directions of gradient canaries."""

    canary: GradientCanary
    num_canaries: int
    seed: int
    _drawn: dict[int, BoolArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.canary, GradientCanary):
            raise InputError(f"canary must be a gradient canary such as Dirac(), got {self.canary!r}.")
        _validate.integer("num_canaries", self.num_canaries)

    def coins(self, index: int) -> BoolArray:
        """Return whether each canary is present in a step: a fair coin for each that may be."""
        coins, eligible = super().coins(index), self.canary.eligible(index, self.num_canaries)
        return coins if eligible is None else coins & eligible

    def direction_rng(self, index: int) -> np.random.Generator:
        """Return the RNG of a step's directions; steps with the same variant have the same."""
        return self.rng(self.canary.variant(index), _DIRECTIONS)

    def directions(self, index: int, layout: int | ParameterLayout) -> Directions:
        """Return the directions of a step's canaries; ``layout`` may be the number of parameters."""
        return self.canary.directions(
            self.num_canaries, layout, self.direction_rng(index), self.canary.variant(index)
        )
