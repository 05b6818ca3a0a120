"""What the two families of private optimizers clip with, and what they say of themselves.

What a private optimizer says of its noise. The canaries of one step, as tensors. A tape that says of canaries
what a tape says of examples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow_privacy import GaussianSumQuery
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_vectorized

from dpaudit.errors import InputError
from dpaudit.recording import DPSGDParams


class Clip(ABC):
    """Clips records with the library's own code, which need not be right."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        # traced once: without it an eager loop would build the same graph in each step
        self._traced = tf.function(self._vectorized, reduce_retracing=True, autograph=False)

    @property
    @abstractmethod
    def noise_multiplier(self) -> float:
        """The noise over the clipping norm that the optimizer claims, now."""

    @property
    @abstractmethod
    def norm(self) -> Any:
        """The clipping norm, now."""

    def clipped(self, rows: list[Any]) -> list[Any]:
        """What a sum gets of each record; ``rows`` are records x shape, for each variable."""
        clipped: list[Any] = self._traced(rows, self.norm)
        return clipped

    def _vectorized(self, rows: list[Any], norm: Any) -> Any:
        return tf.vectorized_map(lambda record: self._clip_one(record, norm), rows)

    @abstractmethod
    def _clip_one(self, record: list[Any], norm: Any) -> list[Any]: ...


class _QueryClip(Clip):
    """``DPKeras...Optimizer``: a query clips and adds one record after the other."""

    @property
    def noise_multiplier(self) -> float:
        state = self._optimizer._global_state
        return float(state.stddev) / float(state.l2_norm_clip)

    @property
    def norm(self) -> Any:
        return tf.convert_to_tensor(self._optimizer._global_state.l2_norm_clip, tf.float32)

    def _clip_one(self, record: list[Any], norm: Any) -> list[Any]:
        nothing = [tf.zeros_like(part) for part in record]
        summed: list[Any] = self._optimizer._dp_sum_query.accumulate_record(norm, nothing, record)
        return summed


class _VectorizedClip(Clip):
    """``VectorizedDPKeras...Optimizer``: a function clips all records at once."""

    @property
    def noise_multiplier(self) -> float:
        return float(self._optimizer._noise_multiplier)

    @property
    def norm(self) -> Any:
        return tf.convert_to_tensor(self._optimizer._l2_norm_clip, tf.float32)

    def _clip_one(self, record: list[Any], norm: Any) -> list[Any]:
        # looked up in its module, where the optimizer looks for it too
        clipped: list[Any] = dp_optimizer_keras_vectorized.clip_gradients_vmap(record, norm)
        return clipped


def clip_of(optimizer: Any) -> Clip:
    """The clip of an optimizer, or a sentence that says why there is none."""
    query = getattr(optimizer, "_dp_sum_query", None)
    if query is None:
        raise InputError(
            "Expected an optimizer of TF Privacy such as DPKerasSGDOptimizer or "
            f"VectorizedDPKerasAdamOptimizer, got a {_name(optimizer)}, which {_why_not(optimizer)}."
        )
    if not isinstance(query, GaussianSumQuery):
        raise InputError(
            f"Expected an optimizer whose query is a GaussianSumQuery, got a {type(query).__name__}: "
            "what it does in a step is not what a claim of DP-SGD says."
        )
    return _VectorizedClip(optimizer) if hasattr(optimizer, "_l2_norm_clip") else _QueryClip(optimizer)


def _name(optimizer: Any) -> str:
    kind = type(optimizer)
    base = kind.__bases__[0].__name__
    return f"private {base}" if kind.__name__ == "DPOptimizerClass" else kind.__name__


def _why_not(optimizer: Any) -> str:
    if hasattr(optimizer, "_noise_multiplier"):
        return "adds its noise inside of the update, where no observer sees it"
    return "is not private"


class Noise:
    """The noise of a step that ``calls_each`` calls make together; ``note`` is to be called in every one."""

    def __init__(self, clip: Clip, calls_each: int) -> None:
        self._clip, self._calls_each = clip, calls_each
        self._noted = {clip.noise_multiplier}

    def note(self) -> None:
        """The noise of this call, or of all calls of the graph that is being traced."""
        self._noted.add(self._clip.noise_multiplier)

    def terms(self) -> DPSGDParams:
        """What of a claim is known; of a noise that changes there is no claim of equal steps."""
        if len(self._noted) > 1:
            return DPSGDParams()
        return DPSGDParams(noise_multiplier=math.sqrt(self._calls_each) * next(iter(self._noted)))


@dataclass(frozen=True, eq=False)
class Canaries:
    """Where the canaries of a step point; see :class:`dpaudit.canaries.Directions`."""

    values: Any  # entries x canaries
    places: Any  # of the values among all parameters
    num_parameters: int

    def rows(self, length: Any) -> Any:
        """Canaries x parameters."""
        num_canaries = tf.shape(self.places)[1]
        numbers = tf.broadcast_to(tf.range(num_canaries), tf.shape(self.places))
        where = tf.stack([numbers, self.places], axis=-1)
        return tf.scatter_nd(where, length * self.values, [num_canaries, self.num_parameters])

    def project(self, vector: Any) -> Any:
        """The dot product of each direction with ``vector``."""
        return tf.reduce_sum(self.values * tf.gather(vector, self.places), axis=0)


def flat(parts: list[Any]) -> Any:
    """One vector of all parameters, in single precision."""
    return tf.concat([tf.reshape(tf.cast(part, tf.float32), [-1]) for part in parts], axis=0)


def parts_of(rows: Any, variables: list[Any]) -> list[Any]:
    """Rows x parameters as rows x shape, for each variable."""
    sizes = [variable.shape.num_elements() for variable in variables]
    pieces = zip(tf.split(rows, sizes, axis=-1), variables, strict=True)
    return [tf.cast(tf.reshape(part, [-1, *like.shape]), like.dtype) for part, like in pieces]


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
