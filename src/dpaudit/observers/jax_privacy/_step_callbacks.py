"""Callbacks of compiled steps, in which coins are drawn and scores are kept.

Compiled code calls :class:`StepCallbacks` in the order of the steps. They track the gradients since the last
release (:class:`PendingSum`) and the factor by which the loop multiplied their sum (:class:`SumScale`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from dpaudit._types import BoolArray, FloatArray
from dpaudit.diagnostics import BatchRecord, CoordinateSample, NoiseMaximum, ObservedStep
from dpaudit.diagnostics._row_digests import RowRecord
from dpaudit.errors import InputError
from dpaudit.observers._session import AuditedSteps

# fields that are known before the release
_OF_GRADIENTS = (
    *("weights", "num_rows", "has_padding", "max_row_norm", "example_sum_norm", "sum_limit", "sum_excess"),
    "row_digests",
)
NO_GRADIENT = "The privatizer was updated before the gradient function that observe() returned was called."


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

    def __init__(self, audited: AuditedSteps, barrier: StepBarrier, num_releases: int = 1) -> None:
        self.norm = 0.0  # the largest contribution of one example, set by the first call
        self.bound = math.inf  # the largest contribution that the gradient function states
        self.scale = SumScale()
        self.audited = audited
        self._barrier, self._num_releases = barrier, num_releases
        self._pending: PendingSum | None = None
        self._present: BoolArray | None = None
        self._releases: list[ObservedStep] = []  # of the current step
        self._sample: CoordinateSample | None = None
        self._num_parameters = 0
        self._outside: dict[str, Callable[..., Any]] = {}

    def call(self, function: Callable[..., Any], result: Any, *args: Any) -> Any:
        """Call ``function`` on the host whenever the compiled code reaches this point, in order.

        If it fails, the observation ends, and the result is zeros.
        """
        # a new object would trigger recompilation
        outside = self._outside.setdefault(
            f"{function.__name__} {result}", partial(self._called, function, result)
        )
        return io_callback(outside, result, *args, ordered=True)

    def _called(self, function: Callable[..., Any], result: Any, *values: Any) -> Any:
        with self._barrier.in_step(), np.errstate(invalid="ignore"):  # a NaN ends the audit
            try:
                with self.audited.steps.guard():
                    return function(*values)
            except InputError as error:
                self._barrier.raised = error
                raise error.with_traceback(None) from None  # compiled code quotes every frame
            except Exception as error:
                self._barrier.raised = error
                raise
        return jax.tree.map(lambda array: np.zeros(array.shape, array.dtype), result)

    def presence(self) -> jax.Array:
        """Return 1 for each canary to add to this gradient, else 0; called inside compiled code."""
        shape = shape_of(np.zeros(self.audited.plan.num_canaries, np.float32))
        present: jax.Array = self.call(self._presence, shape)
        return present

    def _presence(self) -> FloatArray:
        if self._present is not None or self.audited.steps.is_over:
            return np.zeros(self.audited.plan.num_canaries, np.float32)
        self._present = self.audited.present
        return self._present.astype(np.float32)

    def sample(self, tree: Any) -> jax.Array:
        """Return a gradient, or weights, at the coordinates whose noise is logged."""
        if self._sample is None:
            self._sample = CoordinateSample.of([leaf.size for leaf in jax.tree.leaves(tree)])
        return flat(tree)[self._sample.indices]

    def end(self, weights: Any) -> None:
        """Note the weights after the last step, for a run that continues with them."""
        if self._sample is not None:
            with self.audited.steps.guard():
                self.audited.steps.history.end(self.sample(weights))

    def sample_release(self, released: Any, arrived: Any) -> dict[str, jax.Array]:
        """Return what is recorded of output and input of the privatizer; called inside compiled code."""
        self.audited.eps = precision_of(arrived)
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
        # sums of many gradients need double precision
        sums, seen = (np.asarray(batch, np.float64), np.asarray(joined, np.float64)), ObservedStep()
        with self.audited.steps.guard():
            seen = self._seen(measured)
        pending = PendingSum(*sums, seen)
        self._pending = pending if self._pending is None else self._pending.plus(pending)

    def _seen(self, measured: Mapping[str, Any]) -> ObservedStep:
        seen, digests = dict(measured), measured["row_digests"]
        for name in ("examples", "weights"):
            seen[name] = None if seen[name] is None else np.asarray(seen[name], np.float64)
        for name in ("example_sum_norm", "max_row_norm"):
            seen[name] = None if seen[name] is None else float(seen[name]) / self.bound
        seen |= {"num_rows": int(seen["num_rows"]), "has_padding": bool(seen["has_padding"])}
        seen["sum_limit"] = seen["num_rows"] if self.bound < math.inf else math.inf
        if digests is not None:
            halves = np.asarray(digests, np.uint64)
            digests = (halves[:, 0] << np.uint64(32)) | halves[:, 1]
            seen["row_digests"] = digests[digests != 0]
        return ObservedStep(**seen)

    def take_pending(self, arrived: Any, tolerance: Any) -> tuple[PendingSum, Any]:
        """Return the pending sum and the factor by which the loop multiplied it, 0 without canaries.

        Gradients that are not finite, or another factor than before, end the observation: the factors are
        then those of each canary.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise InputError(NO_GRADIENT)
        values, steps = np.asarray(arrived, np.float64), self.audited.steps
        if not (np.isfinite(pending.joined).all() and np.isfinite(values).all()):
            steps.end_diverged()
        if not steps.is_over:
            try:
                with steps.guard():
                    return pending, self.scale.of(pending, values, self.norm, float(tolerance))
            except InputError:
                self._present, self._releases = None, []  # the interrupted step is discarded
                raise
        present, self._present = self._present, None
        return pending, 0.0 if present is None else self.scale.of_each(pending, values)

    def finish_release(
        self,
        scores: FloatArray,
        pending: PendingSum,
        scale: float,
        sampled: Mapping[str, Any],
        *,
        lengths: FloatArray | None = None,
    ) -> None:
        """Keep the scores of one release, and record the step if it is its last one.

        ``lengths`` are those of clipped canaries, in clipping norms, if they were not known before.
        """
        if self.audited.steps.is_over:
            return
        assert self._sample is not None  # since the first gradient
        assert self._present is not None
        release = ObservedStep.of_release(
            sampled["released"],
            sampled["total"],
            examples=scale * pending.seen.examples,
            **{name: getattr(pending.seen, name) for name in _OF_GRADIENTS},
            clipping_norm=self.norm,
            eps=self.audited.eps,
            scores=scores,
            present=self._present,
            lengths=lengths,
            leaves=self._sample.named(self.audited.layout.names),
            num_canaries=float(np.count_nonzero(self._present)),
            max_noise=NoiseMaximum(float(sampled["max_noise"]) / self.norm, self._num_parameters),
            sum_norm=float(sampled["sum_norm"]) / self.norm,
        )
        self._releases.append(release)
        if len(self._releases) == self._num_releases:
            releases, self._releases, self._present = self._releases, [], None
            self.audited.observe(ObservedStep.accumulated(releases))


