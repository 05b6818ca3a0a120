"""``observe()`` for TF Privacy: a context manager around ``fit`` or a loop, and the observed step.

:class:`TensorFlowObserver` replaces ``_compute_gradients`` of the optimizer: there canaries are added to the
sum before the noise (through a :class:`CanaryTape`), the release is read, and the canaries are subtracted
again before the update. A graph is traced once; values that change from step to step are exchanged with
:class:`GraphCallbacks`, which uses NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Unpack

import numpy as np
import tensorflow as tf

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.canaries import GradientCanary, ParameterLayout
from dpaudit.diagnostics import BatchRecord, CoordinateSample, NoiseMaximum, ObservedStep
from dpaudit.errors import InputError
from dpaudit.observers._arrays import attribute_restored, replaced
from dpaudit.observers._session import (
    MIXTURE,
    AuditedSteps,
    AuditOptions,
    observer,
    session,
)
from dpaudit.observers.tensorflow._clipping import (
    CanaryTape,
    CanaryTensors,
    TensorFlowClip,
    TensorFlowParamsReader,
    clip_for,
    flat,
)
from dpaudit.recording import Recorder, TrainingInfo


@observer
@session
def observe(
    optimizer: Any,
    *,
    canary: GradientCanary = MIXTURE,
    num_canaries: int = 64,
    **options: Unpack[AuditOptions],
) -> Iterator[Recorder]:
    """Audit the steps inside the ``with`` block.

    Canaries pass through the optimizer's own clipping, sum and noise, and are subtracted before the update,
    so that the weights are the same as without the audit, up to rounding.

    Args:
        optimizer: One of TF Privacy's, such as ``DPKerasSGDOptimizer`` or ``VectorizedDPKerasAdamOptimizer``.
        canary: The kind of canary.
        num_canaries: Their number in each step.
        options: :class:`~dpaudit.observers.AuditOptions`. The optimizer has no sample rate, so pass the
            claim.

    Returns:
        A ``with`` block that gives the recorder.

    Raises:
        InputError: The optimizer is not one of these, or a step was traced before the block.

    Example:
        ``with observe(optimizer, claim=claim) as recorder: model.fit(x, y)``

    """
    clip = clip_for(optimizer)
    calls_per_step = getattr(optimizer, "gradient_accumulation_steps", 1)
    params = TensorFlowParamsReader(clip, calls_per_step)
    audited = AuditedSteps(
        canary,
        num_canaries,
        params,
        batches=BatchRecord(
            "how batches are drawn: the claim assumes Poisson sampling, but fit() shuffles the data; to test "
            "batches, pass them to recorder.observe_batch(indices, num_examples) in each step"
        ),
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=float(clip.norm)),
        **options,
    )
    num_before = int(optimizer.iterations.numpy())
    callbacks = GraphCallbacks(audited, calls_per_step=calls_per_step, calls_before=num_before)
    installed = TensorFlowObserver(optimizer, clip=clip, callbacks=callbacks, params=params)
    try:
        with installed.installed():
            yield audited.steps.recorder
    except Exception as error:
        if installed.raised is None or type(installed.raised).__name__ not in str(error):
            raise  # an error of the user, after ours was handled
        raise installed.raised from None
    installed.end_if_unobserved()


class TensorFlowObserver:
    """An observer that adds canaries to the gradients of microbatches and subtracts them before the update.

    It replaces ``_compute_gradients`` of the optimizer, which ``fit``, ``minimize`` and custom loops all
    call, eagerly or once per graph.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        clip: TensorFlowClip,
        callbacks: GraphCallbacks,
        params: TensorFlowParamsReader,
    ) -> None:
        self._optimizer, self._clip = optimizer, clip
        self._callbacks, self._params = callbacks, params
        self._steps = callbacks.audited.steps
        self.raised: Exception | None = None
        self._own = optimizer._compute_gradients
        self._updates_before = self._num_updates()
        self._read_weights: Callable[[], Any] | None = None  # since the first call

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the steps inside the block; graphs that were traced there get no canaries afterwards."""
        with replaced(self._optimizer, "_compute_gradients", self._compute_gradients):
            try:
                yield
            finally:
                self._callbacks.is_active = False
                if self._read_weights is not None:
                    with self._steps.guard():
                        self._steps.history.end(self._read_weights())

    def end_if_unobserved(self) -> None:
        """End the observation if updates were made by a graph traced before ``observe()``."""
        updates, num_calls = self._num_updates() - self._updates_before, self._callbacks.num_calls
        if updates > num_calls and not self._steps.is_over:
            self._steps.end(
                f"only {num_calls} of {updates} updates were observed, because the step was traced before "
                "observe(): call model.compile(...) again, or create a new tf.function"
            )

    def _num_updates(self) -> int:
        return int(self._optimizer.iterations.numpy())

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """Replace the optimizer's own method, which is called in each step."""
        begun = None
        if tape is not None or callable(loss):  # anything else is an error of the optimizer
            with self._keeping_first_error():
                begun = self._steps.guarded(self._begun)(var_list)
        if begun is None:
            return self._own(loss, var_list, grad_loss, tape)
        with self._keeping_first_error():
            tape = tf.GradientTape() if tape is None else tape
            return self._observed(loss, var_list, grad_loss, tape, begun)

    def _begun(self, var_list: Any) -> _GraphCall:
        _check_one_replica()
        self._params.note_call()
        call = _GraphCall(self._callbacks, self._keeping_first_error)
        if not callable(var_list):  # otherwise the loss may create its variables
            call.canaries(tf.nest.flatten(var_list))
        return call

    def _observed(
        self, loss: Any, var_list: Any, grad_loss: Any, tape: Any, call: _GraphCall
    ) -> list[tuple[Any, Any]]:
        taped = CanaryTape(tape, present=call.present, norm=self._clip.norm, draw=call.canaries)
        number = self._optimizer._num_microbatches
        with attribute_restored([self._optimizer], "_num_microbatches"):
            if number is not None:
                self._optimizer._num_microbatches = number + taped.num_present
            if callable(loss):
                pairs = self._own(lambda: taped.pad_loss(loss(), number), var_list, grad_loss, taped)
            else:
                with tape:
                    loss = taped.pad_loss(loss, number)
                pairs = self._own(loss, var_list, grad_loss, taped)
        gradients, variables = zip(*pairs, strict=True)
        num_records = taped.num_microbatches + taped.num_present
        released = [leaf * tf.cast(num_records, leaf.dtype) for leaf in gradients]
        inserted = [_sum_where(taped.present, leaf) for leaf in self._clip.clipped(taped.canary_rows)]
        self._steps.guarded(self._score)(released, inserted, variables, taped, call)
        without = [leaf - canaries for leaf, canaries in zip(released, inserted, strict=True)]
        means = [leaf / tf.cast(taped.num_microbatches, leaf.dtype) for leaf in without]
        return list(zip(means, variables, strict=True))

    def _score(
        self, released: list[Any], inserted: list[Any], variables: Any, taped: CanaryTape, call: _GraphCall
    ) -> None:
        """Score the canaries in the released sums."""
        norm = self._clip.norm
        examples = [tf.reduce_sum(leaf, axis=0) for leaf in self._clip.clipped(taped.rows)]
        total = [leaf + canaries for leaf, canaries in zip(examples, inserted, strict=True)]
        self._callbacks.note_precision([leaf.dtype.as_numpy_dtype for leaf in released])
        coordinates = CoordinateSample.of([variable.shape.num_elements() for variable in variables])
        self._read_weights = partial(_sampled, variables, coordinates)
        vectors = [_sampled(leaves, coordinates) for leaves in (released, total, examples, variables)]
        lengths = _row_norms(taped.rows)
        numbers = {
            "clipping_norm": norm,
            "num_rows": taped.num_microbatches,
            "microbatch_size": taped.microbatch_size,
            "example_sum_norm": _norm(examples) / norm,
            "sum_limit": tf.reduce_sum(tf.minimum(lengths / norm, 1.0)),
            "max_row_norm": tf.reduce_max(tf.concat([[0.0], lengths / norm], axis=0)),
            "sum_norm": _norm(total),
            "max_noise": _largest_difference(released, total),
        }
        scores = taped.canaries.project(flat(released) - flat(examples)) / norm
        call.end(scores, tf.stack(vectors), numbers)

    @contextmanager
    def _keeping_first_error(self) -> Iterator[None]:
        """Keep the first error for ``observe`` to raise: a graph raises a different error."""
        try:
            yield
        except Exception as error:
            self.raised = self.raised or error
            raise


