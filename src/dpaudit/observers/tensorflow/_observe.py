"""The way in: a context around ``fit`` or a loop.

Canaries in the steps of a private optimizer. Chance and scores of an observer, outside of any graph: here
everything is numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.canaries import Dirac, Draws, GradientCanary, fresh_seed
from dpaudit.errors import InputError
from dpaudit.observers._patching import with_block
from dpaudit.observers.tensorflow._clipping import Canaries, CanaryTape, Clip, Noise, clip_of, flat
from dpaudit.recording import (
    CoordinateSample,
    DPSGDParams,
    LiveBound,
    NoiseLog,
    ReadClaim,
    Recorder,
    TrainingInfo,
)

NOT_POISSON = (
    "how batches are drawn does not show: those of fit() are shuffled, and the claim is of Poisson sampling"
)
_SEVERAL = (
    "microbatches have several examples each: a canary is a microbatch of its own, so that it does not show "
    "that one of several examples can move a clipped mean by up to twice the clipping norm"
)


class Steps:
    """Counts the calls of a graph that was traced once, and knows what each of them has to do.

    Several calls are one step if gradients are accumulated: then canaries join in the first of them, and what
    is recorded is the sum. A graph outlives its observer; from then on it gets no canaries.
    """

    def __init__(self, recorder: Recorder, draws: Draws, *, calls_each: int, calls_before: int) -> None:
        self._recorder, self._draws = recorder, draws
        self._calls_each = calls_each
        self._before = calls_before % calls_each  # a step that has begun already is left alone
        self._step: tuple[BoolArray, FloatArray, FloatArray] | None = None
        self.leaves: tuple[int, ...] = ()  # of the places where noise is looked at
        self.precision = 0.0
        self.num_calls = 0
        self.is_on = True

    @property
    def num_canaries(self) -> int:
        """How many there are, present or not."""
        return self._draws.num_canaries

    def begin(self) -> tuple[IntArray, BoolArray]:
        """The number of this call, and which canaries are present in it."""
        number = np.asarray(self.num_calls)
        if not self.is_on or (self._before + self.num_calls) % self._calls_each:
            return number, np.zeros(self._draws.num_canaries, np.bool_)
        coins = self._draws.coins(self._recorder.num_done)
        self._step = coins, np.zeros(coins.size), np.zeros((2, 1))
        return number, coins

    def directions(self, _: int, num_parameters: int) -> tuple[FloatArray, IntArray]:
        """Values and places of the canaries of this call."""
        found = self._draws.directions(self._recorder.num_done, int(num_parameters))
        places = found.coordinates
        if places is None:
            places = np.arange(found.values.size).reshape(found.values.shape)
        places = np.minimum(places, num_parameters - 1)  # what fills up the last row is zero, wherever it is
        return found.values.astype(np.float32), places.astype(np.int32)

    def end(self, number: int, scores: FloatArray, examples_each: int, noisy: FloatArray) -> None:
        """The scores of this call; they are recorded if it is the last one of its step.

        ``noisy`` is what was released where noise is looked at, and below it the sum that went into it.
        """
        if not self.is_on:
            return
        if number != self.num_calls:
            raise InputError("Expected one step after the other, got several of one graph at the same time.")
        self.num_calls += 1
        if examples_each > 1:
            self._recorder.not_covered = (NOT_POISSON, _SEVERAL)
        if self._step is not None:
            self._add(scores, noisy, self._step)

    def _add(
        self, scores: FloatArray, noisy: FloatArray, so_far: tuple[BoolArray, FloatArray, FloatArray]
    ) -> None:
        present, summed, both = so_far[0], so_far[1] + scores, so_far[2] + noisy
        self._step = present, summed, both
        if (self._before + self.num_calls) % self._calls_each == 0:
            self._step = None
            self._recorder.noise.observe(both[0], both[1], self.leaves, norm=1.0, eps=self.precision)
            self._recorder.record(summed, present)


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
        places = CoordinateSample.of([variable.shape.num_elements() for variable in variables])
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


_DIRAC = Dirac()


@with_block
def observe(
    optimizer: Any,
    *,
    canary: GradientCanary = _DIRAC,
    num_canaries: int = 64,
    noise_multiplier: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Iterator[Recorder]:
    """Audit the steps that are made inside of the ``with`` block.

    ``optimizer`` is one of TF Privacy's, such as ``DPKerasSGDOptimizer`` or
    ``VectorizedDPKerasAdamOptimizer``. Canaries go through its own clipping, sum and noise; they are taken
    off before the update, so that the weights are those without audit, up to rounding. The noise multiplier
    is read from the optimizer; the sample rate is known to nobody, and has to be given here or to
    ``audit()``. Chance comes from ``seed``, or from the operating system. ``callbacks`` get the live bound
    while the training runs (with ``every`` so many steps); they may raise to end it.
    """
    clip = clip_of(optimizer)
    calls_each = getattr(optimizer, "gradient_accumulation_steps", 1)
    draws = Draws(canary, num_canaries, fresh_seed(seed))
    noise = Noise(clip, calls_each)
    given = DPSGDParams(
        noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
    )
    recorder = Recorder(
        claim=ReadClaim(noise.terms, given),
        num_steps=num_steps,
        noise=NoiseLog(),
        signal=min(canary.scale, 1.0),
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=float(clip.norm)),
        not_covered=(NOT_POISSON,),
        confidence=confidence,
        every=every,
        callbacks=callbacks,
    )
    num_before = int(optimizer.iterations.numpy())
    steps = Steps(recorder, draws, calls_each=calls_each, calls_before=num_before)
    observer = Observer(optimizer, clip=clip, scale=canary.scale, steps=steps, noise=noise)
    observer.attach()
    try:
        yield recorder
    except Exception:
        if observer.raised is None:
            raise
        raise observer.raised from None
    finally:
        observer.detach()
    observer.require_all_seen()
