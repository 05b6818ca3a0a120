"""A threshold chosen on one part of the data and counted on the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats._types import BoolArray, ScoreArray
from dpaudit.stats.inference import Betting, ClopperPearson, Inference
from dpaudit.stats.thresholds._balanced import least_balanced_error, smooth
from dpaudit.stats.thresholds._base import ThresholdRule
from dpaudit.stats.thresholds._scan import Staircase

__all__ = ["HeldOut", "choose"]

_CANDIDATES = 64  # few, so that the choice follows the shape of the scores and not their noise


@dataclass(frozen=True)
class HeldOut(ThresholdRule):
    """Choose on a random ``fraction`` of the data (whole steps, where there are), count on the rest.

    With betting the first part is held out instead: a bet may depend on the past only.
    """

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        _validate.fraction("fraction", self.fraction)
        _validate.whole("seed", self.seed, low=0)

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        betting = isinstance(inference, Betting)
        absent, present, rest = self.split(observations, the_first=betting)
        best = least_balanced_error(absent, present) if betting else choose(absent, present, question)
        return inference.at_threshold(rest, best, question)

    def counted(self, size: int) -> int:
        return size - self._held(size)

    def split(
        self, observations: Observations, *, the_first: bool = False
    ) -> tuple[ScoreArray, ScoreArray, Observations]:
        """The absent and the present scores to choose on, and the part to count."""
        observations = observations.in_memory()
        rng = None if the_first else np.random.default_rng(self.seed)
        if observations.with_steps is not None and observations.without_steps is not None:
            held = self._pick(rng, observations.num_steps)
            return _split_coins(observations, held[observations.without_steps], held[observations.with_steps])
        with_held = self._pick(rng, len(observations.with_canary))
        stepped = observations.is_stepped
        without_held = with_held if stepped else self._pick(rng, len(observations.without_canary))
        return _split(observations, without_held, with_held)

    def _pick(self, rng: np.random.Generator | None, size: int) -> BoolArray:
        """Which of ``size`` are held out."""
        order = np.arange(size) if rng is None else rng.permutation(size)
        held = np.zeros(size, dtype=np.bool_)
        held[order[: self._held(size)]] = True
        return held

    def _held(self, size: int) -> int:
        if size < 2:
            raise InputError("HeldOut() needs at least 2 scores (or steps) a side, got 1.")
        return min(max(round(self.fraction * size), 1), size - 1)


def choose(absent: ScoreArray, present: ScoreArray, question: Question) -> float:
    """The threshold with the best bound on these scores; where nothing is refuted, the fewest errors."""
    if not absent.size or not present.size:
        return least_balanced_error(absent, present)
    stairs = Staircase.of(Observations(with_canary=present, without_canary=absent))
    places = np.unique(np.linspace(0, stairs.absent.size - 1, _CANDIDATES).astype(np.int64))
    values = ClopperPearson().rank(*stairs.errors(places), stairs.sizes, question)
    if not values.max() > 0:
        return least_balanced_error(stairs.absent, stairs.present)
    values = smooth(values)
    best = np.flatnonzero(values >= values.max())
    return _between(stairs, int(places[best[best.size // 2]]))


def _between(stairs: Staircase, place: int) -> float:
    """Halfway from this absent score to the next score above: new scores fall on both sides."""
    here = float(stairs.absent[place])
    above = [
        float(side[index])
        for side in (stairs.absent, stairs.present)
        if (index := int(np.searchsorted(side, here, side="right"))) < side.size
    ]
    return (here + min(above)) / 2 if above else here


def _split(
    observations: Observations, without_held: BoolArray, with_held: BoolArray
) -> tuple[ScoreArray, ScoreArray, Observations]:
    absent, present = observations.without_canary, observations.with_canary
    rest = replace(observations, with_canary=present[~with_held], without_canary=absent[~without_held])
    return absent[without_held].reshape(-1), present[with_held].reshape(-1), rest


def _split_coins(
    observations: Observations, without_held: BoolArray, with_held: BoolArray
) -> tuple[ScoreArray, ScoreArray, Observations]:
    """As :func:`_split`, for scores that know their steps, which are numbered anew in the rest."""
    absent, present = observations.without_canary, observations.with_canary
    if with_held.all() or without_held.all():
        raise InputError("HeldOut() left no score to count on one side: it needs more steps.")
    assert observations.with_steps is not None
    assert observations.without_steps is not None
    steps = np.concatenate([observations.with_steps[~with_held], observations.without_steps[~without_held]])
    numbers = np.unique(steps, return_inverse=True)[1]
    split = int(np.count_nonzero(~with_held))
    rest = replace(
        observations,
        with_canary=present[~with_held],
        without_canary=absent[~without_held],
        with_steps=numbers[:split],
        without_steps=numbers[split:],
    )
    return absent[without_held], present[with_held], rest
