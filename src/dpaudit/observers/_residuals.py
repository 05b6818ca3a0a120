"""The noise of a step function: its release minus the correct sum.

:class:`Residuals` tests the noise. :func:`require_known_sum` raises if the step computes a different sum, and
:func:`sum_rounding` bounds the rounding error of a sum in single precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import Directions
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._coordinate_layout import Leaves
from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy
from dpaudit.recording import UntestedError

_MAX_SCALE = 1.5  # times the claim: more is plausible only with very few coordinates
_MIN_SCORES = 20  # per canary: the mean of fewer is too uncertain
_MIN_SCORES_EACH = 4  # the same for canaries that share an estimate of the variance
_ROUNDING = 1e-2  # in clipping norms: tolerance for a step without noise
_SAFETY = 4.0  # margin for other orders of summation and for the rounding of clipping


def clipped_sum(gradients: FloatArray, norm: float) -> FloatArray:
    """Return the contribution of gradients, one per row, to a correct sum; the adversary knows them."""
    total: FloatArray = _clipped(gradients, norm).sum(axis=0)
    return total


def _clipped(gradients: FloatArray, norm: float) -> FloatArray:
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped: FloatArray = gradients / np.maximum(1.0, lengths / norm)
    return clipped


def residual(released: FloatArray, gradients: FloatArray, *, max_grad_norm: float, std: float) -> FloatArray:
    """Return the noise in a released sum of gradients, in units of the claimed standard deviation."""
    return (released - clipped_sum(gradients, max_grad_norm)) / std


class Residuals:
    """A log of the noise of every call of a step, for tests.

    A canary that is not clipped as claimed leaves a trace in the residual. So a second version of the noise
    is kept, in which the component along each present canary is replaced by our own noise: it is normal and
    independent if the noise of the step is, whatever remains of a canary in the release.
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

    def observe(
        self,
        released: FloatArray,
        others: FloatArray,
        directions: Directions,
        present: BoolArray,
        lengths: FloatArray,
        *,
        raw: FloatArray,
        num_rows: int,
    ) -> None:
        """Log a release minus the sum of the ``others``; ``lengths`` are the norms of canaries.

        ``raw`` is the release exactly as the step returned it, ``num_rows`` the number of rows of the step.
        """
        clipped = np.where(present, np.minimum(lengths, self._norm), 0.0)
        canaries = directions.weighted_sum(clipped)
        noise = (released - canaries) / self._std
        known = (others + canaries) / self._std
        for tests, found in (
            (self._clipped, noise),
            (self._apart, self._replaced(noise, directions, present)),
        ):
            tests.observe_noise(
                found,
                self._leaves,
                rounding=self._rounding,
                known=known,
                released=raw,
                batch_size=float(num_rows),
                sum_norm=float(np.linalg.norm(known)),
                num_canaries=float(np.count_nonzero(present)),
            )

    def _replaced(self, noise: FloatArray, directions: Directions, present: BoolArray) -> FloatArray:
        """Return ``noise`` with our own along the canaries, scaled like the rest if that is too large."""
        count = int(np.count_nonzero(present))
        rest = noise - directions.weighted_sum(directions.project(noise) * present)
        scale = float(np.sqrt((rest @ rest) / max(noise.size - count, 1)))
        own = np.zeros(present.size)
        own[present] = (scale if scale > _MAX_SCALE else 1.0) * self._own.standard_normal(count)
        replaced: FloatArray = rest + directions.weighted_sum(own)
        return replaced

    def diagnose(
        self, *, noise_multiplier: float, confidence: float, has_signal: Callable[[], bool]
    ) -> Diagnosis:
        """Test the noise; ``has_signal`` returns whether canaries are clipped as claimed."""
        claimed = self._std / self._norm
        if not math.isclose(noise_multiplier, claimed):
            raise UntestedError(
                f"Expected noise_multiplier={claimed:g}, with which the steps were observed, got "
                f"{noise_multiplier:g}: observe them again with that claim."
            )
        return (self._clipped if has_signal() else self._apart).diagnose(confidence)


class UnknownSumError(InputError):
    """A step sums something other than clipped gradients."""


def require_known_sum(scores: FloatArray, present: BoolArray, num_variants: int = 1) -> None:
    """Raise if absent canaries certainly do not score 0 on average; arrays are steps x fixed canaries.

    If there are several variants of canaries, steps take them in turn.

    In that case the step sums something other than clipped gradients: every score is off by the difference,
    and a clipping fault would hide a canary.
    """
    turns = [slice(first, None, num_variants) for first in range(min(num_variants, len(scores)))]
    counts = np.concatenate([(~present[turn]).sum(axis=0) for turn in turns])
    totals = np.concatenate([(~present * scores)[turn].sum(axis=0) for turn in turns])
    squared = np.concatenate([(~present * scores**2)[turn].sum(axis=0) for turn in turns])
    is_enough = counts >= (_MIN_SCORES if num_variants == 1 else _MIN_SCORES_EACH)
    counts, totals, squared = counts[is_enough], totals[is_enough], squared[is_enough]
    if counts.size == 0:
        return
    means = totals / counts
    variances = np.maximum(squared / counts - means**2, 0.0)
    if num_variants > 1:  # few scores each, so they share an unbiased variance
        variances = np.full(counts.size, (counts * variances).sum() / (counts - 1).sum())
    squares = counts * means**2 / np.maximum(variances, _ROUNDING**2)
    if squares.mean() > 2 + 10 * np.sqrt(2 / counts.size):  # the expectation is 1; ten standard errors more
        off = float(np.abs(means).max())
        raise UnknownSumError(
            "Expected the step to release the sum of the clipped gradients plus noise, got a sum that "
            f"differs by {off:.3g} clipping norms where no canary is present: is the sum or the noisy sum "
            "clipped again, or divided? Pass gradients of zeros instead, which no clipping changes."
        )


def sum_rounding(gradients: Any, norm: float) -> float:
    """Return the largest rounding error of a sum of clipped gradients in single precision; 0 in double.

    A worst-case bound would be thousands of times too large for gradients that point in all directions. So
    the rows are summed one after another in single precision and compared with the exact sum; the sum of many
    equal rows is rounded the same way at every row, and its error can exceed the noise.
    """
    if str(gradients.dtype).endswith("float64") or len(gradients) == 0:
        return 0.0
    rows = _clipped(as_numpy(gradients), norm)
    exact = rows.sum(axis=0)
    # along the first axis, NumPy adds row by row
    error = np.abs(rows.astype(np.float32).sum(axis=0) - exact).max()
    return float(_SAFETY * error + np.finfo(np.float32).eps * np.abs(exact).max())
