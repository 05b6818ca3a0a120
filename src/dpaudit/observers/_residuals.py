"""The noise of a step function: its release minus the correct sum.

:class:`StepNoise` describes the noise. :class:`SumOfOthers` raises if the step computes a different sum, and
:func:`sum_rounding` bounds the rounding error of a sum in single precision.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special

from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import Directions
from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy
from dpaudit.recording import Recorder
from dpaudit.stats import PRIVACY

_MAX_SCALE = 1.5  # times the claim: more is plausible only with very few coordinates
_MIN_SCORES = 20  # per canary: the mean of fewer is too uncertain
_MIN_SCORES_EACH = 4  # the same for canaries that share an estimate of the variance
_ROUNDING = 1e-2  # in clipping norms: tolerance for a step without noise
_ALMOST_CERTAIN = 1 - 1e-6  # above that of an audit, also of one of a thousand tests with 95 % together
_CERTAIN = 10.0  # standard errors
_SHIFTED = 3.5  # standard errors: fewer than those of a finding
_UNLIKELY = 1e-4  # p-value, smaller for noise that was drawn independently in all steps
_MOST = 0.2  # of the squared mean of the noise: 0.28 if layers are clipped, 1 / size if noise repeats itself
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


class StepNoise:
    """The noise of every call of a step, in clipping norms.

    A canary that is not clipped as claimed leaves a trace in the noise. So a second version of it has our own
    noise along each present canary: it is normal and independent if the noise of the step is, whatever
    remains of a canary in the release.
    """

    def __init__(
        self, gradients: Any, *, max_grad_norm: float, noise_multiplier: float, rng: np.random.Generator
    ) -> None:
        self._norm, self._claimed, self._rng = max_grad_norm, noise_multiplier, rng
        self._rounding = sum_rounding(gradients, max_grad_norm) / max_grad_norm

    def fields(
        self,
        released: FloatArray,
        others: FloatArray,
        directions: Directions,
        present: BoolArray,
        clipped: FloatArray,
    ) -> dict[str, Any]:
        """Return fields of an observed step from a release minus the sum of the ``others``.

        Canaries have the lengths ``clipped``, or 0.
        """
        canaries = directions.weighted_sum(clipped)
        noise, total = (released - canaries) / self._norm, (others + canaries) / self._norm
        return {
            "noise": noise,
            "noise_apart": self._replaced(noise, directions, present),
            "total": total,
            "sum_norm": float(np.linalg.norm(total)),
            "num_canaries": float(np.count_nonzero(present)),
            "rounding": self._rounding,
        }

    def _replaced(self, noise: FloatArray, directions: Directions, present: BoolArray) -> FloatArray:
        """Return ``noise`` with our own along the canaries, scaled like the rest if that is too large."""
        count = int(np.count_nonzero(present))
        rest = noise - directions.weighted_sum(directions.project(noise) * present)
        scale = float(np.sqrt((rest @ rest) / max(noise.size - count, 1)))
        along = np.zeros(present.size)
        std = scale if scale > _MAX_SCALE * self._claimed else self._claimed
        along[present] = std * self._rng.standard_normal(count)
        replaced: FloatArray = rest + directions.weighted_sum(along)
        return replaced


class UnknownSumError(InputError):
    """A step sums something other than clipped gradients."""

    is_small = False
    """Whether it differs by so little that it may be due to clipping that is correct."""


class SumOfOthers:
    """The sum of the other gradients, ``total``, as the claim describes it; steps show whether it is theirs.

    Otherwise every score is off by the difference, the noise seems to have a mean, and a clipping fault would
    hide a canary.
    """

    def __init__(self, gradients: FloatArray, norm: float) -> None:
        self.total, self._norm = clipped_sum(gradients, norm), norm
        length = float(np.linalg.norm(self.total))
        self._direction = self.total / length if length > 0 else self.total
        self._along: list[float] = []  # the noise of each step, in this direction
        self._mean_sum, self._energy = np.zeros_like(self.total), 0.0

    def observe(self, released: FloatArray, directions: Directions, clipped: FloatArray) -> None:
        """Note a release minus the sum of the others, with canaries of the lengths ``clipped``."""
        noise = released - directions.weighted_sum(clipped)
        self._along.append(float(noise @ self._direction))
        self._mean_sum += noise
        self._energy += float(noise @ noise)

    def require_known(self, scores: FloatArray, present: BoolArray, num_variants: int = 1) -> None:
        """Raise if the steps certainly sum something else; arrays are steps x fixed canaries.

        If there are several variants of canaries, steps take them in turn.
        """
        off = max(_off_where_absent(scores, present, num_variants), self._off_along())
        if self.total.any() and off > 0:
            raise UnknownSumError(
                "Expected the step to release the sum of the clipped gradients plus noise, got a sum that "
                f"differs by {off:.3g} clipping norms where no canary is present: are the gradients not "
                "clipped or clipped to another norm, or is the sum or the noisy sum clipped again, or "
                "divided? Pass gradients of zeros instead, which no clipping changes."
            )

    def require_unshifted(self) -> None:
        """Raise if the same vector seems to be added in all steps: the noise and past sums would share it.

        Clipping by layer or to a slightly smaller norm adds one, because all steps sum the same gradients.
        """
        count = len(self._along)
        if not self.total.any() or count < _MIN_SCORES:
            return
        mean, error = float(np.mean(self._along)), float(np.std(self._along)) / math.sqrt(count)
        squared = float(self._mean_sum @ self._mean_sum) / count**2
        variance = (self._energy / count - squared) / (count - 1)  # of the mean, in all coordinates together
        scaled = squared * self.total.size / variance if variance > 0 else math.inf
        if abs(mean) > _SHIFTED * error or special.gammaincc(self.total.size / 2, scaled / 2) < _UNLIKELY:
            off = math.sqrt(max(squared - variance, 0.0)) / self._norm
            problem = UnknownSumError(
                "Expected the step to release the sum of the clipped gradients plus noise, got a sum that "
                f"seems to differ by {off:.2g} clipping norms."
            )
            problem.is_small = True
            raise problem

    def _off_along(self) -> float:
        """Return the mean of the noise in clipping norms, if it is that of a multiple of the sum; else 0."""
        count = len(self._along)
        if count < _MIN_SCORES:
            return 0.0
        mean, error = float(np.mean(self._along)), float(np.std(self._along)) / math.sqrt(count)
        energy = float(self._mean_sum @ self._mean_sum) / count**2
        excess = energy - (self._energy / count - energy) / (count - 1)  # without that of independent noise
        is_certain = abs(mean) > _CERTAIN * max(error, _ROUNDING * self._norm)
        return abs(mean) / self._norm if is_certain and mean**2 > _MOST * excess else 0.0


def _off_where_absent(scores: FloatArray, present: BoolArray, num_variants: int) -> float:
    """Return the largest mean score of an absent canary if these are certainly not 0 on average; else 0."""
    turns = [slice(first, None, num_variants) for first in range(min(num_variants, len(scores)))]
    counts = np.concatenate([(~present[turn]).sum(axis=0) for turn in turns])
    totals = np.concatenate([(~present * scores)[turn].sum(axis=0) for turn in turns])
    squared = np.concatenate([(~present * scores**2)[turn].sum(axis=0) for turn in turns])
    is_enough = counts >= (_MIN_SCORES if num_variants == 1 else _MIN_SCORES_EACH)
    counts, totals, squared = counts[is_enough], totals[is_enough], squared[is_enough]
    if counts.size == 0:
        return 0.0
    means = totals / counts
    variances = np.maximum(squared / counts - means**2, 0.0)
    if num_variants > 1:  # few scores each, so they share an unbiased variance
        variances = np.full(counts.size, (counts * variances).sum() / (counts - 1).sum())
    squares = counts * means**2 / np.maximum(variances, _ROUNDING**2)
    # the expectation is 1
    is_certain = squares.mean() > 2 + _CERTAIN * np.sqrt(2 / counts.size)
    return float(np.abs(means).max()) if is_certain else 0.0


def is_refuted(recorder: Recorder) -> bool:
    """Return whether the recorded scores refute the claimed privacy at every usual confidence."""
    try:
        return PRIVACY in recorder.audit(confidence=_ALMOST_CERTAIN).refuted
    except InputError:  # no verdict, because canaries do not arrive
        return False


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
