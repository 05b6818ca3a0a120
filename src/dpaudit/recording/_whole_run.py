"""One score a canary for the whole run: its log-likelihood ratio."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.stats import Bound, Fixed, Guesses, Observations, Result, audit, one_run_fdp_bound
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["WholeRunRecorder"]


class WholeRunRecorder:
    """Adds up, for every canary, how much more likely its scores are if it is in the data set.

    A score x of a step is 1 on average if the step has the canary, 0 if not, and has Gaussian noise. With
    a sample rate q the step's likelihood ratio is 1 - q + q exp((2 x - 1) / (2 noise^2)). Their product
    over all steps is the most powerful test of the composed mechanism, so that each canary is one
    observation of the whole training.
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
    ) -> None:
        self.present = present
        self.confidence = _validate.confidence(confidence)
        self.num_steps = num_steps
        self.num_done = 0
        self.claim = Claim.dpsgd(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        )
        self._noise, self._rate = noise_multiplier, sample_rate
        self._ratios: FloatArray = np.zeros(present.size)

    @property
    def tradeoff(self) -> SubsampledGaussian:
        """The curve of the whole training."""
        return SubsampledGaussian(self._rate, self.num_steps)

    def record(self, scores: Any) -> None:
        """The scores of all canaries in one step, whether it had them or not."""
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != self.present.shape or not np.isfinite(values).all():
            raise InputError(
                f"Expected {self.present.size} finite scores in step {self.num_done}, got shape "
                f"{values.shape} with {int(np.isfinite(values).sum())} of them finite."
            )
        present = (2 * values - 1) / (2 * self._noise**2)
        with np.errstate(divide="ignore"):  # log(1 - 1), where every step has every canary
            self._ratios += np.logaddexp(np.log1p(-self._rate), np.log(self._rate) + present)
        self.num_done += 1

    @property
    def observations(self) -> Observations:
        """One score a canary; only after the last step, because the claim is of all of them."""
        if self.num_done != self.num_steps:
            raise InputError(
                f"Expected all {self.num_steps} steps before the whole run is judged, got {self.num_done}."
            )
        return Observations.from_presence(self._ratios, self.present)

    def audit(self, **method: Any) -> Result:
        """The verdict on the claim; keywords are those of :func:`dpaudit.audit`.

        The threshold is where present and absent are equally likely under the claim, known before the data:
        the best place to see sampling. Where the noise is wrong it may not be; ``threshold=HeldOut(0.2)``
        looks for another one, and an audit of single steps sees that sooner.
        """
        usual: dict[str, Any] = {
            "claim": self.claim,
            "confidence": self.confidence,
            "tradeoff": self.tradeoff,
            "threshold": Fixed(0.0),
        }
        return audit(self.observations, **(usual | method))

    def one_run_bound(self) -> Bound:
        """A bound that holds also if the canaries of the run depend on each other; it is looser."""
        self.observations  # noqa: B018  # refuses an unfinished run
        guesses = Guesses.from_scores(self._ratios, self.present, num_guesses=self.present.size)
        return one_run_fdp_bound(
            guesses, tradeoff=self.tradeoff, delta=self.claim.delta, confidence=self.confidence
        )

    def state_dict(self) -> dict[str, Any]:
        """What was recorded; give it to ``load_state_dict`` of an equal recorder."""
        return {"num_done": self.num_done, "ratios": self._ratios.copy(), "present": self.present}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self.num_done, self.present = state["num_done"], state["present"]
        self._ratios = np.array(state["ratios"])
