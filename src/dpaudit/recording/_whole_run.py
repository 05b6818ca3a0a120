"""One score a canary for the whole run: its log-likelihood ratio."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpaudit import _validate
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.recording._epsilon import require_no_epsilon
from dpaudit.recording._ratios import LikelihoodRatios
from dpaudit.stats import (
    Bound,
    Fixed,
    Guesses,
    Observations,
    Result,
    Simultaneous,
    audit,
    one_run_fdp_bound,
)
from dpaudit.stats._types import BoolArray

__all__ = ["WholeRunRecorder"]

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
    shares = " and ".join(f"{rule!r} with {share:g} of the error" for rule, share in _SHARES.items())
    return replace(
        best,
        bound=replace(best.bound, confidence=confidence, rule=f"{best.bound.rule}, the better of {shares}"),
        design=found[-1].design,  # its power does not rest on the noise being the claimed one
    )
