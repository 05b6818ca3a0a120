"""The host side of compiled steps: outside of them, coins are drawn and scores are kept.

Compiled code calls :class:`Host` back, in the order of the steps. It knows what the gradients since the last
release have in them (:class:`PendingSum`), and by what a loop multiplied their sum (:class:`SumScale`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import Coins, Draws
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import flat
from dpaudit.recording import CoordinateSample, Recorder

NO_GRADIENT = (
    "Expected the gradient function of observe() to be called before each update of the privatizer; "
    "it was not."
)


class StepBarrier:
    """Waits for compiled steps that were started and may not be finished yet.

    Code that is called from inside of a step does not wait, which would take for ever.
    """

    def __init__(self) -> None:
        self._here = threading.local()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark the block as called from inside of a step."""
        self._here.in_step = True
        try:
            yield
        finally:
            self._here.in_step = False

    def wait(self) -> None:
        """Wait until all steps are done; return at once inside of a step."""
        if not getattr(self._here, "in_step", False):
            jax.effects_barrier()  # type: ignore[no-untyped-call]


class Host:
    """What compiled steps call, in their order.

    A step begins with the first gradient since the last release. Its canaries join there; of further
    gradients, if several are added up, only the batch is noted. ``num_releases`` are added up to one step.
    What arrives at the release has to be the sum of these gradients, or a multiple of it.
    """

    def __init__(
        self, recorder: Recorder, draws: Draws | Coins, barrier: StepBarrier, num_releases: int = 1
    ) -> None:
        self.norm = 0.0  # what one example may add; known when the training has begun
        self.scale = SumScale()
        self.raised: Exception | None = None
        self._recorder, self._draws, self._barrier = recorder, draws, barrier
        self._num_releases = num_releases
        self._pending: PendingSum | None = None
        self._present: BoolArray | None = None
        self._scores: list[FloatArray] = []
        self._noisy: list[tuple[FloatArray, FloatArray]] = []
        self._leaves: tuple[int, ...] = ()  # of the coordinates whose noise is logged
        self._precision = 0.0
        self._outside: dict[str, Callable[..., Any]] = {}

    @property
    def step(self) -> int:
        """The number of the step that is being made."""
        return self._recorder.num_done

    def call(self, function: Callable[..., Any], result: Any, *args: Any) -> Any:
        """Call ``function`` on the host whenever the compiled code gets here, in the order of the steps."""
        outside = self._outside.setdefault(function.__name__, partial(self._called, function))
        return io_callback(outside, result, *args, ordered=True)  # the same one, or it is compiled again

    def _called(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._barrier.in_step():
            try:
                return function(*values)
            except Exception as error:
                self.raised = error  # it leaves compiled code as another one
                raise

    def joins(self) -> jax.Array:
        """Return 1 for each canary that joins this gradient, else 0; inside of compiled code."""
        zeros = np.zeros(self._draws.num_canaries, np.float32)
        found: jax.Array = self.call(self._joins, shape_of(zeros))
        return found

    def _joins(self) -> FloatArray:
        if self._present is not None:
            return np.zeros(self._draws.num_canaries, np.float32)
        self._present = self._draws.coins(self.step)
        return self._present.astype(np.float32)

    def sampled(self, released: Any, arrived: Any) -> tuple[jax.Array, jax.Array]:
        """Return what came out of the privatizer, and what went in, where noise is logged."""
        sample = CoordinateSample.of([leaf.size for leaf in jax.tree.leaves(arrived)])
        self._leaves, self._precision = sample.leaves, precision_of(arrived)
        return flat(released)[sample.indices], flat(arrived)[sample.indices]

    def add_pending(self, batch: Any, joined: Any) -> None:
        """Add the products of a gradient without and with canaries; outside."""
        found = PendingSum.of(batch, joined)
        self._pending = found if self._pending is None else self._pending.plus(found)

    def pop_pending(self, arrived: Any, tolerance: Any) -> tuple[PendingSum, float]:
        """Return what was pending when this ``arrived``, and by what the loop multiplied it; outside."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise InputError(NO_GRADIENT)
        try:
            scale = self.scale.of(pending, np.asarray(arrived, np.float64), self.norm, float(tolerance))
        except InputError:
            # what was interrupted is over: the next step is a new one
            self._present, self._scores, self._noisy = None, [], []
            raise
        return pending, scale

    def keep(self, scores: FloatArray, after: Any, before: Any) -> None:
        """Keep the scores of one release, and what was sampled of it after and before the noise; outside."""
        self._scores.append(scores)
        self._noisy.append((np.asarray(after, np.float64), np.asarray(before, np.float64)))
        if len(self._scores) < self._num_releases:
            return
        scores, self._scores = np.sum(self._scores, axis=0), []
        present, self._present = self._present, None
        (after, before), self._noisy = np.sum(self._noisy, axis=0), []
        self._recorder.noise.observe(after, before, self._leaves, norm=self.norm, eps=self._precision)
        self._recorder.record(scores, present)


@dataclass(frozen=True, eq=False)
class PendingSum:
    """Products of the canaries' directions with the sum of a batch, and with what the loop got for it."""

    batch: FloatArray
    joined: FloatArray  # the batch and the canaries that are present

    @classmethod
    def of(cls, batch: object, joined: object) -> PendingSum:
        """Make it in the precision that sums of many gradients need."""
        return cls(np.asarray(batch, dtype=np.float64), np.asarray(joined, dtype=np.float64))

    def plus(self, other: PendingSum) -> PendingSum:
        """Return the two added up."""
        return PendingSum(self.batch + other.batch, self.joined + other.joined)

    @property
    def inserted(self) -> FloatArray:
        """The canaries alone."""
        return self.joined - self.batch


class SumScale:
    """The factor by which a loop multiplies the sum before the noise, the same in all steps.

    Only then is it known what of the sum is canaries. A factor that changes from step to step could depend
    on the canaries, and with it the weights. Unless ``free``, it has to be 1, because the claim is read from
    what the gradient function says of its sum.
    """

    def __init__(self) -> None:
        self.free = False
        self._known: float | None = None

    def of(self, pending: PendingSum, arrived: FloatArray, norm: float, tolerance: float) -> float:
        """Return the factor, if ``arrived`` is a multiple of the sum; one example may add ``norm`` to it."""
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
    """Return the factor that fits best; any one does, if there is nothing to be multiplied."""
    length = float(joined @ joined)
    return float(arrived @ joined) / length if length > 0 else 1.0


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and the type of numbers that an array has."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def precision_of(tree: Any) -> float:
    """Return the relative precision of the coarsest leaf."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))  # type: ignore[no-untyped-call]