class GraphCallbacks:
    """Callbacks that provide canaries to each call of a traced graph and record its scores.

    If gradients are accumulated, several calls make one step: canaries are added in the first call, and the
    sum is recorded. A graph outlives its observer; it then gets no canaries.
    """

    def __init__(self, audited: AuditedSteps, *, calls_per_step: int, calls_before: int) -> None:
        self.audited, self._calls_per_step = audited, calls_per_step
        self._before = calls_before % calls_per_step  # a step that has already started gets no canaries
        self._present: BoolArray | None = None  # in the step in progress, if it has started here
        self._calls: list[ObservedStep] = []  # of the step in progress
        self.num_canaries = audited.plan.num_canaries  # present or not
        self.num_calls = 0
        self.is_active = True

    def note_precision(self, dtypes: Sequence[Any]) -> None:
        """Note the types of the gradients; the least precise counts."""
        self.audited.eps = max(float(tf.experimental.numpy.finfo(dtype).eps) for dtype in dtypes)

    def begin(self) -> tuple[IntArray, BoolArray]:
        """Return the number of this call and which canaries are present in it."""
        number = np.asarray(self.num_calls)
        if not self.is_active or self.audited.steps.is_over or self._is_inside_step:
            return number, np.zeros(self.num_canaries, np.bool_)
        self._present, self._calls = self.audited.present, []
        return number, self._present

    def directions(self, _: int) -> tuple[Any, Any, Any]:
        """Return values, coordinates and lengths, in clipping norms, of the canaries of this call."""
        directions = self.audited.directions
        values, coordinates = directions.padded()
        lengths = self.audited.plan.canary.lengths(directions).astype(np.float32)
        return values.astype(np.float32), coordinates.astype(np.int32), lengths

    def end(self, number: int, scores: FloatArray, vectors: FloatArray, numbers: dict[str, float]) -> None:
        """Add a call; record the step if it is the last one of its step.

        ``vectors`` has four rows at sampled coordinates: the release, the sum before the noise with and
        without canaries, and the weights.
        """
        if not self.is_active or self.audited.steps.is_over:
            return
        if number != self.num_calls:
            raise InputError("Several steps of one graph ran at the same time; run one at a time.")
        self.num_calls += 1
        if numbers["microbatch_size"] > 1:
            self.audited.steps.note_not_covered(
                "microbatches contain several examples, but each canary is a microbatch of its own: the "
                "audit does not show that one of several examples can move a clipped mean by up to twice the "
                "clipping norm"
            )
        if self._present is None:
            return
        self._calls.append(self._call(scores, vectors, numbers, self._present))
        if not self._is_inside_step:
            self._present = None
            self.audited.observe(ObservedStep.accumulated(self._calls))

    def _call(
        self, scores: FloatArray, vectors: FloatArray, numbers: dict[str, float], present: BoolArray
    ) -> ObservedStep:
        """Describe what was seen of one call."""
        layout, norm = self.audited.layout, numbers.pop("clipping_norm")
        sample = CoordinateSample.of([int(size) for size in layout.sizes])
        numbers["num_rows"] *= numbers.pop("microbatch_size")
        return ObservedStep.of_release(
            vectors[0],
            vectors[1],
            examples=vectors[2],
            weights=vectors[3],
            clipping_norm=norm,
            eps=self.audited.eps,
            scores=scores,
            present=present,
            leaves=sample.named(layout.names),
            num_canaries=float(np.count_nonzero(present)),
            max_noise=NoiseMaximum(numbers.pop("max_noise") / norm, layout.num_parameters),
            sum_norm=numbers.pop("sum_norm") / norm,
            **numbers,
        )

    @property
    def _is_inside_step(self) -> bool:
        """Whether the next call continues a step."""
        return (self._before + self.num_calls) % self._calls_per_step != 0


