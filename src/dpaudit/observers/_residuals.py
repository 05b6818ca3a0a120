"""The noise of a step function: what it released, less what a correct sum would be.

:class:`Residuals` tests it. :func:`require_known_sum` refuses a step whose sum is another one, and
:func:`sum_rounding` says how far a sum in single precision may be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpaudit._types import BoolArray, FloatArray
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._noise_record import Leaves
from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy
from dpaudit.recording import UntestedError

_MAX_SCALE = 1.5  # of the claim: more is a coincidence only if there are very few coordinates
_MIN_SCORES = 20  # of a canary: the mean of fewer is too uncertain
_ROUNDING = 1e-2  # in clipping norms: a step without noise is not held to the last digit
_SAFETY = 4.0  # other orders of summing, and what clipping rounds


def clipped_sum(gradients: FloatArray, norm: float) -> FloatArray:
    """Return what gradients, a row each, add to a correct sum; the adversary knows them."""
    total: FloatArray = _clipped(gradients, norm).sum(axis=0)
    return total


def _clipped(gradients: FloatArray, norm: float) -> FloatArray:
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped: FloatArray = gradients / np.maximum(1.0, lengths / norm)
    return clipped


def residual(released: FloatArray, gradients: FloatArray, *, max_grad_norm: float, std: float) -> FloatArray:
    """Return the noise of a released sum of gradients, in units of the claimed standard deviation."""
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

    def observe(self, released: FloatArray, canaries: FloatArray) -> None:
        """Keep what a call released, less the sum of the others; ``canaries`` are those in it, a row each."""
        noise = residual(released, canaries, max_grad_norm=self._norm, std=self._std)
        self._clipped.observe_noise(noise, self._leaves, rounding=self._rounding)
        self._apart.observe_noise(self._replaced(noise, canaries), self._leaves, rounding=self._rounding)

    def _replaced(self, noise: FloatArray, canaries: FloatArray) -> FloatArray:
        """Return it with noise of our own along the canaries; as large as the rest, if that is too much."""
        units = canaries / np.linalg.norm(canaries, axis=1, keepdims=True)
        along = units @ noise
        rest = noise - along @ units
        scale = float(np.sqrt((rest @ rest) / max(noise.size - len(units), 1)))
        own = (scale if scale > _MAX_SCALE else 1.0) * self._own.standard_normal(len(units))
        replaced: FloatArray = rest + own @ units
        return replaced

    def diagnose(
        self, *, noise_multiplier: float, confidence: float, has_signal: Callable[[], bool]
    ) -> Diagnosis:
        """Test the noise; ``has_signal`` says whether canaries are clipped as claimed."""
        claimed = self._std / self._norm
        if not math.isclose(noise_multiplier, claimed):
            raise UntestedError(
                f"Expected noise_multiplier={claimed:g}, which the steps were held against, "
                f"got {noise_multiplier:g}: observe them again with that claim."
            )
        return (self._clipped if has_signal() else self._apart).diagnose(confidence)


class UnknownSumError(InputError):
    """A step adds up something else than clipped gradients."""


def require_known_sum(scores: FloatArray, present: BoolArray) -> None:
    """Raise if scores of absent canaries are surely not 0 on average; steps x canaries that do not move.

    Then the step adds up something else than clipped gradients: every score is off by it, and a fault of the
    clipping would hide a canary.
    """
    absent = np.where(present, np.nan, scores)
    counts = (~present).sum(axis=0)
    absent, counts = absent[:, counts >= _MIN_SCORES], counts[counts >= _MIN_SCORES]
    if counts.size == 0:
        return
    means, spreads = np.nanmean(absent, axis=0), np.maximum(np.nanstd(absent, axis=0), _ROUNDING)
    squares = counts * (means / spreads) ** 2
    if squares.mean() > 2 + 10 * np.sqrt(2 / counts.size):  # 1, and ten standard errors
        off = float(np.abs(means).max())
        raise UnknownSumError(
            "Expected the step to release the sum of the clipped gradients and noise, got another sum, off "
            f"by {off:.3g} clipping norms where no canary is. Audit it with gradients of zeros: they are the "
            "same with any clipping."
        )


def sum_rounding(gradients: Any, norm: float) -> float:
    """Return how far a single-precision sum of clipped gradients may be off; 0 in double precision.

    A bound that always holds would be thousands of times too large for gradients that point in all
    directions. So the rows are added up one after another in single precision, and compared; the sum of many
    equal rows is rounded the same way at every row, and can be off by more than the noise.
    """
    if str(gradients.dtype).endswith("float64") or len(gradients) == 0:
        return 0.0
    rows = _clipped(as_numpy(gradients), norm)
    exact = rows.sum(axis=0)
    # along the first axis, numpy adds row by row
    error = np.abs(rows.astype(np.float32).sum(axis=0) - exact).max()
    return float(_SAFETY * error + np.finfo(np.float32).eps * np.abs(exact).max())
