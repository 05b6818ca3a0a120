"""Callbacks of compiled steps, in which coins are drawn and scores are kept.

Compiled code calls :class:`StepCallbacks` in the order of the steps. They track the gradients since the last
release (:class:`PendingStep`) and the factor by which the loop multiplied their sum (:class:`SumScale`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import CanaryCoins, CanaryPlan
from dpaudit.diagnostics import BatchRecord, CoordinateSample, NoiseMaximum, ObservedStep
from dpaudit.diagnostics._row_digests import RowRecord
from dpaudit.errors import InputError
from dpaudit.observers._session import StepRecorder
from dpaudit.observers.jax_privacy._canaries import flat

NO_GRADIENT = (
    "Expected the gradient function returned by observe() to be called before each update of the privatizer, "
    "but it was not."
)


class StepBarrier:
    """A barrier that waits for compiled steps that were started and may still be running.

    Code that is called from inside a step does not wait, because that would deadlock.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self.raised: Exception | None = None  # on the host; compiled code raises another error

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark the block as called from inside a step."""
        self._here.in_step = True
        try:
            yield
        finally:
            self._here.in_step = False

    def wait(self) -> None:
        """Wait until all steps are done; return immediately inside a step."""
        if getattr(self._here, "in_step", False):
            return
        with self.own_error():
            jax.effects_barrier()  # type: ignore[no-untyped-call]

    @contextmanager
    def own_error(self) -> Iterator[None]:
        """Raise the error of the host instead of that of compiled code, which buries it in tracebacks."""
        log = logging.getLogger("jax._src.callback")
        log.addFilter(self._is_unknown)
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if self.raised is None or type(self.raised).__name__ not in str(error):
                raise  # an error that is not ours, or after ours was handled
            if isinstance(self.raised, InputError):
                raise self.raised.with_traceback(None) from None
            raise self.raised from error
        finally:
            log.removeFilter(self._is_unknown)

    def _is_unknown(self, record: logging.LogRecord) -> bool:
        """Return whether a logged error is not the one that will be raised."""
        return record.exc_info is None or record.exc_info[1] is not self.raised


class StepCallbacks:
    """The callbacks of compiled steps, called in order.

    A step starts with the first gradient since the last release, to which its canaries are added; if several
    gradients are accumulated, the others contribute only their batches. ``num_releases`` releases are
    accumulated into one step. The input of the privatizer must be the sum of these gradients, or a multiple
    of it.
    """

    def __init__(self, steps: StepRecorder, barrier: StepBarrier, num_releases: int = 1) -> None:
        self.norm = 0.0  # the largest contribution of one example, set by the first call
        self.bound = math.inf  # the largest contribution that the gradient function states
        self.scale = SumScale()
        self.names: tuple[str, ...] = ()  # of the leaves of a gradient
        self.eps = 0.0  # the relative precision of gradients, known after the first release
        self._steps, self._barrier, self._num_releases = steps, barrier, num_releases
        self._draws: CanaryPlan | CanaryCoins | None = None
        self._pending: PendingStep | None = None
        self._present: BoolArray | None = None
        self._releases: list[_Release] = []  # of the current step
        self._sample: CoordinateSample | None = None
        self._num_parameters = 0
        self._outside: dict[str, Callable[..., Any]] = {}

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self._steps.index

    @property
    def tests_rows(self) -> bool:
        """Whether rows of the batches are recognized by their digests."""
        return self._steps.batches.rows is not None

    def note_not_covered(self, sentence: str) -> None:
        """Add a sentence to what the recorder does not cover, once."""
        self._steps.note_not_covered(sentence)

    @property
    def scores_per_step(self) -> int | None:
        """The number of scores per recorded step; None before the first step."""
        return self._steps.recorder.num_canaries

    def call(self, function: Callable[..., Any], result: Any, *args: Any) -> Any:
        """Call ``function`` on the host whenever the compiled code reaches this point, in order."""
        outside = self._outside.setdefault(function.__name__, partial(self._called, function))
        return io_callback(outside, result, *args, ordered=True)  # a new object would trigger recompilation

    def _called(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._barrier.in_step(), np.errstate(invalid="ignore"):  # a NaN ends the audit
            try:
                return function(*values)
            except InputError as error:
                self._barrier.raised = error
                raise error.with_traceback(None) from None  # compiled code quotes every frame
            except Exception as error:
                self._barrier.raised = error
                raise

    def presence(self, draws: CanaryPlan | CanaryCoins) -> jax.Array:
        """Return 1 for each canary to add to this gradient, else 0; called inside compiled code."""
        self._draws = draws
        present: jax.Array = self.call(self._presence, shape_of(np.zeros(draws.num_canaries, np.float32)))
        return present

    def _presence(self) -> FloatArray:
        assert self._draws is not None  # set where the callback is compiled
        if self._present is not None or self._steps.is_over:
            return np.zeros(self._draws.num_canaries, np.float32)
        self._present = self._draws.coins(self.step)
        return self._present.astype(np.float32)

    def sample(self, tree: Any) -> jax.Array:
        """Return a gradient, or weights, at the coordinates whose noise is logged."""
        if self._sample is None:
            self._sample = CoordinateSample.of([leaf.size for leaf in jax.tree.leaves(tree)])
        return flat(tree)[self._sample.indices]

    def sample_release(self, released: Any, arrived: Any) -> dict[str, jax.Array]:
        """Return what is recorded of output and input of the privatizer; called inside compiled code."""
        self.eps = precision_of(arrived)
        after, before = flat(released), flat(arrived)
        self._num_parameters = before.size
        return {
            "released": self.sample(released),
            "total": self.sample(arrived),
            "max_noise": jnp.abs(after - before).max(),
            "sum_norm": jnp.linalg.norm(before),
        }

    def add_pending(self, batch: Any, joined: Any, measured: Mapping[str, Any]) -> None:
        """Add the projections of a gradient without and with canaries, and what was measured of it."""
        step = PendingStep.of(batch, joined, measured)
        self._pending = step if self._pending is None else self._pending.plus(step)

    def take_pending(self, arrived: Any, tolerance: Any) -> tuple[PendingStep, float]:
        """Return the pending step and the factor by which the loop multiplied its sum.

        Gradients that are not finite end the recording.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise InputError(NO_GRADIENT)
        values = np.asarray(arrived, np.float64)
        if not self._steps.is_over and not (np.isfinite(pending.joined).all() and np.isfinite(values).all()):
            self._steps.end()
        if self._steps.is_over:
            return pending, self.scale.factor or 1.0
        try:
            return pending, self.scale.of(pending, values, self.norm, float(tolerance))
        except InputError:
            self._present, self._releases = None, []  # the interrupted step is discarded
            raise

    def finish_release(
        self,
        scores: FloatArray,
        pending: PendingStep,
        scale: float,
        sampled: Mapping[str, Any],
        *,
        lengths: FloatArray | None = None,
    ) -> None:
        """Keep the scores of one release, and record the step if it is its last one.

        ``lengths`` are those of clipped canaries, in clipping norms, if they were not known before.
        """
        if self._steps.is_over:
            return
        vectors = [np.asarray(sampled[name], np.float64) for name in ("released", "total")]
        self._releases.append(_Release(scores, pending, np.stack([*vectors, scale * pending.examples])))
        if len(self._releases) == self._num_releases:
            self._record(sampled, lengths)

    def _record(self, sampled: Mapping[str, Any], lengths: FloatArray | None) -> None:
        """Record the step that consists of the releases since the previous one."""
        releases, self._releases = self._releases, []
        present, self._present = self._present, None
        step = reduce(PendingStep.plus, [release.step for release in releases])
        released, total, examples = np.sum([release.vectors for release in releases], axis=0)
        assert self._sample is not None  # since the first gradient
        whole: dict[str, Any] = {
            "max_noise": NoiseMaximum(float(sampled["max_noise"]) / self.norm, self._num_parameters),
            "sum_norm": float(sampled["sum_norm"]) / self.norm,
        }
        step_seen = ObservedStep.of_release(
            released,
            total,
            examples=examples,
            clipping_norm=self.norm,
            eps=self.eps,
            scores=np.sum([release.scores for release in releases], axis=0),
            present=present,
            lengths=lengths,
            weights=step.weights,
            leaves=self._sample.named(self.names),
            num_rows=step.num_rows,
            has_padding=step.has_padding,
            num_canaries=None if present is None else float(np.count_nonzero(present)),
            max_row_norm=None if step.max_row_norm is None else step.max_row_norm / self.bound,
            example_sum_norm=step.norm / self.bound,
            sum_limit=step.num_rows if self.bound < math.inf else math.inf,
            sum_excess=step.excess and step.excess / self.bound,
            row_digests=step.row_digests,
            **(whole if self._num_releases == 1 else {}),  # maxima of several releases do not add up
        )
        self._steps.record(step_seen)


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingStep:
    """What was seen of the gradients since the last release; sums are those of the gradient function."""

    batch: FloatArray  # the sum of the examples, along each canary
    joined: FloatArray  # the same with the present canaries
    examples: FloatArray  # the sum of the examples at the coordinates whose noise is logged
    weights: FloatArray | None = None  # before the step, at these coordinates
    norm: float = 0.0  # of the sum of the examples; of several sums, the sum of their norms
    excess: float | None = None  # the largest norm for each row, if there are several sums
    num_rows: int = 0
    has_padding: bool = False  # whether these rows may include padding
    max_row_norm: float | None = None
    row_digests: Any = None  # one number for each row

    @classmethod
    def of(cls, batch: object, joined: object, measured: Mapping[str, Any]) -> PendingStep:
        """Convert what compiled code measured; sums of many gradients need double precision."""
        weights, norm, digests = (measured[name] for name in ("weights", "max_row_norm", "row_digests"))
        if digests is not None:
            halves = np.asarray(digests, np.uint64)
            digests = (halves[:, 0] << np.uint64(32)) | halves[:, 1]
        return cls(
            batch=np.asarray(batch, np.float64),
            joined=np.asarray(joined, np.float64),
            examples=np.asarray(measured["examples"], np.float64),
            weights=None if weights is None else np.asarray(weights, np.float64),
            norm=float(measured["norm"]),
            num_rows=int(measured["num_rows"]),
            has_padding=bool(measured["has_padding"]),
            max_row_norm=None if norm is None else float(norm),
            row_digests=None if digests is None else digests[digests != 0],
        )

    def plus(self, other: PendingStep) -> PendingStep:
        """Return the sum of the two; the weights are those of the first."""
        norms = [step.max_row_norm for step in (self, other) if step.max_row_norm is not None]
        return PendingStep(
            batch=self.batch + other.batch,
            joined=self.joined + other.joined,
            examples=self.examples + other.examples,
            weights=self.weights,
            norm=self.norm + other.norm,
            excess=max(self._norm_per_row, other._norm_per_row),
            num_rows=self.num_rows + other.num_rows,
            has_padding=self.has_padding or other.has_padding,
            max_row_norm=max(norms) if len(norms) == 2 else None,
            row_digests=None
            if self.row_digests is None or other.row_digests is None
            else np.concatenate([self.row_digests, other.row_digests]),
        )

    @property
    def _norm_per_row(self) -> float:
        return self.norm / max(self.num_rows, 1) if self.excess is None else self.excess

    @property
    def inserted(self) -> FloatArray:
        """The canaries alone."""
        return self.joined - self.batch

    @property
    def finite_inserted(self) -> FloatArray:
        """The canaries alone, or zero where the sum of the examples is not finite."""
        inserted = self.inserted
        return np.where(np.isfinite(inserted), inserted, 0.0)