class _GraphCall:
    """The callbacks of one call as operations of the graph that is being traced."""

    def __init__(self, callbacks: GraphCallbacks, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._callbacks, self._guard = callbacks, guard
        self._canaries: CanaryTensors | None = None
        absent = np.asarray(-1), np.zeros(callbacks.num_canaries, np.bool_)
        self._number, self.present = self._callback(callbacks.begin, [], absent)
        self.present.set_shape([callbacks.num_canaries])

    def canaries(self, variables: list[Any]) -> CanaryTensors:
        """Return the canaries of this call, in the gradients of these variables."""
        if self._canaries is not None:
            return self._canaries
        layout = ParameterLayout(
            tuple(variable.name.removesuffix(":0") for variable in variables),
            tuple(tuple(variable.shape.as_list()) for variable in variables),
        )
        self._callbacks.audited.lay_out(layout)
        self._callbacks.directions(0)  # to raise any error before tracing
        none = np.zeros((1, self._callbacks.num_canaries), np.float32)
        nothing = none, none.astype(np.int32), none[0]
        values, coordinates, lengths = self._callback(self._callbacks.directions, [self._number], nothing)
        for entries in (values, coordinates):
            entries.set_shape([None, self._callbacks.num_canaries])
        lengths.set_shape([self._callbacks.num_canaries])
        self._canaries = CanaryTensors(values, coordinates, lengths, layout.num_parameters)
        return self._canaries

    def end(self, scores: Any, vectors: Any, numbers: dict[str, Any]) -> None:
        """Pass on the scores, the sampled coordinates, and numbers of the whole call by name."""
        values = tf.stack([tf.cast(number, tf.float64) for number in numbers.values()])

        def end(number: int, scores: FloatArray, vectors: FloatArray, values: FloatArray) -> None:
            named = dict(zip(numbers, values.tolist(), strict=True))
            self._callbacks.end(number, scores, vectors.astype(np.float64), named)

        self._callback(end, [self._number, scores, vectors, values], ())

    def _callback(self, function: Callable[..., Any], inputs: list[Any], failed: tuple[Any, ...]) -> Any:
        """Call a function when the graph runs; if it fails, the observation ends, and returns ``failed``."""

        def called(*values: Any) -> Any:
            with self._guard(), self._callbacks.audited.steps.guard():
                return function(*values)
            return failed

        return tf.numpy_function(called, inputs, [array.dtype for array in failed])


def _sampled(leaves: Sequence[Any], sample: CoordinateSample) -> Any:
    """Return sampled coordinates of all leaves, in single precision, without a copy of the others."""
    ends = np.cumsum([leaf.shape.num_elements() for leaf in leaves])
    within = np.split(sample.indices, np.searchsorted(sample.indices, ends[:-1]))
    starts = [0, *ends[:-1]]
    chosen = [
        tf.gather(tf.reshape(leaf, [-1]), indices - start)
        for leaf, indices, start in zip(leaves, within, starts, strict=True)
    ]
    return flat(chosen)


def _norm(leaves: Sequence[Any]) -> Any:
    return tf.linalg.global_norm([tf.cast(leaf, tf.float32) for leaf in leaves])


def _row_norms(rows: Sequence[Any]) -> Any:
    """Return the norm of each row before clipping; leaves are rows x shape."""
    squares = [tf.square(tf.cast(leaf, tf.float32)) for leaf in rows]
    return tf.sqrt(tf.add_n([tf.reduce_sum(leaf, axis=list(range(1, leaf.shape.rank))) for leaf in squares]))


def _largest_difference(first: Sequence[Any], second: Sequence[Any]) -> Any:
    differences = [tf.reduce_max(tf.abs(leaf - other)) for leaf, other in zip(first, second, strict=True)]
    return tf.reduce_max(tf.stack([tf.cast(difference, tf.float32) for difference in differences]))


def _sum_where(present: Any, rows: Any) -> Any:
    """Sum the rows that are present; the others may be NaN."""
    mask = tf.reshape(present, [-1, *[1] * (rows.shape.rank - 1)])
    return tf.reduce_sum(tf.where(mask, rows, tf.zeros_like(rows)), axis=0)


def _check_one_replica() -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise InputError(
            f"A strategy with {replicas} replicas cannot be observed: each of them adds its own noise, and "
            "their sum cannot be observed."
        )
