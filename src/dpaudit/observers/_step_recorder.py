"""The recorder of an audited step, which knows the noise of every call."""

from __future__ import annotations

import math
from typing import Any

from dpaudit.diagnostics import Diagnosis
from dpaudit.observers._arrival import Side, arrives
from dpaudit.observers._arriving import ArrivingRecorder
from dpaudit.observers._residuals import Residuals
from dpaudit.observers._untested import UntestedError

__all__ = ["StepRecorder"]


class StepRecorder(ArrivingRecorder):
    """A :class:`dpaudit.Recorder` with tests of the noise; ``residuals`` is None where none is claimed."""

    def __init__(self, residuals: Residuals | None, **options: Any) -> None:
        self._residuals = residuals
        super().__init__(**options)

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Tests of the noise of all steps; refused where the claim is not of so much normal noise."""
        kept = self._residuals
        if kept is None:
            raise UntestedError(
                f"Expected a claim of Gaussian noise for tests of the noise, got {self.claim.summary}."
            )
        if not math.isclose(noise_multiplier or kept.noise_multiplier, kept.noise_multiplier):
            raise UntestedError(
                f"Expected noise_multiplier={kept.noise_multiplier:g}, which the steps were held against, "
                f"got {noise_multiplier:g}: observe them again with that claim."
            )
        seen = self.observations
        as_claimed = arrives(Side(seen.with_canary), Side(seen.without_canary), self._signal)
        return kept.diagnose(arrives=as_claimed, confidence=confidence)
