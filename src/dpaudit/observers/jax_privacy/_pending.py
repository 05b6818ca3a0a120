"""What the gradients since the last release have in them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import FloatArray

__all__ = ["Pending", "Scale"]


@dataclass(frozen=True, eq=False)
class Pending:
    """Products of the canaries' directions with the sum of a batch, and with what the loop got for it."""

    batch: FloatArray
    joined: FloatArray  # the batch and the canaries that are present

    @classmethod
    def of(cls, batch: object, joined: object) -> Pending:
        """In the precision that sums of many gradients need."""
        return cls(np.asarray(batch, dtype=np.float64), np.asarray(joined, dtype=np.float64))

    def plus(self, other: Pending) -> Pending:
        """The two added up."""
        return Pending(self.batch + other.batch, self.joined + other.joined)

    @property
    def inserted(self) -> FloatArray:
        """The canaries alone."""
        return self.joined - self.batch


class Scale:
    """By what a loop multiplies the sum before the noise: one number, the same in all steps.

    Only then is it known what of the sum is canaries. A factor that changes from step to step could depend
    on the canaries, and with it the weights. Unless ``free``, it has to be 1, because the claim is read from
    what the gradient function says of its sum.
    """

    def __init__(self) -> None:
        self.free = False
        self._known: float | None = None

    def of(self, pending: Pending, arrived: FloatArray, norm: float, tolerance: float) -> float:
        """The factor, if ``arrived`` is a multiple of the sum; one example may add ``norm`` to it."""
        joined = pending.joined
        if not (np.isfinite(joined).all() and np.isfinite(arrived).all()):
            raise InputError("Expected finite gradients, got some that are not: the training diverged.")
        scale = self._known or _fitted(joined, arrived)
        room = tolerance * (norm + scale * float(np.abs(joined).max()))
        if not (0 < scale < math.inf and (np.abs(arrived - scale * joined) <= room).all()):
            raise InputError(
                "Expected the privatizer to get the sum of all gradients since its last update, or the same "
                "multiple of it in every step, got something else: call the gradient function that "
                "observe() was given, not the one that it returned, for what is not part of the update (such "
                "as logging, or a first call), and add what is no gradient of examples after the noise."
            )
        if abs(scale - 1) <= tolerance:
            scale = 1.0
        if scale != 1 and not self.free:
            raise InputError(
                f"Expected the privatizer to get the sum that the gradient function returned, got it times "
                f"{scale:.6g}: if that is meant, pass max_grad_norm={scale * norm:.6g}, what one example may "
                "add then, or let clipped_grad divide (normalize_by=...)."
            )
        if pending.inserted.any():  # else there is nothing that it could be wrong about
            self._known = scale
        return scale


def _fitted(joined: FloatArray, arrived: FloatArray) -> float:
    """The factor that fits best; any one does, if there is nothing to be multiplied."""
    length = float(joined @ joined)
    return float(arrived @ joined) / length if length > 0 else 1.0
