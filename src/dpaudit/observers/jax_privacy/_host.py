"""The host side of compiled steps, where coins are drawn and scores are kept.

Compiled code calls back to :class:`Host` in the order of the steps. The host tracks the sum of the gradients
since the last release (:class:`PendingSum`) and the factor by which the loop multiplied it
(:class:`SumScale`).
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import CanaryCoins, CanaryPlan
from dpaudit.diagnostics import (
    BatchRecord,
    CoordinateSample,
    Leaves,
    NoiseCheck,
    NoiseMaximum,
    ObservedStep,
    SumRecord,
)
from dpaudit.diagnostics._row_digests import RowRecord
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._canaries import flat
from dpaudit.recording import Recorder

NO_GRADIENT = (
    "Expected the gradient function returned by observe() to be called before each update of the privatizer, "
    "but it was not."
)


_NUM_MEASURED = 3  # numbers that ``JaxClip.measured`` returns
NO_BATCHES = (
    "which examples are in a batch is not known, so participation and overlap are not tested: pass them to "
    "recorder.observe_batch(indices, num_examples) in each step"
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


class Host:
    """The callbacks of compiled steps, called in order.

    A step starts with the first gradient since the last release, to which its canaries are added; if several
    gradients are accumulated, the others contribute only their batches. ``num_releases`` releases are
    accumulated into one step. The input of the privatizer must be the sum of these gradients, or a multiple
    of it.
    """

    def __init__(
        self,
        recorder: Recorder,
        draws: CanaryPlan | CanaryCoins | None,
        barrier: StepBarrier,
        checks: tuple[NoiseCheck, SumRecord, BatchRecord],
        num_releases: int = 1,
    ) -> None:
        self.norm = 0.0  # the largest contribution of one example, set by the first call
        self.bound = 0.0  # the largest contribution that the gradient function states
        self._batches = checks[-1]
        self._sum_norms: list[tuple[float, float]] = []  # of each gradient of the step, and its rows
        self._num_rows, self._has_rows = 0, True
        self._digests: list[Any] = []  # of the rows since the last step
        self.scale = SumScale()
        self.draws = draws  # None until the first call if the number of canaries depends on the model
        self._recorder, self._barrier = recorder, barrier
        self._num_releases = num_releases
        self._pending: PendingSum | None = None
        self._present: BoolArray | None = None
        self._scores: list[FloatArray] = []
        self._noisy: list[tuple[FloatArray, FloatArray, FloatArray]] = []
        self._examples: FloatArray = np.zeros(0)  # of the latest release, as in ``PendingSum.sample``
        self._leaves: Leaves = ()  # coordinates per leaf whose noise is logged
        self._num_coordinates = 0
        self._precision = 0.0
        self._outside: dict[str, Callable[..., Any]] = {}

    @property
    def step(self) -> int:
        """The number of the current step."""
        return self._recorder.num_done

    @property
    def tests_rows(self) -> bool:
        """Whether rows of the batches are recognized by their digests."""
        return self._batches.rows is not None

    @property
    def precision(self) -> float:
        """The relative precision of gradients, known after the first release."""
        return self._precision

    def note_not_covered(self, sentence: str) -> None:
        """Add a sentence to what the recorder does not cover, once."""
        if sentence not in self._recorder.not_covered:
            self._recorder.not_covered += (sentence,)

    @property
    def scores_per_step(self) -> int | None:
        """The number of scores per recorded step; None before the first step."""
        return self._recorder.scores_per_step

    def call(self, function: Callable[..., Any], result: Any, *args: Any) -> Any:
        """Call ``function`` on the host whenever the compiled code reaches this point, in order."""
        outside = self._outside.setdefault(function.__name__, partial(self._called, function))
        return io_callback(outside, result, *args, ordered=True)  # a new object would trigger recompilation

    def _called(self, function: Callable[..., Any], *values: Any) -> Any:
        with self._barrier.in_step():
            try:
                return function(*values)
            except InputError as error:
                self._barrier.raised = error
                raise error.with_traceback(None) from None  # compiled code quotes every frame
            except Exception as error:
                self._barrier.raised = error
                raise

    def joins(self) -> jax.Array:
        """Return 1 for each canary to add to this gradient, else 0; called inside compiled code."""
        assert self.draws is not None  # set before the first canary
        zeros = np.zeros(self.draws.num_canaries, np.float32)
        found: jax.Array = self.call(self._joins, shape_of(zeros))
        return found

    def _joins(self) -> FloatArray:
        assert self.draws is not None
        if self._present is not None:
            return np.zeros(self.draws.num_canaries, np.float32)
        self._present = self.draws.coins(self.step)
        return self._present.astype(np.float32)

    def sampled(self, released: Any, arrived: Any) -> tuple[jax.Array, jax.Array]:
        """Return output and input of the privatizer at the coordinates whose noise is logged.

        After the input follow the largest absolute noise over all coordinates and the norm of the input.
        """
        sample = CoordinateSample.of([leaf.size for leaf in jax.tree.leaves(arrived)])
        self._precision = precision_of(arrived)
        named, _ = jax.tree_util.tree_flatten_with_path(arrived)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in named]
        self._leaves = sample.named(names)
        after, before = flat(released), flat(arrived)
        self._num_coordinates = before.size
        whole = jnp.stack([jnp.abs(after - before).max(), jnp.linalg.norm(before)])
        return after[sample.indices], jnp.concatenate([before[sample.indices], whole])

    def with_sample(self, measured: jax.Array, total: Any) -> jax.Array:
        """Return ``measured``, followed by the gradient at the coordinates whose noise is logged.

        Both belong to the gradient without canaries, and ``measured`` is what ``JaxClip.measured`` returned.
        """
        sample = CoordinateSample.of([leaf.size for leaf in jax.tree.leaves(total)])
        return jnp.concatenate([measured, flat(total)[sample.indices].astype(measured.dtype)])

    def add_pending(self, batch: Any, joined: Any, measured: Any) -> None:
        """Add the projections of a gradient without and with canaries; called on the host.

        ``measured`` is what :meth:`with_sample` returned, and digests of the rows.
        """
        measured, digests = measured
        self._digests.append(digests)
        norm, rows, is_known = map(float, measured[:_NUM_MEASURED])
        self._num_rows, self._has_rows = self._num_rows + int(rows), self._has_rows and is_known > 0
        if 0 < self.bound < math.inf:
            self._sum_norms.append((norm / self.bound, rows))
        found = PendingSum.of(batch, joined, measured[_NUM_MEASURED:])
        self._pending = found if self._pending is None else self._pending.plus(found)

    def pop_pending(self, arrived: Any, tolerance: Any) -> tuple[PendingSum, float]:
        """Return the pending sum and the factor by which the loop multiplied it; called on the host."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise InputError(NO_GRADIENT)
        try:
            scale = self.scale.of(pending, np.asarray(arrived, np.float64), self.norm, float(tolerance))
        except InputError:
            # the interrupted step is discarded
            self._present, self._scores, self._noisy = None, [], []
            self._num_rows, self._has_rows, self._digests = 0, True, []
            raise
        self._examples = scale * pending.sample
        return pending, scale

    def keep(self, scores: FloatArray, after: Any, before: Any, *, lengths: FloatArray | None = None) -> None:
        """Keep the scores of one release, and samples of it after and before the noise; on the host.

        ``lengths`` are those of clipped canaries, in clipping norms, if they were not known before.
        """
        self._scores.append(scores)
        sums = np.asarray(before, np.float64)
        self._noisy.append((np.asarray(after, np.float64), sums[:-2], self._examples))
        if len(self._scores) < self._num_releases:
            return
        scores, self._scores = np.sum(self._scores, axis=0), []
        present, self._present = self._present, None
        fields: dict[str, Any] = {"num_rows": self._num_rows, "has_padding": not self._has_rows}
        self._num_rows, self._has_rows = 0, True
        if self._num_releases == 1:  # maxima of several releases do not add up
            fields["max_noise"] = NoiseMaximum(float(sums[-2]) / self.norm, self._num_coordinates)
            fields["sum_norm"] = float(sums[-1]) / self.norm
        (after, before, examples), self._noisy = np.sum(self._noisy, axis=0), []
        self._recorder.observe(
            ObservedStep.of_release(
                after,
                before,
                clipping_norm=self.norm,
                eps=self._precision,
                examples=examples,
                leaves=self._leaves,
                num_canaries=None if present is None else float(present.sum()),
                scores=scores,
                present=present,
                lengths=lengths,
                row_digests=self._take_digests(),
                **fields,
                **self._take_sum_norms(),
            )
        )

    def _take_sum_norms(self) -> dict[str, Any]:
        """Return the norm of the sum of the step, or by how much one of several sums exceeds its limit."""
        norms, self._sum_norms = self._sum_norms, []
        if not norms:
            return {}
        norm, rows = max(norms, key=lambda pair: pair[0] / max(pair[1], 1e-3))
        return {"example_sum_norm": norm, "sum_limit": rows, "sum_excess": None}

    def _take_digests(self) -> Any:
        """Return the digests of the rows of the step; None if its batch is known."""
        digests, self._digests = self._digests, []
        if self._batches.is_given:
            return None
        parts = np.concatenate([np.asarray(part, np.uint64) for part in digests])
        joined = (parts[:, 0] << np.uint64(32)) | parts[:, 1]
        return joined[joined != 0]


