"""Canaries in the steps of a private optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from dpaudit.errors import InputError
from dpaudit.observers._kept_noise import Places
from dpaudit.observers.tensorflow._canaries import Canaries, flat
from dpaudit.observers.tensorflow._canary_tape import CanaryTape
from dpaudit.observers.tensorflow._clips import Clip
from dpaudit.observers.tensorflow._noise import Noise
from dpaudit.observers.tensorflow._steps import Steps

__all__ = ["Observer"]


class Observer:
    """Lets canaries join the gradients of microbatches, and takes them off before the update.

    It stands in for ``_compute_gradients`` of the optimizer, which ``fit``, ``minimize`` and loops of one's
    own all call: eagerly, or once for a graph. So the graph asks for what changes from step to step.
    """

    def __init__(self, optimizer: Any, *, clip: Clip, scale: float, steps: Steps, noise: Noise) -> None:
        self._optimizer, self._clip, self._scale = optimizer, clip, scale
        self._steps, self._noise = steps, noise
        self.raised: Exception | None = None

    def attach(self) -> None:
        """Begin; everything is put back by ``detach``."""
        self._own = self._optimizer._compute_gradients
        self._was_patched = "_compute_gradients" in vars(self._optimizer)
        self._updates_before = self._num_updates()
        self._optimizer._compute_gradients = self._compute_gradients

    def detach(self) -> None:
        """Leave the optimizer as it was; what was traced meanwhile gets no canaries any more."""
        self._steps.is_on = False
        if self._was_patched:
            self._optimizer._compute_gradients = self._own
        else:
            del self._optimizer._compute_gradients

    def require_all_seen(self) -> None:
        """A graph that was traced before knows nothing of the observer."""
        updates = self._num_updates() - self._updates_before
        if updates > self._steps.num_calls:
            raise InputError(
                f"Expected to see each of the {updates} updates, got {self._steps.num_calls}: the training "
                "was traced before observe(). Call model.compile(...) again, or make the tf.function anew."
            )

    def _num_updates(self) -> int:
        return int(self._optimizer.iterations.numpy())

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """What the optimizer is asked for in each step."""
        if tape is None and not callable(loss):
            return self._own(loss, var_list, grad_loss, tape)  # it has a sentence for that
        with self._remembered():
            _require_one_replica()
            return self._observed(loss, var_list, grad_loss, tf.GradientTape() if tape is None else tape)

    def _observed(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> list[tuple[Any, Any]]:
        self._noise.note()
        call = _Call(self._steps, self._remembered)
        taped = CanaryTape(
            tape, present=call.present, length=self._scale * self._clip.norm, draw=call.canaries
        )
        with _attribute_kept(self._optimizer, "_num_microbatches") as number:
            if number is not None:
                self._optimizer._num_microbatches = number + taped.num_present
            if callable(loss):
                pairs = self._own(lambda: taped.with_places(loss(), number), var_list, grad_loss, taped)
            else:
                with tape:
                    loss = taped.with_places(loss, number)
                pairs = self._own(loss, var_list, grad_loss, taped)
        return self._scored(pairs, taped, call)

    def _scored(self, pairs: Any, taped: CanaryTape, call: _Call) -> list[tuple[Any, Any]]:
        """The gradients without the canaries, whose scores are recorded."""
        gradients, variables = zip(*pairs, strict=True)
        num_records = taped.num_microbatches + taped.num_present
        released = [part * tf.cast(num_records, part.dtype) for part in gradients]
        batch = [tf.reduce_sum(part, axis=0) for part in self._clip.clipped(taped.rows)]
        inserted = [_sum_where(taped.present, part) for part in self._clip.clipped(taped.canary_rows)]
        scores = taped.canaries.project(flat(released) - flat(batch)) / self._clip.norm
        places = Places.of([variable.shape.num_elements() for variable in variables])
        self._steps.leaves = places.leaves
        self._steps.precision = max(_precision(part) for part in gradients)
        noisy = [tf.gather(flat(parts), places.indices) for parts in (released, batch, inserted)]
        call.end(scores, taped.examples_each, tf.stack([noisy[0], noisy[1] + noisy[2]]) / self._clip.norm)
        without = [part - canaries for part, canaries in zip(released, inserted, strict=True)]
        means = [part / tf.cast(taped.num_microbatches, part.dtype) for part in without]
        return list(zip(means, variables, strict=True))

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        """A graph turns every mistake into one of its own: the context gives back the first one."""
        try:
            yield
        except Exception as error:
            self.raised = self.raised or error
            raise


class _Call:
    """What a graph asks :class:`Steps` for, each time that it runs."""

    def __init__(self, steps: Steps, remembered: Callable[[], AbstractContextManager[None]]) -> None:
        self._steps, self._remembered = steps, remembered
        self._number, self.present = self._ask(steps.begin, [], [tf.int64, tf.bool])
        self.present.set_shape([steps.num_canaries])

    def canaries(self, num_parameters: int) -> Canaries:
        """Where the canaries point."""
        self._steps.directions(0, num_parameters)  # so that a mistake is told before anything is traced
        inputs, kinds = [self._number, num_parameters], [tf.float32, tf.int32]
        values, places = self._ask(self._steps.directions, inputs, kinds)
        for part in (values, places):
            part.set_shape([None, self._steps.num_canaries])
        return Canaries(values, places, num_parameters)

    def end(self, scores: Any, examples_each: Any, noisy: Any) -> None:
        """The scores of this call; what was released at some places, and the sum that went into it."""
        self._ask(self._steps.end, [self._number, scores, examples_each, noisy], [])

    def _ask(self, function: Callable[..., Any], inputs: list[Any], kinds: list[Any]) -> Any:
        def asked(*values: Any) -> Any:
            with self._remembered():
                return function(*values)

        return tf.numpy_function(asked, inputs, kinds)


def _sum_where(present: Any, rows: Any) -> Any:
    """The sum of the rows that are present; another one need not even be a number."""
    mask = tf.reshape(present, [-1, *[1] * (rows.shape.rank - 1)])
    return tf.reduce_sum(tf.where(mask, rows, tf.zeros_like(rows)), axis=0)


def _precision(part: Any) -> float:
    return float(tf.experimental.numpy.finfo(part.dtype.as_numpy_dtype).eps)


def _require_one_replica() -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise InputError(
            f"Expected a training on one device, got a strategy with {replicas}: each of them adds "
            "noise of its own, and no observer sees their sum."
        )


@contextmanager
def _attribute_kept(owner: Any, name: str) -> Iterator[Any]:
    value = getattr(owner, name)
    try:
        yield value
    finally:
        setattr(owner, name, value)
