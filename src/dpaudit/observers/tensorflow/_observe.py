"""``observe()`` for TF Privacy: a context manager around ``fit`` or a loop, and the observed step.

:class:`TensorFlowObserver` replaces ``_compute_gradients`` of the optimizer: there canaries are added to the
sum before the noise (through a :class:`CanaryTape`), the release is read, and the canaries are subtracted
again before the update. A graph is traced once; values that change from step to step are exchanged with
:class:`HostCallbacks`, which uses NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.canaries import CanaryPlan, Directions, GradientCanary, Mixture, ParameterLayout, fresh_seed
from dpaudit.diagnostics import BatchRecord, CoordinateSample, Leaves, NoiseCheck, ObservedStep, SumRecord
from dpaudit.errors import InputError
from dpaudit.observers._patching import attribute_restored, replaced
from dpaudit.observers._session import session
from dpaudit.observers.tensorflow._clipping import (
    CanaryTape,
    CanaryTensors,
    TensorFlowClip,
    TensorFlowParamsReader,
    clip_for,
    flat,
)
from dpaudit.recording import (
    DPSGDParams,
    LiveBound,
    ObservedCanaries,
    ReadClaim,
    Recorder,
    TrainingInfo,
)
from dpaudit.recording._claim_source import CLAIM_PARTS

_NO_SUMS = "sums are not compared with the clipped rows: TF Privacy computes them in graphs of its own"
_NO_BATCHES = (
    "batches are not tested, and rows are not compared with drawn examples: pass the batches to "
    "recorder.observe_batch(indices, num_examples) in each step"
)
_NOT_POISSON = (
    "how batches are drawn is not tested: the claim assumes Poisson sampling, but fit() shuffles the data"
)
_SHARED_MICROBATCHES = (
    "microbatches contain several examples, but each canary is a microbatch of its own: the audit does not "
    "show that one of several examples can move a clipped mean by up to twice the clipping norm"
)
_MIXTURE = Mixture()


@_validate.without_epsilon(CLAIM_PARTS)
@session
def observe(
    optimizer: Any,
    *,
    canary: GradientCanary = _MIXTURE,
    num_canaries: int = 64,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[Recorder]:
    """Audit the steps inside the ``with`` block.

    ``optimizer`` is one of TF Privacy's, such as ``DPKerasSGDOptimizer`` or
    ``VectorizedDPKerasAdamOptimizer``. Canaries pass through its own clipping, sum and noise, and are
    subtracted before the update, so that the weights are the same as without the audit, up to rounding. The
    noise multiplier is read from the optimizer, which does not have the sample rate: pass it here or to
    ``audit()``. ``seed`` is the random seed of the audit, by default from the operating system. ``callbacks``
    receive the live bound every ``every`` steps; they may raise to end the training run. Bound and tests
    share the error rate of ``confidence``; with ``tests=False`` nothing but the scores is tested, and the
    bound has all of it.
    """
    clip = clip_for(optimizer)
    calls_per_step = getattr(optimizer, "gradient_accumulation_steps", 1)
    draws = CanaryPlan(canary, num_canaries, fresh_seed(seed))
    params = TensorFlowParamsReader(clip, calls_per_step)
    given = DPSGDParams(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
    )
    recorder = Recorder(
        claim=ReadClaim(params, given),
        num_steps=num_steps,
        signal=min(canary.scale, 1.0),
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=float(clip.norm)),
        not_covered=(_NOT_POISSON,),
        checks=[NoiseCheck(), SumRecord([_NO_SUMS]), BatchRecord(_NO_BATCHES)],
        confidence=confidence,
        tests=tests,
        every=every,
        callbacks=callbacks,
        num_canaries=num_canaries,
        canaries=ObservedCanaries(
            canary, lambda index: host.made(int(index)), lambda: host.layout, lambda: host.eps
        ),
    )
    num_before = int(optimizer.iterations.numpy())
    host = HostCallbacks(recorder, draws, calls_per_step=calls_per_step, calls_before=num_before)
    observer = TensorFlowObserver(optimizer, clip=clip, host=host, params=params)
    try:
        with observer.installed():
            yield recorder
    except Exception:
        if observer.raised is None:
            raise
        raise observer.raised from None
    observer.check_all_observed()


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
        host: HostCallbacks,
        params: TensorFlowParamsReader,
    ) -> None:
        self._optimizer, self._clip = optimizer, clip
        self._host, self._params = host, params
        self.raised: Exception | None = None
        self._own = optimizer._compute_gradients
        self._updates_before = self._num_updates()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the steps inside the block; graphs that were traced there get no canaries afterwards."""
        with replaced(self._optimizer, "_compute_gradients", self._compute_gradients):
            try:
                yield
            finally:
                self._host.is_active = False

    def check_all_observed(self) -> None:
        """Raise if updates were made by a graph traced before ``observe()``."""
        updates = self._num_updates() - self._updates_before
        if updates > self._host.num_calls:
            raise InputError(
                f"Expected to observe all {updates} updates, got {self._host.num_calls}: the step was traced "
                "before observe(). Call model.compile(...) again, or create a new tf.function."
            )

    def _num_updates(self) -> int:
        return int(self._optimizer.iterations.numpy())

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        """Replace the optimizer's own method, which is called in each step."""
        if tape is None and not callable(loss):
            return self._own(loss, var_list, grad_loss, tape)  # raises an error
        with self._keeping_first_error():
            _check_one_replica()
            return self._observed(loss, var_list, grad_loss, tf.GradientTape() if tape is None else tape)

    def _observed(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> list[tuple[Any, Any]]:
        self._params.note_call()
        call = _GraphCall(self._host, self._keeping_first_error)
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
        return self._scored(pairs, taped, call)

    def _scored(self, pairs: Any, taped: CanaryTape, call: _GraphCall) -> list[tuple[Any, Any]]:
        """Score the canaries in the released gradients; return the gradients without the canaries."""
        gradients, variables = zip(*pairs, strict=True)
        num_records = taped.num_microbatches + taped.num_present
        released = [part * tf.cast(num_records, part.dtype) for part in gradients]
        batch = [tf.reduce_sum(part, axis=0) for part in self._clip.clipped(taped.rows)]
        inserted = [_sum_where(taped.present, part) for part in self._clip.clipped(taped.canary_rows)]
        scores = taped.canaries.project(flat(released) - flat(batch)) / self._clip.norm
        coordinates = CoordinateSample.of([variable.shape.num_elements() for variable in variables])
        self._host.name_leaves([variable.name for variable in variables], coordinates.leaves)
        finfo = tf.experimental.numpy.finfo
        self._host.eps = max(float(finfo(part.dtype.as_numpy_dtype).eps) for part in gradients)
        noisy = [tf.gather(flat(parts), coordinates.indices) for parts in (released, batch, inserted)]
        call.end(scores, taped.microbatch_size, tf.stack([noisy[0], noisy[1] + noisy[2]]) / self._clip.norm)
        without = [part - canaries for part, canaries in zip(released, inserted, strict=True)]
        means = [part / tf.cast(taped.num_microbatches, part.dtype) for part in without]
        return list(zip(means, variables, strict=True))

    @contextmanager
    def _keeping_first_error(self) -> Iterator[None]:
        """Keep the first error for ``observe`` to raise: a graph raises a different error."""
        try:
            yield
        except Exception as error:
            self.raised = self.raised or error
            raise


class HostCallbacks:
    """Callbacks that provide canaries to each call of a traced graph and record its scores.

    If gradients are accumulated, several calls make one step: canaries are added in the first call, and the
    sum is recorded. A graph outlives its observer; it then gets no canaries.
    """

    def __init__(
        self, recorder: Recorder, draws: CanaryPlan, *, calls_per_step: int, calls_before: int
    ) -> None:
        self._recorder, self._draws = recorder, draws
        self._calls_per_step = calls_per_step
        self._before = calls_before % calls_per_step  # a step that has already started gets no canaries
        self._step: tuple[BoolArray, FloatArray, FloatArray] | None = None
        self.leaves: Leaves = ()  # coordinates per leaf whose noise is logged
        self.eps = 0.0
        self.layout = ParameterLayout((), ())  # of the gradients, known when the step is traced
        self._made: dict[int, Directions] = {}
        self.num_canaries = draws.num_canaries  # present or not
        self.num_calls = 0
        self.is_active = True

    def lay_out(self, layout: ParameterLayout) -> None:
        """Note the variables of the gradients; raise if they are not those of the first call."""
        if self.layout.names and layout != self.layout:
            raise InputError(
                f"Expected the optimizer to train the same {len(self.layout.names)} variables in every step, "
                f"got {len(layout.names)}: were layers frozen or unfrozen? Call observe() once for each "
                "phase of the training run, after the change."
            )
        self.layout = layout

    def name_leaves(self, names: Sequence[str], sizes: tuple[int, ...]) -> None:
        """Note the names of the variables and how many coordinates of each are logged."""
        is_named = len(names) == len(set(names)) == len(sizes)
        self.leaves = dict(zip(names, sizes, strict=True)) if is_named else sizes

    def begin(self) -> tuple[IntArray, BoolArray]:
        """Return the number of this call and which canaries are present in it."""
        number = np.asarray(self.num_calls)
        if not self.is_active or self._is_inside_step:
            return number, np.zeros(self._draws.num_canaries, np.bool_)
        coins = self._draws.coins(self._recorder.num_done)
        self._step = coins, np.zeros(coins.size), np.zeros((2, 1))
        return number, coins

    def made(self, index: int) -> Directions:
        """Return the directions of the canaries of a step."""
        variant = self._draws.canary.variant(index)
        if variant not in self._made:
            if self._draws.canary.moving:
                self._made.clear()
            self._made[variant] = self._draws.directions(index, self.layout)
        return self._made[variant]

    def directions(self, _: int) -> tuple[Any, Any, Any]:
        """Return values, coordinates and lengths, in clipping norms, of the canaries of this call."""
        found = self.made(self._recorder.num_done)
        values, coordinates = found.padded()
        lengths = self._draws.canary.lengths(found).astype(np.float32)
        return values.astype(np.float32), coordinates.astype(np.int32), lengths

    def end(self, number: int, scores: FloatArray, microbatch_size: int, noisy: FloatArray) -> None:
        """Add the scores of this call; record them if it is the last call of its step.

        ``noisy`` has two rows, at the coordinates whose noise is logged: the release, and the sum before the
        noise.
        """
        if not self.is_active:
            return
        if number != self.num_calls:
            raise InputError("Expected one step at a time, got several concurrent steps of one graph.")
        self.num_calls += 1
        if microbatch_size > 1:
            self._recorder.not_covered = (_NOT_POISSON, _SHARED_MICROBATCHES)
        if self._step is None:
            return
        present, summed, both = self._step[0], self._step[1] + scores, self._step[2] + noisy
        self._step = present, summed, both
        if not self._is_inside_step:
            self._step = None
            self._recorder.observe(
                ObservedStep.of_release(
                    both[0], both[1], eps=self.eps, leaves=self.leaves, scores=summed, present=present
                )
            )

    @property
    def _is_inside_step(self) -> bool:
        """Whether the next call continues a step."""
        return (self._before + self.num_calls) % self._calls_per_step != 0


class _GraphCall:
    """The callbacks of one call as operations of the graph that is being traced."""

    def __init__(self, host: HostCallbacks, guard: Callable[[], AbstractContextManager[None]]) -> None:
        self._host, self._guard = host, guard
        self._number, self.present = self._callback(host.begin, [], [tf.int64, tf.bool])
        self.present.set_shape([host.num_canaries])

    def canaries(self, variables: list[Any]) -> CanaryTensors:
        """Return the canaries of this call, in the gradients of these variables."""
        self._host.lay_out(
            ParameterLayout(
                tuple(variable.name.removesuffix(":0") for variable in variables),
                tuple(tuple(variable.shape.as_list()) for variable in variables),
            )
        )
        self._host.directions(0)  # to raise any error before tracing
        dtypes = [tf.float32, tf.int32, tf.float32]
        values, coordinates, lengths = self._callback(self._host.directions, [self._number], dtypes)
        for part in (values, coordinates):
            part.set_shape([None, self._host.num_canaries])
        lengths.set_shape([self._host.num_canaries])
        return CanaryTensors(values, coordinates, lengths, self._host.layout.num_parameters)

    def end(self, scores: Any, microbatch_size: Any, noisy: Any) -> None:
        """Pass on the scores, the release and the sum before the noise."""
        self._callback(self._host.end, [self._number, scores, microbatch_size, noisy], [])

    def _callback(self, function: Callable[..., Any], inputs: list[Any], dtypes: list[Any]) -> Any:
        def called(*values: Any) -> Any:
            with self._guard():
                return function(*values)

        return tf.numpy_function(called, inputs, dtypes)


def _sum_where(present: Any, rows: Any) -> Any:
    """Sum the rows that are present; the others may be NaN."""
    mask = tf.reshape(present, [-1, *[1] * (rows.shape.rank - 1)])
    return tf.reduce_sum(tf.where(mask, rows, tf.zeros_like(rows)), axis=0)


def _check_one_replica() -> None:
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise InputError(
            f"Expected a single replica, got a strategy with {replicas}: each of them adds its own noise, "
            "and their sum cannot be observed."
        )
