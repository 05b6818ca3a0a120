"""Clipping with TF Privacy's own code, and the tape that inserts canaries.

:func:`clip_for` returns an adapter for the clipping of an optimizer, or raises if it cannot be observed. A
:class:`CanaryTape` appends the gradients of canaries to those of microbatches, so that the optimizer adds
them to its sum.
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


class TensorFlowClip(ABC):
    """Clipping of records with the library's own code, which need not be correct."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        # traced once: otherwise an eager loop would build the same graph in each step
        self._traced = tf.function(self._vectorized, reduce_retracing=True, autograph=False)

    @property
    @abstractmethod
    def noise_multiplier(self) -> float:
        """The noise multiplier that the optimizer currently claims."""

    @property
    @abstractmethod
    def norm(self) -> Any:
        """The current clipping norm."""

    def clipped(self, rows: list[Any]) -> list[Any]:
        """Return the contribution of each record to the sum; ``rows`` are records x shape per variable."""
        clipped: list[Any] = self._traced(rows, self.norm)
        return clipped

    def _vectorized(self, rows: list[Any], norm: Any) -> Any:
        return tf.vectorized_map(lambda record: self._clip_one(record, norm), rows)

    @abstractmethod
    def _clip_one(self, record: list[Any], norm: Any) -> list[Any]: ...


class _QueryClip(TensorFlowClip):
    """``DPKeras...Optimizer``: a query clips and adds one record at a time."""

    @property
    def noise_multiplier(self) -> float:
        state = self._optimizer._global_state
        return float(state.stddev) / float(state.l2_norm_clip)

    @property
    def norm(self) -> Any:
        return tf.convert_to_tensor(self._optimizer._global_state.l2_norm_clip, tf.float32)

    def _clip_one(self, record: list[Any], norm: Any) -> list[Any]:
        nothing = [tf.zeros_like(leaf) for leaf in record]
        summed: list[Any] = self._optimizer._dp_sum_query.accumulate_record(norm, nothing, record)
        return summed


class _VectorizedClip(TensorFlowClip):
    """``VectorizedDPKeras...Optimizer``: a function clips all records at once."""

    @property
    def noise_multiplier(self) -> float:
        return float(self._optimizer._noise_multiplier)

    @property
    def norm(self) -> Any:
        return tf.convert_to_tensor(self._optimizer._l2_norm_clip, tf.float32)

    def _clip_one(self, record: list[Any], norm: Any) -> list[Any]:
        # looked up in its module, as the optimizer does
        clipped: list[Any] = dp_optimizer_keras_vectorized.clip_gradients_vmap(record, norm)
        return clipped


def clip_for(optimizer: Any) -> TensorFlowClip:
    """Return an adapter for the clipping of ``optimizer``, or raise an error if it cannot be observed."""
    query = getattr(optimizer, "_dp_sum_query", None)
    if query is None:
        hidden = "adds its noise during the update, where it cannot be observed"
        reason = hidden if hasattr(optimizer, "_noise_multiplier") else "is not private"
        raise InputError(
            f"A {_name(optimizer)} {reason}; pass an optimizer of TF Privacy such as DPKerasSGDOptimizer or "
            "VectorizedDPKerasAdamOptimizer."
        )
    if not isinstance(query, GaussianSumQuery):
        raise InputError(
            f"The optimizer's query must be a GaussianSumQuery, got a {type(query).__name__}, whose steps a "
            "DP-SGD claim does not describe."
        )
    return _VectorizedClip(optimizer) if hasattr(optimizer, "_l2_norm_clip") else _QueryClip(optimizer)


def _name(optimizer: Any) -> str:
    kind = type(optimizer)
    base = kind.__bases__[0].__name__
    return f"private {base}" if kind.__name__ == "DPOptimizerClass" else kind.__name__


class TensorFlowParamsReader:
    """A reader of the claimed parameters of a step that consists of ``calls_per_step`` calls."""

    def __init__(self, clip: TensorFlowClip, calls_per_step: int) -> None:
        self._clip, self._calls_per_step = clip, calls_per_step
        self._noises = {clip.noise_multiplier}

    def note_call(self) -> None:
        """Note the noise multiplier of this call, or of all calls of the graph that is being traced."""
        self._noises.add(self._clip.noise_multiplier)

    def __call__(self) -> DPSGDParams:
        if len(self._noises) > 1:  # steps differ, so the claimed noise multiplier must be given
            return DPSGDParams()
        return DPSGDParams(
            noise_multiplier=math.sqrt(self._calls_per_step) * next(iter(self._noises)),
            origins={"noise_multiplier": "the optimizer"},
        )


