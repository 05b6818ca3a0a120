"""Random choices of an audit: which canaries are present in a step, and where gradient canaries point.

Each step has an RNG of its own, from the seed and the step's number. So no RNG state is kept when a run is
interrupted, and several processes draw the same.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray
from dpaudit.canaries._gradients import Directions, GradientCanary
from dpaudit.errors import InputError

_AUDIT = 0x617564  # separates the audit's random streams from the training's, also if both have the same seed
_COINS, _DIRECTIONS = 0, 1  # purposes of random streams
_WHOLE_RUN = 2**32 - 1  # the number of no step
_FEWEST = 32  # entries of a data set: then one side is empty once in two billion runs
_AT_ONCE = 64  # steps whose coins are drawn together: a new generator takes longer than the coins of a step


def fresh_seed(seed: int | None) -> int:
    """Return the given seed, or one from the operating system."""
    return secrets.randbits(128) if seed is None else _validate.whole("seed", seed, low=0)


class _StepRandomness:
    """The random streams of canaries, of any kind."""

    num_canaries: int
    seed: int
    _drawn: dict[int, BoolArray]

    def rng(self, index: int, purpose: int = _COINS) -> np.random.Generator:
        """Return the generator of one step, or of whatever else is counted by ``index``."""
        # a spawn key: a plain list with zeros at its end would be the training's own seed
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(_AUDIT, purpose, index)))

    def coins(self, index: int) -> BoolArray:
        """Return whether each canary is present in a step: a fair coin each."""
        block, offset = divmod(index, _AT_ONCE)
        if self._drawn.get(block) is None:
            self._drawn.clear()
            shape = (_AT_ONCE, self.num_canaries)
            self._drawn[block] = self.rng(block).integers(0, 2, shape, dtype=np.bool_)
        coins: BoolArray = self._drawn[block][offset]
        return coins

    def entries(self) -> BoolArray:
        """Return whether each canary is an entry of the data set, for all steps: a fair coin each."""
        if self.num_canaries < _FEWEST:
            raise InputError(
                f"Expected num_canaries={self.num_canaries} to be at least {_FEWEST} end to end: "
                "each is one observation, and both sides need some."
            )
        return self.coins(_WHOLE_RUN)


@dataclass(frozen=True)
class Coins(_StepRandomness):
    """Which canaries are present, where their directions are those of their gradients: input canaries."""

    num_canaries: int
    seed: int
    _drawn: dict[int, BoolArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate.whole("num_canaries", self.num_canaries)


@dataclass(frozen=True)
class Draws(_StepRandomness):
    """Which gradient canaries are present, and where they point."""

    canary: GradientCanary
    num_canaries: int
    seed: int
    _drawn: dict[int, BoolArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.canary, GradientCanary):
            raise InputError(f"Expected canary to be such as Dirac(), got {self.canary!r}.")
        _validate.whole("num_canaries", self.num_canaries)

    def direction_rng(self, index: int) -> np.random.Generator:
        """Return the generator of a step's directions; of the first step's, if they do not move."""
        return self.rng(index if self.canary.moving else 0, _DIRECTIONS)

    def directions(self, index: int, num_parameters: int) -> Directions:
        """Return where the canaries of a step point."""
        return self.canary.directions(self.num_canaries, num_parameters, self.direction_rng(index))
