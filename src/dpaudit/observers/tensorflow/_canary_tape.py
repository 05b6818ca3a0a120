"""A tape that says of canaries what a tape says of examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from dpaudit.errors import InputError
from dpaudit.observers.tensorflow._canaries import Canaries, parts_of

__all__ = ["CanaryTape"]


class CanaryTape:
    """What an optimizer asks for the gradients of its microbatches; those of canaries come after the others.

    The losses of canaries only keep their places: they depend on nothing, and cost no pass through the model.
    ``draw`` gives all canaries, present or not, for so many parameters; each is ``length`` long.
    """

    def __init__(self, tape: Any, *, present: Any, length: Any, draw: Callable[[int], Canaries]) -> None:
        self._tape, self._length, self._draw = tape, length, draw
        self.present = present
        self.num_present = tf.reduce_sum(tf.cast(present, tf.int32))

    def __enter__(self) -> CanaryTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def watch(self, tensor: Any) -> None:
        """As a tape does."""
        self._tape.watch(tensor)

    def with_places(self, loss: Any, num_microbatches: Any) -> Any:
        """The losses of examples, and a microbatch of zeros for each canary that is present."""
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank == 0:
            raise InputError(
                "Expected a loss for each example, got their mean or sum: give the loss reduction='none', "
                "so that TF Privacy has something to clip."
            )
        num_examples = tf.shape(loss)[0]
        self.num_microbatches = num_examples if num_microbatches is None else num_microbatches
        self.examples_each = num_examples // self.num_microbatches
        places = tf.concat([[self.num_present * self.examples_each], tf.shape(loss)[1:]], axis=0)
        return tf.concat([loss, tf.zeros(places, loss.dtype)], axis=0)

    def jacobian(self, target: Any, sources: list[Any], **options: Any) -> list[Any]:
        """The gradient of each microbatch, and of each canary that is present."""
        with self._tape:
            own = target[: self.num_microbatches]
        self.rows = self._tape.jacobian(own, sources, **options)
        self.canaries = self._draw(sum(source.shape.num_elements() for source in sources))
        self.canary_rows = parts_of(self.canaries.rows(self._length), sources)
        pairs = zip(self.rows, self.canary_rows, strict=True)
        return [self._joined(rows, canaries) for rows, canaries in pairs]

    def _joined(self, rows: Any, canaries: Any) -> Any:
        if rows is None:  # a variable that the loss does not use; the optimizer has a sentence for it
            return None
        return tf.concat([rows, tf.boolean_mask(canaries, self.present)], axis=0)
