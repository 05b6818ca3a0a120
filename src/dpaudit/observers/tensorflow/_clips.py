"""What the two families of private optimizers clip with, and what they say of themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import tensorflow as tf
from tensorflow_privacy import GaussianSumQuery
from tensorflow_privacy.privacy.optimizers import dp_optimizer_keras_vectorized

from dpaudit.errors import InputError

__all__ = ["Clip", "clip_of"]


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
