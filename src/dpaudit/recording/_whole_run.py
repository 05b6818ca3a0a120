"""One score a canary for the whole run: its log-likelihood ratio."""

from __future__ import annotations

from typing import Any

from dpaudit import _validate
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.recording._ratios import LikelihoodRatios
from dpaudit.stats import Bound, Fixed, Guesses, Observations, Result, audit, one_run_fdp_bound
from dpaudit.stats._types import BoolArray

__all__ = ["WholeRunRecorder"]


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
