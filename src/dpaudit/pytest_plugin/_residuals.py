"""The noise of a step: what it released, less what a correct sum would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.observers._arrays import as_numpy, require_vector
from dpaudit.observers._step import clipped_sum
from dpaudit.stats import Gaussian

__all__ = ["Residuals"]


class Residuals:
    """Looks at every call of a step. They are known where the claim says how large the noise is."""

    def __init__(self, claim: Claim, *, max_grad_norm: float, divisor: float) -> None:
        hypothesis = claim.hypothesis(None)
        self.are_known = isinstance(hypothesis.tradeoff, Gaussian) and hypothesis.parameter > 0
        self._std = max_grad_norm / hypothesis.parameter if self.are_known else 1.0
        self._norm, self._divisor = max_grad_norm, divisor
        self._diagnostics = Diagnostics()

    def watched(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same step."""
        if not self.are_known:
            return step

        def observed(rows: Any) -> Any:
            released = step(rows)
            vector = self._divisor * require_vector(released, rows.shape[1])
            self._diagnostics.observe_noise((vector - clipped_sum(as_numpy(rows), self._norm)) / self._std)
            return released

        return observed

    def diagnose(self, confidence: float) -> Diagnosis:
        """What the noise of all calls looks like."""
        return self._diagnostics.diagnose(confidence)