@dataclass(frozen=True, eq=False)
class PendingSum:
    """The gradients since the last release; sums are those of the gradient function."""

    batch: FloatArray  # the sum of the examples, along each canary
    joined: FloatArray  # the same with the present canaries
    seen: ObservedStep  # what is known before the release; its examples are not in clipping norms

    def plus(self, other: PendingSum) -> PendingSum:
        """Return the sum of the two; the weights are those of the first."""
        seen = ObservedStep.accumulated([self.seen, other.seen])
        return PendingSum(self.batch + other.batch, self.joined + other.joined, seen)

    @property
    def inserted(self) -> FloatArray:
        """The canaries alone."""
        return self.joined - self.batch


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

    def of(self, pending: PendingSum, arrived: FloatArray, norm: float, tolerance: float) -> float:
        """Return the factor if ``arrived`` is a multiple of the sum; one example adds up to ``norm``."""
        joined = pending.joined
        scale = self.factor or _fitted(joined, arrived)
        room = tolerance * (norm + scale * float(np.abs(joined).max()))
        if not (0 < scale < math.inf and (np.abs(arrived - scale * joined) <= room).all()):
            raise InputError(
                "The input of the privatizer must be the sum of all gradients since its last update, or "
                "the same multiple of it in every step, but it is something else, such as a sum that is "
                "clipped again. For gradients that are not part of the update (for logging, or a warm-up "
                "call), use the function that was passed to observe(); add anything that is not a gradient "
                "of examples after the noise."
            )
        if abs(scale - 1) <= tolerance:
            scale = 1.0
        if scale != 1 and not self.free:
            raise InputError(
                "The input of the privatizer must be the sum that the gradient function returned, got that "
                f"sum times {scale:.6g}: if this is intended, pass max_grad_norm={scale * norm:.6g}, the "
                "resulting bound on one example, or let clipped_grad divide (normalize_by=...)."
            )
        if pending.inserted.any():  # without canaries, the factor does not matter
            self.factor = scale
        return scale

    def of_each(self, pending: PendingSum, arrived: FloatArray) -> FloatArray:
        """Return how much of each canary is left in a sum that is no such multiple, as after freezing."""
        most = max(self.factor or 1.0, _fitted(pending.joined, arrived))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.clip(np.nan_to_num(arrived / pending.joined, nan=most), 0.0, most)


def _fitted(joined: FloatArray, arrived: FloatArray) -> float:
    """Return the best-fitting factor; 1 if the sum is zero."""
    length = float(joined @ joined)
    return float(arrived @ joined) / length if length > 0 else 1.0


def observed_batches(rows: RowRecord | None = None, drawn: str = "") -> BatchRecord:
    """Return a record of the batches of a loop that marks its padding, by digests of ``rows`` too.

    ``drawn`` says how the loop draws its batches, if that is known.
    """
    batches = BatchRecord(
        f"which examples are in a batch{drawn}: to test participation and overlap, pass them to "
        "recorder.observe_batch(indices, num_examples) in each step"
    )
    batches.tests_sizes, batches.rows = True, rows
    return batches


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def precision_of(tree: Any) -> float:
    """Return the relative precision of the least precise leaf."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))  # type: ignore[no-untyped-call]


def tolerance_of(tree: Any) -> float:
    """Return the largest relative difference that rounding may cause between two ways to compute a sum."""
    tolerance = 1e-4  # orders of magnitude above the rounding error of sums and below the noise
    return max(tolerance, 4 * precision_of(tree))


def num_entries(tree: Any) -> int:
    """Return the number of entries of a gradient."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def flat(tree: Any) -> jax.Array:
    """Return a gradient as one flat vector."""
    return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)])


def unflat(vectors: jax.Array, like: Any) -> Any:
    """Return the last dimension as a gradient structured like ``like``; leading dimensions are kept."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    pieces = jnp.split(vectors, ends, axis=-1)
    shaped = [
        piece.reshape(*vectors.shape[:-1], *leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(pieces, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)
