"""What happens outside of compiled code: coins are thrown, and scores are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback

from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._pending import Pending, Scale
from dpaudit.observers.jax_privacy._recorder import WaitingRecorder
from dpaudit.observers.jax_privacy._vectors import Vectors
from dpaudit.stats._types import BoolArray, FloatArray

__all__ = ["Host", "shape_of"]


class Host:
    """The part of the observer that compiled steps call, in their order.

    A step begins with the first gradient since the last release. Its canaries join there; of further
    gradients, if several are added up, only the batch is noted. ``num_releases`` are added up to one step.
    What arrives at the release has to be the sum of these gradients, or a multiple of it.
    """

    def __init__(self, recorder: WaitingRecorder, draws: Any, num_releases: int = 1) -> None:
        self.draws = draws
        self.norm = 0.0  # what one example may add; known when the training has begun
        self._recorder, self._num_releases = recorder, num_releases
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
        with self._recorder.in_step():
            try:
                return function(*values)
            except Exception as error:
                self.raised = error  # it leaves compiled code as another one
                raise


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """The shape and the type of numbers that an array has."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