@dataclass(frozen=True, eq=False)
class _Release:
    """One of the releases that make a step."""

    scores: FloatArray
    step: PendingStep
    vectors: FloatArray  # the release, the sum before the noise, and that of the examples


class SumScale:
    """The factor by which a loop multiplies the sum before the noise, which must be the same in all steps.

    Otherwise the contribution of the canaries to the sum would be unknown, and a factor that varies could
    depend on the canaries and make the weights depend on them. Unless ``free``, it must be 1, because the
    claim is derived from the sensitivity that the gradient function states.
    """

    def __init__(self) -> None:
        self.free = False
        self.factor: float | None = None
        """The factor, since the first step with canaries."""

    def of(self, pending: PendingStep, arrived: FloatArray, norm: float, tolerance: float) -> float:
        """Return the factor if ``arrived`` is a multiple of the sum; one example adds up to ``norm``."""
        joined = pending.joined
        scale = self.factor or _fitted(joined, arrived)
        room = tolerance * (norm + scale * float(np.abs(joined).max()))
        if not (0 < scale < math.inf and (np.abs(arrived - scale * joined) <= room).all()):
            raise InputError(
                "Expected the input of the privatizer to be the sum of all gradients since its last update, "
                "or the same multiple of it in every step, got something else, such as a sum that is clipped "
                "again. For gradients that are not part of the update (for logging, or a warm-up call), use "
                "the function that was passed to observe(); add anything that is not a gradient of examples "
                "after the noise."
            )
        if abs(scale - 1) <= tolerance:
            scale = 1.0
        if scale != 1 and not self.free:
            raise InputError(
                "Expected the input of the privatizer to be the sum that the gradient function returned, got "
                f"that sum times {scale:.6g}: if this is intended, pass max_grad_norm={scale * norm:.6g}, "
                "the resulting bound on one example, or let clipped_grad divide (normalize_by=...)."
            )
        if pending.inserted.any():  # without canaries, the factor does not matter
            self.factor = scale
        return scale


def _fitted(joined: FloatArray, arrived: FloatArray) -> float:
    """Return the best-fitting factor; 1 if the sum is zero."""
    length = float(joined @ joined)
    return float(arrived @ joined) / length if length > 0 else 1.0


def observed_batches(rows: RowRecord | None = None) -> BatchRecord:
    """Return a record of the batches of a loop that marks its padding, by digests of ``rows`` too."""
    batches = BatchRecord(
        "which examples are in a batch is not known, so participation and overlap are not tested: pass them "
        "to recorder.observe_batch(indices, num_examples) in each step"
    )
    batches.tests_sizes, batches.rows = True, rows
    return batches


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def precision_of(tree: Any) -> float:
    """Return the relative precision of the least precise leaf."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))  # type: ignore[no-untyped-call]