@dataclass(frozen=True, eq=False)
class PendingSum:
    """Projections onto the canaries' directions of the sum of a batch, without and with canaries."""

    batch: FloatArray
    joined: FloatArray  # the batch and the present canaries
    sample: FloatArray  # the sum of the batch at the coordinates whose noise is logged

    @classmethod
    def of(cls, batch: object, joined: object, sample: object = ()) -> PendingSum:
        """Convert to double precision, which sums of many gradients need."""
        return cls(*(np.asarray(values, dtype=np.float64) for values in (batch, joined, sample)))

    def plus(self, other: PendingSum) -> PendingSum:
        """Return the sum of the two."""
        return PendingSum(self.batch + other.batch, self.joined + other.joined, self.sample + other.sample)

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
        self._known: float | None = None

    def of(self, pending: PendingSum, arrived: FloatArray, norm: float, tolerance: float) -> float:
        """Return the factor if ``arrived`` is a multiple of the sum; one example adds up to ``norm``."""
        joined = pending.joined
        if not (np.isfinite(joined).all() and np.isfinite(arrived).all()):
            raise InputError("Expected finite gradients, got some that are not: did training diverge?")
        scale = self._known or _fitted(joined, arrived)
        room = tolerance * (norm + scale * float(np.abs(joined).max()))
        if not (0 < scale < math.inf and (np.abs(arrived - scale * joined) <= room).all()):
            raise InputError(
                "Expected the input of the privatizer to be the sum of all gradients since its last update, "
                "or the same multiple of it in every step, got something else, such as a sum that is clipped "
                "again. For gradients that are not "
                "part of the update (for logging, or a warm-up call), use the function that was passed to "
                "observe(); add anything that is not a gradient of examples after the noise."
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
            self._known = scale
        return scale


def _fitted(joined: FloatArray, arrived: FloatArray) -> float:
    """Return the best-fitting factor; 1 if the sum is zero."""
    length = float(joined @ joined)
    return float(arrived @ joined) / length if length > 0 else 1.0


def new_checks(rows: RowRecord | None = None) -> tuple[NoiseCheck, SumRecord, BatchRecord]:
    """Return checks of the sums and batches of a loop that marks its padding, by digests of ``rows`` too."""
    batches = BatchRecord(NO_BATCHES)
    batches.tests_sizes, batches.rows = True, rows
    return NoiseCheck(), SumRecord(), batches


def shape_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]


def precision_of(tree: Any) -> float:
    """Return the relative precision of the least precise leaf."""
    return max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(tree))  # type: ignore[no-untyped-call]
