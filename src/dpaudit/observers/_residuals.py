"""The noise of a step function: its release minus the sum of clipped gradients that it should contain.

:class:`KnownSum` describes the noise, and raises if the step computes a different sum. :func:`sum_rounding`
bounds the rounding error of a sum in single precision.
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
_MIN_STEPS = 20  # the mean of fewer is too uncertain
_ROUNDING = 1e-2  # in clipping norms: tolerance for a step without noise
_ALMOST_CERTAIN = 1 - 1e-6  # above that of an audit, also of one of a thousand tests with 95 % together
_CERTAIN = 10.0  # standard errors
_SHIFTED = 3.5  # standard errors: fewer than those of a finding
_UNLIKELY = 1e-4  # p-value, smaller for noise that was drawn independently in all steps
_MOST = 0.2  # of the squared mean of the noise: up to 0.25 if layers are clipped, 0.9 if all are too short
_FAR = 3.0  # clipping norms: 1.8 to 2.1 if layers of 50 gradients are clipped, 5 if gradients are doubled
_SAFETY = 4.0  # margin for other orders of summation and for the rounding of clipping


class UnknownSumError(InputError):
    """A step sums something other than clipped gradients."""

    is_small = False
    """Whether it differs by so little that it may be due to clipping that is correct."""


class KnownSum:
    """The sum of the other gradients, ``total``, as the claim describes it; steps show whether it is theirs.

    Otherwise every score is off by the difference, the noise seems to have a mean, and a clipping fault would
    hide a canary.

    A canary that is not clipped as claimed leaves a trace in the noise. So a second version of the noise has
    our own along each present canary: it is normal and independent if the noise of the step is, whatever
    remains of a canary in the release.
    """

    def __init__(
        self,
        gradients: Any,
        *,
        max_grad_norm: float,
        noise_multiplier: float | None,
        rng: np.random.Generator,
    ) -> None:
        self.total = clipped_sum(as_numpy(gradients), max_grad_norm)
        self._norm, self._claimed, self._rng = max_grad_norm, noise_multiplier, rng
        self._rounding = sum_rounding(gradients, max_grad_norm) / max_grad_norm
        length = float(np.linalg.norm(self.total))
        self._direction = self.total / length if length > 0 else self.total
        self._along: list[float] = []  # the noise of each step, in this direction
        self._mean_sum, self._energy = np.zeros_like(self.total), 0.0

    def observe(
        self, released: FloatArray, directions: Directions, present: BoolArray, clipped: FloatArray
    ) -> dict[str, Any]:
        """Note a release minus the total; return fields of an observed step if the noise can be tested.

        Canaries have the lengths ``clipped``, or 0.
        """
        canaries = directions.weighted_sum(clipped)
        noise = released - canaries
        self._along.append(float(noise @ self._direction))
        self._mean_sum += noise
        self._energy += float(noise @ noise)
        if self._claimed is None:
            return {}
        total = (self.total + canaries) / self._norm
        return {
            "noise": noise / self._norm,
            "noise_apart": self._replaced(noise / self._norm, self._claimed, directions, present),
            "total": total,
            "sum_norm": float(np.linalg.norm(total)),
            "num_canaries": float(np.count_nonzero(present)),
            "rounding": self._rounding,
        }

    def _replaced(
        self, noise: FloatArray, claimed: float, directions: Directions, present: BoolArray
    ) -> FloatArray:
        """Return ``noise`` with our own along the canaries, scaled like the rest if that is too large."""
        count = int(np.count_nonzero(present))
        rest = noise - directions.weighted_sum(directions.project(noise) * present)
        scale = float(np.sqrt((rest @ rest) / max(noise.size - count, 1)))
        along = np.zeros(present.size)
        along[present] = self._rng.standard_normal(count)
        along *= scale if scale > _MAX_SCALE * claimed else claimed
        replaced: FloatArray = rest + directions.weighted_sum(along)
        return replaced

    def require_known(self) -> None:
        """Raise if the same vector seems to be added in all steps: the noise and past sums would share it.

        It is small if the sum may be that of gradients that are clipped by layer, because all steps sum the
        same ones.
        """
        count = len(self._along)
        if not self.total.any() or count < _MIN_STEPS:
            return
        mean, error = abs(float(np.mean(self._along))), float(np.std(self._along)) / math.sqrt(count)
        squared = float(self._mean_sum @ self._mean_sum) / count**2
        variance = (self._energy / count - squared) / (count - 1)  # of the mean, in all coordinates together
        scaled = squared * self.total.size / variance if variance > 0 else math.inf
        if mean <= _SHIFTED * error and special.gammaincc(self.total.size / 2, scaled / 2) >= _UNLIKELY:
            return
        excess = max(squared - variance, 0.0)  # without that of independent noise
        off, is_certain = math.sqrt(excess) / self._norm, mean > _CERTAIN * max(error, _ROUNDING * self._norm)
        problem = UnknownSumError(
            "The step must release the sum of the clipped gradients plus noise, but the sum differs by "
            f"{off:.3g} clipping norms where no canary is present: are the gradients not clipped or clipped "
            "to another norm, or is the sum or the noisy sum clipped again, or divided? Pass gradients of "
            "zeros instead, which no clipping changes."
        )
        problem.is_small = off <= _FAR and not (is_certain and mean**2 > _MOST * excess)
        raise problem


def clipped_sum(gradients: FloatArray, norm: float) -> FloatArray:
    """Return the contribution of gradients, one per row, to a correct sum; the adversary knows them."""
    total: FloatArray = _clipped(gradients, norm).sum(axis=0)
    return total


def _clipped(gradients: FloatArray, norm: float) -> FloatArray:
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped: FloatArray = gradients / np.maximum(1.0, lengths / norm)
    return clipped


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
