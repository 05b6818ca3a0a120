"""How much more likely the scores of a run are with each canary than without it."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats import Observations
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["LikelihoodRatios"]


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
