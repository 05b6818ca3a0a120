"""Chance of an audit: which canaries are present in a step, and where gradient canaries point."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray
from dpaudit.canaries._gradients import Directions, GradientCanary
from dpaudit.errors import InputError

_AUDIT = 0x617564  # what chance of an audit is told apart by, also if the training has the same seed
_COINS, _DIRECTIONS = 0, 1  # purposes of chance
_WHOLE_RUN = 2**32 - 1  # the number of no step
_FEWEST = 32  # entries of a data set: then one side is empty once in two billion runs
_AT_ONCE = 64  # steps whose coins are thrown together: a new generator takes longer than the coins of a step


def fresh_seed(seed: int | None) -> int:
    """The seed that was given, or one from the operating system."""
    return secrets.randbits(128) if seed is None else _validate.whole("seed", seed, low=0)


class _Chance:
    """Draws anew for each step from the seed and the step's number.

    So nothing of it has to be kept when a run is interrupted, and several processes draw the same.
    """

    num_canaries: int
    seed: int
    _thrown: dict[int, BoolArray]

    def chance(self, index: int, purpose: int = _COINS) -> np.random.Generator:
        """The generator of one step, or of whatever else is counted by ``index``."""
        # a spawn key: a plain list with zeros at its end would be the training's own seed
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(_AUDIT, purpose, index)))

    def coins(self, index: int) -> BoolArray:
        """Whether each canary is present: a fair coin each."""
        block, place = divmod(index, _AT_ONCE)
        if self._thrown.get(block) is None:
            self._thrown.clear()
            shape = (_AT_ONCE, self.num_canaries)
            self._thrown[block] = self.chance(block).integers(0, 2, shape, dtype=np.bool_)
        coins: BoolArray = self._thrown[block][place]
        return coins

    def entries(self) -> BoolArray:
        """Whether each canary is an entry of the data set, for all steps: a fair coin each."""
        if self.num_canaries < _FEWEST:
            raise InputError(
                f"Expected num_canaries={self.num_canaries} to be at least {_FEWEST} end to end: "
                "each is one observation, and both sides need some."
            )
        return self.coins(_WHOLE_RUN)


@dataclass(frozen=True)
class Coins(_Chance):
    """Chance of canaries that point where their gradients do."""

    num_canaries: int
    seed: int
    _thrown: dict[int, BoolArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _validate.whole("num_canaries", self.num_canaries)


@dataclass(frozen=True)
class Draws(_Chance):
    """Chance of gradient canaries, and where they point."""

    canary: GradientCanary
    num_canaries: int
    seed: int
    _thrown: dict[int, BoolArray] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.canary, GradientCanary):
            raise InputError(f"Expected canary to be such as Dirac(), got {self.canary!r}.")
        _validate.whole("num_canaries", self.num_canaries)

    def direction_chance(self, index: int) -> np.random.Generator:
        """The generator of a step's directions; of the first step's, if they do not move."""
        return self.chance(index if self.canary.moving else 0, _DIRECTIONS)

    def directions(self, index: int, num_parameters: int) -> Directions:
        """Where the canaries of a step point."""
        return self.canary.directions(self.num_canaries, num_parameters, self.direction_chance(index))
