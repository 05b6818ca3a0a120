"""What happens outside of compiled code: coins are thrown, and scores are kept.

What the gradients since the last release have in them. A recorder that compiled steps write into.
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
import numpy as np
from jax.experimental import io_callback

from dpaudit._types import BoolArray, FloatArray
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import Vectors
from dpaudit.recording import Recorder


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


class StepBarrier:
    """Waits for compiled steps that were started and may not be finished yet.

    Code that is called from inside of a step does not wait, which would be for ever.
    """

    def __init__(self) -> None:
        self._here = threading.local()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark what is called from inside of a step."""
        self._here.in_step = True
        try:
            yield
        finally:
            self._here.in_step = False

    def wait(self) -> None:
        """Return when all steps are done, or at once inside of a step."""
        if not getattr(self._here, "in_step", False):
            jax.effects_barrier()  # type: ignore[no-untyped-call]


class Host:
    """The part of the observer that compiled steps call, in their order.

    A step begins with the first gradient since the last release. Its canaries join there; of further
    gradients, if several are added up, only the batch is noted. ``num_releases`` are added up to one step.
    What arrives at the release has to be the sum of these gradients, or a multiple of it.
    """

    def __init__(self, recorder: Recorder, draws: Any, barrier: StepBarrier, num_releases: int = 1) -> None:
        self.draws = draws
        self.norm = 0.0  # what one example may add; known when the training has begun
        self._recorder, self._barrier, self._num_releases = recorder, barrier, num_releases
        self.scale = Scale()
        self._pending: Pending | None = None
        self._present: BoolArray | None = None
        self._scores: list[FloatArray] = []
        self._noisy: list[tuple[FloatArray, FloatArray]] = []
        self.leaves: tuple[int, ...] = ()  # of the places where noise is looked at
        self.precision = 0.0
        self._vectors: Vectors | None = None
        self._outside: dict[str, Callable[..., Any]] = {}
        self.raised: Exception | None = None

    def directions(self, num_parameters: int) -> Vectors:
        """Where the canaries of this step point; inside of compiled code."""
        if self._vectors is None:
            self._vectors = Vectors.of(self.draws.directions(0, num_parameters))
        if num_parameters != self._vectors.num_parameters:
            raise InputError(
                f"Expected gradients of {self._vectors.num_parameters} numbers in every step, got "
                f"{num_parameters}."
            )
        if not self.draws.canary.moving:
            return self._vectors
        shapes = jax.tree.map(shape_of, (self._vectors.values, self._vectors.coordinates))
        values, coordinates = self.call(self._moved, shapes)
        return Vectors(values, coordinates, num_parameters)

    def _moved(self) -> tuple[Any, Any]:
        assert self._vectors is not None
        index, size = self._recorder.num_done, self._vectors.num_parameters
        found = Vectors.of(self.draws.directions(index, size))
        return found.values, found.coordinates

    def joins(self, num_canaries: int) -> jax.Array:
        """1 for each canary that joins this gradient; else 0."""
        found: jax.Array = self.call(self._joins, shape_of(np.zeros(num_canaries, np.float32)))
        return found

    def _joins(self) -> FloatArray:
        if self._present is not None:
            return np.zeros(self.draws.num_canaries, np.float32)
        self._present = self.draws.coins(self._recorder.num_done)
        return self._present.astype(np.float32)

    def note(self, batch: jax.Array, joined: jax.Array, stray: jax.Array) -> None:
        """Keep the products of a gradient without and with canaries; ``stray`` is no multiple of any."""
        self.call(self._note, None, batch, joined, stray)

    def _note(self, batch: Any, joined: Any, stray: Any) -> None:
        if stray:
            raise InputError(
                "Expected a gradient function that only clips, scales and adds up, got one that also adds "
                "something of its own or changes directions: canaries cannot be told from it. Do that after "
                "the noise."
            )
        found = Pending.of(batch, joined)
        self._pending = found if self._pending is None else self._pending.plus(found)

    def release(
        self, products: jax.Array, arrived: jax.Array, noisy: tuple[jax.Array, jax.Array], tolerance: float
    ) -> jax.Array:
        """Keep the scores of a release; returns what the canaries are in that which ``arrived`` for it.

        ``noisy`` is what was released at some places, and what went into it there.
        """
        room = np.float32(tolerance)
        found: jax.Array = self.call(self._release, shape_of(products), products, arrived, *noisy, room)
        return found

    def _release(self, products: Any, arrived: Any, after: Any, before: Any, tolerance: Any) -> FloatArray:
        pending, scale = self._arrived(arrived, tolerance)
        self._keep((np.asarray(products, np.float64) - scale * pending.batch) / self.norm, after, before)
        return (scale * pending.inserted).astype(np.float32)

    def _arrived(self, arrived: Any, tolerance: Any) -> tuple[Pending, float]:
        """What was pending, and by what the loop multiplied it."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise InputError(
                "Expected the gradient function of observe() to be called before each update of the "
                "privatizer; it was not."
            )
        try:
            scale = self.scale.of(pending, np.asarray(arrived, np.float64), self.norm, float(tolerance))
        except InputError:
            # what was interrupted is over: the next step is a new one
            self._present, self._scores, self._noisy = None, [], []
            raise
        return pending, scale

    def _keep(self, scores: FloatArray, after: Any, before: Any) -> None:
        """The scores of one release, and what it was at some places after and before the noise."""
        self._scores.append(scores)
        self._noisy.append((np.asarray(after, np.float64), np.asarray(before, np.float64)))
        if len(self._scores) == self._num_releases:
            self._end_step()

    def _end_step(self) -> None:
        scores, self._scores = np.sum(self._scores, axis=0), []
        present, self._present = self._present, None
        (after, before), self._noisy = np.sum(self._noisy, axis=0), []
        self._recorder.noise.observe(after, before, self.leaves, norm=self.norm, eps=self.precision)
        self._recorder.record(scores, present)

    def call(self, function: Callable[..., Any], result: Any, *args: Any) -> Any:
        """Call ``function`` outside, whenever the compiled code comes here, and in this order."""
        outside = self._outside.setdefault(function.__name__, partial(self._called, function))
        return io_callback(outside, result, *args, ordered=True)  # the same one, or it is compiled anew

    def _called(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._barrier.in_step():
            try:
                return function(*values)
            except Exception as error:
                self.raised = error  # it leaves compiled code as another one
                raise


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """The shape and the type of numbers that an array has."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
