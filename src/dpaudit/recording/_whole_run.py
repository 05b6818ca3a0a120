"""One score a canary for the whole run: its log-likelihood ratio.

How much more likely the scores of a run are with each canary than without it. An epsilon that is given for a
claim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.stats import Bound, Fixed, Guesses, Observations, Result, Simultaneous, audit, one_run_fdp_bound
from dpaudit.stats.thresholds import BestOf

_DPSGD = "claim=Claim.dpsgd(noise_multiplier=..., sample_rate=..., num_steps=..., delta=...)"


def require_no_epsilon(given: Mapping[str, Any], expected: str = _DPSGD) -> None:
    """Refuse an epsilon among the keywords: many mechanisms have it, and their steps differ."""
    if "epsilon" in given:
        raise InputError(
            f"Expected {expected}, got epsilon={given['epsilon']}: an epsilon alone says nothing of a step."
        )


class LikelihoodRatios:
    """The logarithm of each canary's likelihood ratio over the steps so far.

    A score x of a step is 1 on average if the step has the canary, 0 if not, and has Gaussian noise. With
    a sample rate q the step's likelihood ratio is 1 - q + q exp((2 x - 1) / (2 noise^2)).
    """

    def __init__(self, present: BoolArray, *, noise_multiplier: float, sample_rate: float) -> None:
        self.present = present
        self.num_done = 0
        self.values: FloatArray = np.zeros(present.size)
        self._noise = _validate.positive("noise_multiplier", noise_multiplier)
        self._rate = _validate.sample_rate(sample_rate)

    def record(self, scores: Any) -> None:
        """The scores of all canaries in one step, whether it had them or not."""
        found = np.asarray(scores, dtype=np.float64)
        if found.shape != self.present.shape or not np.isfinite(found).all():
            raise InputError(
                f"Expected {self.present.size} finite scores in step {self.num_done}, got shape "
                f"{found.shape} with {int(np.isfinite(found).sum())} of them finite."
            )
        present = (2 * found - 1) / (2 * self._noise**2)
        with np.errstate(divide="ignore"):  # log(1 - 1), where every step has every canary
            self.values += np.logaddexp(np.log1p(-self._rate), np.log(self._rate) + present)
        self.num_done += 1

    def observations(self, num_steps: int) -> Observations:
        """One score a canary; only after the last step, because the claim is of all of them."""
        if self.num_done < num_steps or self.num_done == 0:
            raise InputError(
                f"Expected all {num_steps} steps before the whole run is judged, got {self.num_done}."
            )
        return Observations.from_presence(self.values, self.present)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded; give it to ``load_state_dict`` of equal ones."""
        return {"num_done": self.num_done, "ratios": self.values.copy(), "present": self.present}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self.num_done, self.present = state["num_done"], state["present"]
        self.values = np.array(state["ratios"])


# Sampling needs all the error it can have; too little noise is seen with less.
_SHARES = {Fixed(0.0): 0.8, Simultaneous(): 0.2}


class WholeRunRecorder:
    """Adds up, for every canary, how much more likely its scores are if it is in the data set.

    The product of a canary's likelihood ratios over all steps is the most powerful test of the composed
    mechanism, so that each canary is one observation of the whole training. ``ratios`` are those of a
    training that somebody else recorded.
    """

    def __init__(
        self,
        present: BoolArray,
        *,
        noise_multiplier: float,
        sample_rate: float,
        num_steps: int,
        delta: float,
        confidence: float = 0.95,
        ratios: LikelihoodRatios | None = None,
    ) -> None:
        self.confidence = _validate.confidence(confidence)
        self.num_steps = num_steps
        self.claim = Claim.dpsgd(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        )
        self._rate = sample_rate
        self._ratios = ratios or LikelihoodRatios(
            present, noise_multiplier=noise_multiplier, sample_rate=sample_rate
        )

    @property
    def present(self) -> BoolArray:
        """Which canaries are in the data set."""
        return self._ratios.present

    @property
    def num_done(self) -> int:
        """How many steps were recorded."""
        return self._ratios.num_done

    @property
    def tradeoff(self) -> SubsampledGaussian:
        """The curve of the whole training."""
        return SubsampledGaussian(self._rate, self.num_steps)

    def record(self, scores: Any) -> None:
        """The scores of all canaries in one step, whether it had them or not."""
        self._ratios.record(scores)

    @property
    def observations(self) -> Observations:
        """One score a canary; only after the last step, because the claim is of all of them."""
        return self._ratios.observations(self.num_steps)

    def audit(self, **method: Any) -> Result:
        """The verdict on the claim; keywords are those of :func:`dpaudit.audit`.

        By default two thresholds share the error. One is where present and absent are equally likely under
        the claim, known before the data: the best place to see sampling. Where there is less noise than
        claimed, all scores move, and that place may tell nothing; so the other is the best of many.
        """
        require_no_epsilon(method)
        usual: dict[str, Any] = {
            "claim": self.claim,
            "confidence": self.confidence,
            "tradeoff": self.tradeoff,
        }
        if {"threshold", "inference"} & method.keys():
            return audit(self.observations, **(usual | {"threshold": Fixed(0.0)} | method))
        return _larger(self.observations, **(usual | method))

    def one_run_bound(self) -> Bound:
        """A bound that holds also if the canaries of the run depend on each other; it is looser."""
        self.observations  # noqa: B018  # refuses an unfinished run
        guesses = Guesses.from_scores(self._ratios.values, self.present, num_guesses=self.present.size)
        return one_run_fdp_bound(
            guesses, tradeoff=self.tradeoff, delta=self.claim.delta, confidence=self.confidence
        )

    def state_dict(self) -> dict[str, Any]:
        """What was recorded; give it to ``load_state_dict`` of an equal recorder."""
        return self._ratios.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self._ratios.load_state_dict(state)


def _larger(observations: Observations, *, confidence: float, **method: Any) -> Result:
    """The larger of the bounds by two rules that share the error: together they err as often as one would."""
    error = 1 - _validate.confidence(confidence)
    found = [
        audit(observations, threshold=rule, confidence=1 - share * error, **method)
        for rule, share in _SHARES.items()
    ]
    best = max(found, key=lambda result: result.bound.parameter)
    rule = BestOf(best.bound.threshold_rule, tuple(_SHARES), tuple(_SHARES.values()))
    return replace(
        best,
        bound=replace(best.bound, confidence=confidence, threshold_rule=rule),
        design=found[-1].design,  # its power does not rest on the noise being the claimed one
    )
