"""Noise and signal as the scores of a run show them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from dpaudit.canaries import Mixed
from dpaudit.observers._facts import Facts
from dpaudit.recording import Recorder
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["Seen"]

_LEVELS = 0.9995, 0.0005  # of the interval of the noise: a guess that is just outside of it is none
_FEW = 30  # steps, from which on it may be said that the signal depends on how many are present
_SURELY = 6.0  # standard errors
_CROWDED = 0.2  # of its size: how much a signal changes at least if the number present is doubled


@dataclass(frozen=True, kw_only=True)
class Seen:
    """In clipping norms. Estimates, no part of the proof."""

    noise: float
    low: float  # of the noise
    high: float
    signal: float
    spread_signal: float | None
    is_crowded: bool
    facts: Facts | None

    @classmethod
    def of(cls, recorder: Recorder) -> Seen:
        """From all scores of a run."""
        state, facts = recorder.state_dict(), getattr(recorder, "facts", None)
        scores, present = state["scores"], state["present"]
        absent = scores[~present]
        square, count = float(np.mean(absent**2)), absent.size
        low, high = (math.sqrt(square * count / stats.chi2.ppf(level, count)) for level in _LEVELS)
        narrow, spread = _signals(scores, present, facts)
        return cls(
            noise=math.sqrt(square),
            low=low,
            high=high,
            signal=narrow,
            spread_signal=spread,
            is_crowded=_is_crowded(scores, present),
            facts=facts,
        )

    def noise_line(self, claimed: float | None) -> str:
        """How far the noise is off."""
        if self.noise == 0:
            return "noise: none at all"
        if claimed is None:
            return f"noise: {self.noise:.3g} clipping norms ({self.low:.3g} to {self.high:.3g})"
        low, high = self.low / claimed, self.high / claimed
        return f"noise: {self.noise / claimed:.3g} of the claimed ({low:.3g} to {high:.3g})"

    @property
    def canary_line(self) -> str:
        """What arrives of a canary."""
        spread = "" if self.spread_signal is None else f" ({self.spread_signal:.3g} if it is spread)"
        return f"canary: arrives with {self.signal:.3g} clipping norms{spread}; a clipped one has at most 1"

    def known(self, claimed: float | None) -> dict[str, Any]:
        """Keywords of ``likely_causes``. Too much noise is the cause of no leak."""
        found: dict[str, Any] = {
            "signal": self.signal,
            "spread_signal": self.spread_signal,
            "is_crowded": self.is_crowded,
        }
        if self.facts is not None:
            found["canary_scale"] = self.facts.canary_scale
            found["batch_size"], found["max_grad_norm"] = self.facts.batch_size, self.facts.max_grad_norm
        if self.noise == 0:
            found["noise_ratio"] = 0.0
        elif claimed is not None:
            found["noise_multiplier"] = claimed
            if self.high < claimed:
                found["noise_ratio"] = self.noise / claimed
                found["interval"] = self.low / claimed, self.high / claimed
        return found


def _signals(scores: FloatArray, present: BoolArray, facts: Facts | None) -> tuple[float, float | None]:
    """How much more present canaries score: those on one coordinate, and those that are spread."""
    count = scores.shape[1]
    narrow = facts.canary.num_narrow(count) if facts and isinstance(facts.canary, Mixed) else 0
    if narrow == 0:
        return _signal(scores, present), None
    return _signal(scores[:, :narrow], present[:, :narrow]), _signal(scores[:, narrow:], present[:, narrow:])


def _signal(scores: FloatArray, present: BoolArray) -> float:
    if present.all() or not present.any():
        return math.nan
    return float(scores[present].mean() - scores[~present].mean())


def _is_crowded(scores: FloatArray, present: BoolArray) -> bool:
    """Whether the signal surely depends on how many canaries are present, as where they share a clip."""
    numbers = present.sum(axis=1)
    some = (numbers > 0) & (numbers < present.shape[1])
    if np.count_nonzero(some) < _FEW or np.ptp(numbers[some]) == 0:
        return False
    counts = numbers[some].astype(np.float64)
    means = np.where(present, scores, 0.0).sum(axis=1)[some] / counts
    found = stats.linregress(counts, means)
    change = abs(found.slope) * counts.mean()
    return bool(abs(found.slope) > _SURELY * found.stderr and change > _CROWDED * abs(means.mean()))
