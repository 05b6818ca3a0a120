"""What guesses about the canaries of one training say of its claim."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.stats import Bound, Guesses, Power, Verdict, one_run_bound, one_run_fdp_bound
from dpaudit.stats._bound import plain
from dpaudit.stats._one_run import too_many_correct
from dpaudit.stats._search import last_true

__all__ = ["GuessJudge"]

_PROBABILITY = 0.8


@dataclass(frozen=True, kw_only=True)
class GuessJudge:
    """Two bounds that hold for canaries that share a training, and a verdict that rests on the second.

    The first says nothing of the mechanism (Steinke et al. 2023); the second is of the claimed training's own
    curve (Mahloujifar et al. 2024).
    """

    noise_multiplier: float
    curve: SubsampledGaussian
    delta: float
    confidence: float

    @property
    def _claim(self) -> Claim:
        return Claim.dpsgd(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.curve.sample_rate,
            num_steps=self.curve.num_steps,
            delta=self.delta,
        )

    def values(self, guesses: Guesses) -> dict[str, Any]:
        """The result as plain values."""
        universal = one_run_bound(guesses, delta=self.delta, confidence=self.confidence)
        bound = one_run_fdp_bound(guesses, tradeoff=self.curve, delta=self.delta, confidence=self.confidence)
        claim, verdict = self._claim, self._verdict(bound, guesses)
        rows = {"f-DP(one-run)": bound, "(eps,delta)(one-run)": universal}
        return {
            "verdict": verdict.name,
            "sentence": verdict.value,
            "claim": {
                "summary": claim.summary,
                "epsilon": plain(claim.epsilon),
                "delta": self.delta,
                "parameter": self._claimed,
            },
            "bound": bound.to_dict(),
            "power": self._power(guesses).to_dict(),
            "not_covered": [],
            "delta": self.delta,
            "confidence": self.confidence,
            "notes": [],
            "methods": [
                {"name": name, **row.to_dict(), "training_epsilon": None} for name, row in rows.items()
            ],
        }

    @property
    def _claimed(self) -> float:
        return 1 / self.noise_multiplier

    def _refutes(self, guesses: Guesses, num_correct: int) -> bool:
        """Whether so many of these guesses, had they been right, would refute the claim."""
        found = Guesses(
            num_canaries=guesses.num_canaries, num_guesses=guesses.num_guesses, num_correct=num_correct
        )
        return too_many_correct(found, self.curve, self._claimed, 1 - self.confidence)

    def _verdict(self, bound: Bound, guesses: Guesses) -> Verdict:
        if bound.parameter > self._claimed:
            return Verdict.VIOLATION
        if not self._refutes(guesses, guesses.num_guesses):
            return Verdict.UNDERPOWERED
        return Verdict.NO_VIOLATION

    def _power(self, guesses: Guesses) -> Power:
        """Of an attack that reaches the curve of a noisier or leakier training, with independent guesses."""
        hypothesis = self._claim.hypothesis(self.curve)
        if not self._refutes(guesses, guesses.num_guesses):
            return Power.of(math.inf, hypothesis, _PROBABILITY)
        fewest = guesses.num_guesses
        while self._refutes(guesses, fewest - 1):
            fewest -= 1

        def is_seen_less(excess: float) -> bool:
            right = self._accuracy(guesses, self._claimed + excess)
            return bool(stats.binom.sf(fewest - 1, guesses.num_guesses, right) < _PROBABILITY)

        smallest = self._claimed + last_true(is_seen_less, tolerance=1e-2)
        return Power.of(smallest, hypothesis, _PROBABILITY)

    def _accuracy(self, guesses: Guesses, parameter: float) -> float:
        """The share of the most certain guesses that are right where a training has this parameter."""
        share = guesses.num_guesses / guesses.num_canaries

        def above(fpr: float) -> float:
            return 1 - float(self.curve.fnr(parameter, np.asarray(fpr)))

        fpr = last_true(lambda one: one < 1 and one + above(one) < share, start=share / 2, tolerance=1e-4)
        # where no rate is small enough, so many are recognised before the first is mistaken
        return above(fpr) / (fpr + above(fpr)) if fpr > 0 else 1.0
