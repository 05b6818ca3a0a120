"""The noise of a step: what it released, less what a correct sum would be."""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics.noise import Leaves
from dpaudit.stats._types import FloatArray

__all__ = ["Residuals", "clipped_sum", "residual"]


_TOO_MUCH = 1.5  # of the claim: what a step's noise is by chance only if it has very few coordinates


def clipped_sum(gradients: FloatArray, norm: float) -> FloatArray:
    """What gradients, a row each, add to a correct sum; the adversary knows them."""
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    total: FloatArray = (gradients / np.maximum(1.0, lengths / norm)).sum(axis=0)
    return total


def residual(released: FloatArray, gradients: FloatArray, *, max_grad_norm: float, std: float) -> FloatArray:
    """The noise of a released sum of these gradients, in units of the claimed standard deviation."""
    return (released - clipped_sum(gradients, max_grad_norm)) / std


class Residuals:
    """Keeps the noise of every call of a step, for tests.

    A canary that is not clipped as claimed leaves a trace in what is left of a release. So the noise is kept
    a second time, with noise of our own in the place of whatever was released along the canaries that were
    present: that is normal and independent, too, if the step's noise is, whatever arrives of a canary.
    """

    def __init__(
        self,
        *,
        max_grad_norm: float,
        std: float,
        leaves: Leaves | None = None,
        rounding: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._norm, self._std, self._leaves = max_grad_norm, std, leaves
        self._rounding = rounding / std
        self._own = np.random.default_rng(0) if rng is None else rng
        self._clipped, self._apart = Diagnostics(), Diagnostics()

    @property
    def noise_multiplier(self) -> float:
        """What is claimed."""
        return self._std / self._norm

    def observe(self, released: FloatArray, canaries: FloatArray) -> None:
        """What a call released, less the sum of the others; and the canaries in it, a row each."""
        noise = residual(released, canaries, max_grad_norm=self._norm, std=self._std)
        self._clipped.observe_noise(noise, self._leaves, rounding=self._rounding)
        self._apart.observe_noise(self._replaced(noise, canaries), self._leaves, rounding=self._rounding)

    def _replaced(self, noise: FloatArray, canaries: FloatArray) -> FloatArray:
        """The same with noise of our own along the canaries; as large as the rest, if that is too much."""
        units = canaries / np.linalg.norm(canaries, axis=1, keepdims=True)
        along = units @ noise
        rest = noise - along @ units
        scale = float(np.sqrt((rest @ rest) / max(noise.size - len(units), 1)))
        own = (scale if scale > _TOO_MUCH else 1.0) * self._own.standard_normal(len(units))
        replaced: FloatArray = rest + own @ units
        return replaced

    def diagnose(self, *, arrives: bool, confidence: float) -> Diagnosis:
        """The tests of the noise; ``arrives`` says whether canaries are clipped as claimed."""
        return (self._clipped if arrives else self._apart).diagnose(confidence)
