"""Random choices of an audit: which canaries are present in a step, and the directions of gradient canaries.

Each step has its own RNG, derived from the seed and the step number. So no RNG state is saved when a run is
interrupted, and several processes draw the same numbers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray
from dpaudit.canaries._gradients import Directions, GradientCanary, ParameterLayout
from dpaudit.errors import InputError

_COINS, _DIRECTIONS = 0, 1  # purposes of random streams
_FEWEST = 32  # entries of a data set; one side is then empty once in two billion runs
STEPS_AT_ONCE = 64  # whose coins are drawn together: creating an RNG takes longer than drawing for a step


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
        return self._coins(index)

    def _coins(self, index: int) -> BoolArray:
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
                f"Expected num_canaries={self.num_canaries} to be at least {_FEWEST} in an audit of "
                "the whole run: each canary is one observation, and some must be present and some absent."
            )
        # larger than any step number
        return self._coins(2**32 - 1)


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
            raise InputError(f"Expected canary to be a gradient canary such as Dirac(), got {self.canary!r}.")
        _validate.integer("num_canaries", self.num_canaries)

    def coins(self, index: int) -> BoolArray:
        """Return whether each canary is present in a step: a fair coin for each that may be."""
        coins, eligible = self._coins(index), self.canary.eligible(index, self.num_canaries)
        return coins if eligible is None else coins & eligible

    def direction_rng(self, index: int) -> np.random.Generator:
        """Return the RNG of a step's directions; steps with the same variant have the same."""
        return self.rng(self.canary.variant(index), _DIRECTIONS)

    def directions(self, index: int, layout: int | ParameterLayout) -> Directions:
        """Return the directions of a step's canaries; ``layout`` may be the number of parameters."""
        return self.canary.directions(
            self.num_canaries, layout, self.direction_rng(index), self.canary.variant(index)
        )
