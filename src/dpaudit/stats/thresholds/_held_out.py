"""A threshold chosen on one part of the data and counted on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._observations import Observations
from dpaudit.stats._question import Finding, Question
from dpaudit.stats._types import IntArray, ScoreArray
from dpaudit.stats.inference import Betting, ClopperPearson, Inference
from dpaudit.stats.thresholds._balanced import least_balanced_error, smooth
from dpaudit.stats.thresholds._base import ThresholdRule
from dpaudit.stats.thresholds._scan import Staircase

__all__ = ["HeldOut", "choose"]

_CANDIDATES = 64  # few, so that the choice follows the shape of the scores and not their noise


@dataclass(frozen=True)
class HeldOut(ThresholdRule):
    """Choose on a random ``fraction`` of the data (whole steps, where there are), count on the rest."""

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        _validate.fraction("fraction", self.fraction)
        _validate.whole("seed", self.seed, low=0)

    def apply(self, observations: Observations, inference: Inference, question: Question) -> Finding:
        chosen_on, rest = self.split(observations)
        if isinstance(inference, Betting) and inference.balanced:
            threshold = least_balanced_error(
                chosen_on.without_canary.reshape(-1), chosen_on.with_canary.reshape(-1)
            )
        else:
            threshold = choose(chosen_on, question)
        return inference.at_threshold(rest, threshold, question)

    def counted(self, num_absent: int, num_present: int) -> tuple[int, int]:
        return (
            num_absent - self._held(num_absent),
            num_present - self._held(num_present),
        )

    def split(self, observations: Observations) -> tuple[Observations, Observations]:
        """The part to choose on and the part to count."""
        rng = np.random.default_rng(self.seed)
        observations = observations.in_memory()
        present, absent = observations.with_canary, observations.without_canary
        if observations.with_steps is not None and observations.without_steps is not None:
            held = _pick(rng, observations.num_steps, self._held(observations.num_steps))
            rest = np.setdiff1d(np.arange(observations.num_steps), held)
            steps = observations.with_steps, observations.without_steps
            return _coin_part(observations, *steps, held), _coin_part(observations, *steps, rest)
        if present.ndim == 2:
            held = _pick(rng, len(present), self._held(len(present)))
            return _take(observations, held, held)
        return _take(
            observations,
            _pick(rng, present.size, self._held(present.size)),
            _pick(rng, absent.size, self._held(absent.size)),
        )

    def _held(self, size: int) -> int:
        if size < 2:
            raise InputError("HeldOut() needs at least 2 scores (or steps) a side, got 1.")
        return min(max(round(self.fraction * size), 1), size - 1)


def choose(data: Observations, question: Question) -> float:
    """The threshold with the best bound on ``data``; where nothing is refuted, the fewest errors."""
    stairs = Staircase.of(data)
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


def _pick(rng: np.random.Generator, size: int, held: int) -> IntArray:
    return np.sort(rng.permutation(size)[:held])


def _take(
    observations: Observations, with_held: IntArray, without_held: IntArray
) -> tuple[Observations, Observations]:
    def sides(scores: ScoreArray, held: IntArray) -> tuple[ScoreArray, ScoreArray]:
        rest = np.ones(len(scores), dtype=np.bool_)
        rest[held] = False
        return np.asarray(scores[held]), np.asarray(scores[rest])

    present = sides(observations.with_canary, with_held)
    absent = sides(observations.without_canary, without_held)
    first, second = (
        Observations(with_canary=p, without_canary=a, normalized=observations.normalized)
        for p, a in zip(present, absent, strict=True)
    )
    return first, second


def _coin_part(
    observations: Observations, with_steps: IntArray, without_steps: IntArray, kept: IntArray
) -> Observations:
    """The scores of the steps in ``kept`` (sorted), which are numbered anew."""
    keep_with, keep_without = np.isin(with_steps, kept), np.isin(without_steps, kept)
    return Observations(
        with_canary=observations.with_canary[keep_with],
        without_canary=observations.without_canary[keep_without],
        normalized=observations.normalized,
        with_steps=np.searchsorted(kept, with_steps[keep_with]),
        without_steps=np.searchsorted(kept, without_steps[keep_without]),
    )