@dataclass(frozen=True, eq=False)
class CanaryTensors:
    """The directions of a step's canaries; see :class:`dpaudit.canaries.Directions`."""

    values: Any  # entries x canaries
    coordinates: Any  # the position of each value among all parameters
    lengths: Any  # of each canary before clipping, in clipping norms
    num_parameters: int

    def rows(self, norm: Any) -> Any:
        """Return a matrix (canaries x parameters), with the clipping norm ``norm``."""
        num_canaries = tf.shape(self.coordinates)[1]
        numbers = tf.broadcast_to(tf.range(num_canaries), tf.shape(self.coordinates))
        where = tf.stack([numbers, self.coordinates], axis=-1)
        return tf.scatter_nd(where, norm * self.lengths * self.values, [num_canaries, self.num_parameters])

    def project(self, vector: Any) -> Any:
        """Return the dot product of each direction with ``vector``."""
        return tf.reduce_sum(self.values * tf.gather(vector, self.coordinates), axis=0)


class CanaryTape:
    """A tape whose gradients are those of the microbatches, followed by those of the canaries.

    The losses of canaries are placeholders that depend on nothing and cost no pass through the model.
    ``draw`` returns all canaries, present or not, in the gradients of some variables.
    """

    def __init__(
        self, tape: Any, *, present: Any, norm: Any, draw: Callable[[list[Any]], CanaryTensors]
    ) -> None:
        self._tape, self._norm, self._draw = tape, norm, draw
        self.present = present
        self.num_present = tf.reduce_sum(tf.cast(present, tf.int32))

    def __enter__(self) -> CanaryTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def watch(self, tensor: Any) -> None:
        """Watch a tensor, like ``tf.GradientTape.watch``."""
        self._tape.watch(tensor)

    def pad_loss(self, loss: Any, num_microbatches: Any) -> Any:
        """Return the losses of examples, followed by a microbatch of zeros for each present canary."""
        loss = tf.convert_to_tensor(loss)
        if loss.shape.rank == 0:
            raise InputError(
                "The loss must have one number per example, because TF Privacy clips per example, got "
                "their mean or sum; construct the loss with reduction='none'."
            )
        num_examples = tf.shape(loss)[0]
        self.num_microbatches = num_examples if num_microbatches is None else num_microbatches
        self.microbatch_size = num_examples // self.num_microbatches
        padding = tf.concat([[self.num_present * self.microbatch_size], tf.shape(loss)[1:]], axis=0)
        return tf.concat([loss, tf.zeros(padding, loss.dtype)], axis=0)

    def jacobian(self, target: Any, sources: list[Any], **options: Any) -> list[Any]:
        """Return the gradients of all microbatches, followed by those of the present canaries."""
        with self._tape:
            losses = target[: self.num_microbatches]
        self.rows = self._tape.jacobian(losses, sources, **options)
        self.canaries = self._draw(sources)
        self.canary_rows = _split_like(self.canaries.rows(self._norm), sources)
        pairs = zip(self.rows, self.canary_rows, strict=True)
        return [self._appended(rows, canaries) for rows, canaries in pairs]

    def _appended(self, rows: Any, canaries: Any) -> Any:
        if rows is None:  # a variable that the loss does not use; the optimizer raises an error for it
            return None
        return tf.concat([rows, tf.boolean_mask(canaries, self.present)], axis=0)


def flat(leaves: list[Any]) -> Any:
    """Return the concatenation of all leaves as one vector in single precision."""
    return tf.concat([tf.reshape(tf.cast(leaf, tf.float32), [-1]) for leaf in leaves], axis=0)


def _split_like(rows: Any, variables: list[Any]) -> list[Any]:
    """Split a matrix (rows x parameters) into arrays of rows x shape, one per variable."""
    sizes = [variable.shape.num_elements() for variable in variables]
    pieces = zip(tf.split(rows, sizes, axis=-1), variables, strict=True)
    return [tf.cast(tf.reshape(piece, [-1, *like.shape]), like.dtype) for piece, like in pieces]
