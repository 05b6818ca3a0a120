"""``observe()`` for loops with ``clipped_grad`` and a privatizer, and the claim that it reads from them.

:class:`JaxObserver` wraps both functions. An :class:`Insertion` adds canaries between the clipping and the
noise of a step, and scores them in a release.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Protocol, Unpack, final

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.batch_selection import CyclicPoissonSampling
from jax_privacy.clipping import BoundedSensitivityCallable
from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix

from dpaudit import _validate
from dpaudit.canaries import GradientCanary, InputCanary, ParameterLayout, refuse_held_out
from dpaudit.diagnostics._row_digests import RowRecord
from dpaudit.errors import InputError
from dpaudit.observers._session import MIXTURE, AuditedSteps, AuditOptions, observer
from dpaudit.observers.jax_privacy._canaries import GradientInsertion
from dpaudit.observers.jax_privacy._clipping import JaxClip, marked, require_unmarked
from dpaudit.observers.jax_privacy._input_observer import HeldOutArrays, InputInsertion, num_inputs
from dpaudit.observers.jax_privacy._replay import replay
from dpaudit.observers.jax_privacy._step_callbacks import StepBarrier, StepCallbacks, observed_batches
from dpaudit.recording import DPSGDParams, Recorder, TrainingInfo


class ObservedFunctions(NamedTuple):
    """The functions to use in the loop instead of the original ones, and the recorder."""

    grad_fn: BoundedSensitivityCallable
    privatizer: optax.GradientTransformation
    recorder: Recorder


@final
class Observed(ObservedFunctions):
    """The functions to use in the loop instead of the original ones, and the recorder.

    An error inside a compiled step is buried in the traceback of JAX. In a ``with`` block around the loop, it
    is raised as it is: ``with observe(...) as (grad_fn, privatizer, recorder):``.
    """

    barrier: StepBarrier
    _block: ExitStack | None = None

    def __enter__(self) -> Observed:
        if self._block is not None:
            raise InputError(
                "This observe(...) was already used in a with block, and its recorder holds the steps of "
                "that block; call observe(...) again."
            )
        self._block = ExitStack()
        self._block.enter_context(self.barrier.own_error())
        self._block.callback(self.barrier.wait)  # for the last step
        self._block.callback(self.recorder.close)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        assert self._block is not None  # the block was entered
        return self._block.__exit__(*error)


@observer
def observe(
    grad_fn: Any,
    privatizer: optax.GradientTransformation,
    *,
    canary: GradientCanary | InputCanary = MIXTURE,
    held_out: HeldOutArrays | None = None,
    num_canaries: int | None = None,
    max_grad_norm: float | None = None,
    sampling: Any = None,
    num_examples: int | None = None,
    **options: Unpack[AuditOptions],
) -> Observed:
    """Audit the steps that use the two returned functions; use them in a ``with`` block for short errors.

    Canaries pass through the clipping of ``grad_fn`` and the noise of ``privatizer``, and are subtracted
    before the update, so that the weights are the same as without the audit, up to rounding. The step may be
    compiled. A batch with input canaries consists of inputs with one class each.

    Args:
        grad_fn: What ``jax_privacy.clipped_grad`` returned.
        privatizer: The transformation that adds noise. Its input must be the sum of all gradients since its
            last update, or the same multiple of it in every step if ``max_grad_norm`` states the resulting
            bound.
        canary: A gradient, or with ``held_out`` an input such as ``Crafted()`` or :class:`Given`.
        held_out: The examples that :func:`hold_out` split off.
        num_canaries: By default 1,024 gradients, or half as many as a smaller model has parameters (64 if
            they move, or if other code clips); 16 inputs.
        max_grad_norm: The bound on what one example adds, by default that of ``grad_fn``.
        sampling: The strategy of ``jax_privacy.batch_selection``, from which the sample rate is read.
        num_examples: The size of the data set, if each example is always the same row: batches are then
            tested.
        options: :class:`~dpaudit.observers.AuditOptions`, above all ``claim``.

    Returns:
        The two functions to use in the loop, and the recorder.

    Raises:
        InputError: An argument is invalid, or a function is not of JAX Privacy.

    Example:
        ``grad_fn, privatizer, recorder = observe(grad_fn, privatizer, claim=claim)``

    """
    noise = noise_of(privatizer)
    rate = None if sampling is None else rate_of(sampling)

    def read() -> DPSGDParams:
        multiplier = None if noise is None else noise / step_callbacks.norm
        origins = {"noise_multiplier": "the privatizer", "sample_rate": "sampling="}
        return DPSGDParams(noise_multiplier=multiplier, sample_rate=rate, origins=origins)

    if isinstance(canary, InputCanary):
        num_canaries = num_inputs(canary, held_out, num_canaries)
    else:
        refuse_held_out(canary, held_out)
    barrier = StepBarrier()
    audited = AuditedSteps(
        canary,
        num_canaries,
        read,
        batches=observed_batches(RowRecord(num_examples)),
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=step_callbacks.norm),
        synchronize=barrier.wait,
        **options,
    )
    step_callbacks = StepCallbacks(audited, barrier)
    insertion: Insertion
    if isinstance(canary, InputCanary):
        insertion = InputInsertion(step_callbacks, canary, held_out)
    else:
        insertion = GradientInsertion(step_callbacks, canary)
    wrap = JaxObserver(step_callbacks, insertion, max_grad_norm, tests_rows=True)
    observed = Observed(wrap.gradient(grad_fn), wrap.privatizer(privatizer), audited.steps.recorder)
    observed.barrier = barrier
    functions = {"grad_fn": grad_fn, "privatizer": privatizer, "max_grad_norm": max_grad_norm}
    observed.recorder.replayer = partial(replay, **functions)
    observed.recorder.require_claim()
    return observed


class Insertion(Protocol):
    """Canaries of one kind; both methods are called inside compiled code."""

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        """Return ``total``, the sum computed from these arguments, plus the canaries of this step.

        ``measured`` is to be passed to :meth:`StepCallbacks.add_pending`.
        """

    def subtract(self, arrived: Any, released: Any) -> Any:
        """Score the canaries in ``released``; return ``arrived``, the sum before noise, without them."""


class JaxObserver:
    """An observer that adds canaries to the clipped sum and subtracts them after the noise."""

    def __init__(
        self,
        callbacks: StepCallbacks,
        insertion: Insertion,
        max_grad_norm: float | None = None,
        *,
        tests_rows: bool = False,
    ) -> None:
        self._callbacks, self._insertion, self._tests_rows = callbacks, insertion, tests_rows
        self.steps = callbacks.audited.steps
        self._stated = None if max_grad_norm is None else _validate.positive("max_grad_norm", max_grad_norm)
        callbacks.scale.free = max_grad_norm is not None

    def gradient(self, grad_fn: Any) -> BoundedSensitivityCallable:
        """Return a function like ``grad_fn`` whose returned sum contains canaries."""
        clip = JaxClip(grad_fn)
        bound = self._stated or clip.bound
        if not 0 < bound < math.inf:
            raise InputError(f"The clipping norm must be finite, got {bound:g}; pass max_grad_norm=...")
        self._callbacks.norm, self._callbacks.bound = bound, clip.bound

        def observed(*args: Any, **kwargs: Any) -> Any:
            result = grad_fn(*args, **kwargs)
            total = result[0] if clip.has_aux else result
            joined = self.steps.guarded(join)(args, kwargs, result, total)
            if joined is None:
                return result
            return (joined, *result[1:]) if clip.has_aux else joined

        def join(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, total: Any) -> Any:
            self._callbacks.audited.lay_out(_layout(total, clip.norm(bound)))
            measured = clip.measured(args, kwargs, result)
            weights = measured["weights"]
            measured |= {
                "examples": self._callbacks.sample(total),
                "weights": None if weights is None else self._callbacks.sample(weights),
                "row_digests": clip.digests(args, kwargs) if self._tests_rows else None,
            }
            return self._insertion.join(clip, args, total, measured)

        return BoundedSensitivityCallable(marked(observed), clip.bound, clip.has_aux)

    def privatizer(self, privatizer: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return a transformation like ``privatizer`` whose output contains no canaries.

        The privatizer is called twice with the same state: the release with canaries is scored, and the one
        without them is returned. Both have the same noise, and any other processing is applied to both.
        """
        signature = inspect.signature(privatizer.update)

        def update(*args: Any, **kwargs: Any) -> Any:
            call = signature.bind(*args, **kwargs)
            name, arrived = next(iter(call.arguments.items()))
            self.steps.guarded(self._require_like)(arrived)
            released, state = privatizer.update(*call.args, **call.kwargs)
            without = self.steps.guarded(subtract)(arrived, released)
            if without is None:
                return released, state
            call.arguments[name] = without
            return privatizer.update(*call.args, **call.kwargs)

        def subtract(arrived: Any, released: Any) -> Any:
            self._require_like(released)
            return self._insertion.subtract(arrived, released)

        return privatizer._replace(update=marked(update))

    def _require_like(self, gradient: Any) -> None:
        expected = list(self._callbacks.audited.layout.shapes)
        shapes = [tuple(jnp.shape(leaf)) for leaf in jax.tree.leaves(gradient)]
        if not expected:
            raise InputError(
                "The privatizer was updated before the gradient function that observe() returned was called."
            )
        if shapes != expected:
            raise InputError(
                f"The gradient must have shapes {expected}, as returned by clipped_grad, got {shapes}."
            )


def _layout(gradient: Any, norm: float) -> ParameterLayout:
    """Return the named parameters of a gradient, and the longest canary whose square each can represent."""
    leaves = jax.tree_util.tree_flatten_with_path(gradient)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") or "params" for path, _ in leaves]
    largest = min(float(jnp.finfo(leaf.dtype).max) for _, leaf in leaves)  # type: ignore[no-untyped-call]
    room = 16.0  # between the square root of the largest number and the longest canary
    shapes = tuple(tuple(leaf.shape) for _, leaf in leaves)
    return ParameterLayout(tuple(names), shapes, math.sqrt(largest) / room / norm)


def noise_of(privatizer: Any) -> float | None:
    """Return the standard deviation of the noise per step; None if the privatizer is not the library's."""
    if not isinstance(privatizer, optax.GradientTransformation):
        raise InputError(
            f"privatizer must be one of jax_privacy.noise_addition, got a {type(privatizer).__name__}."
        )
    update = privatizer.update
    require_unmarked(update, "privatizer")
    if getattr(update, "__module__", "").startswith("optax"):
        raise InputError(
            f"privatizer must be the privatizer alone, got a transformation of {update.__module__}; pass "
            "the privatizer to observe(), and chain the one that it returns."
        )
    variables = inspect.getclosurevars(update).nonlocals if inspect.isfunction(update) else {}
    if not {"stddev", "noising_matrix"} <= set(variables):  # not the library's: it may use any names
        return None
    return float(variables["stddev"]) * _noise_factor(variables["noising_matrix"])


def _noise_factor(matrix: Any) -> float:
    """Return the factor of the noise, which must be the same in every step."""
    # 16 rows are enough to detect noise shared between steps
    dense = np.asarray(matrix.materialize(16) if isinstance(matrix, StreamingMatrix) else matrix)
    if not np.allclose(dense, dense[0, 0] * np.eye(len(dense))):
        raise InputError(
            "A DP-SGD claim does not describe noise from a matrix factorization, which depends on earlier "
            "steps; use a privatizer such as gaussian_privatizer."
        )
    return float(dense[0, 0])


def rate_of(sampling: Any) -> float:
    """Return the sample rate of a strategy of ``jax_privacy.batch_selection``."""
    plain = isinstance(sampling, CyclicPoissonSampling) and sampling.cycle_length == 1
    if not plain or sampling.truncated_batch_size is not None:
        raise InputError(
            f"There is no claim for {sampling!r} yet, only for Poisson sampling with a single cycle and no "
            "truncation. To audit the steps alone, leave out sampling=, compare recorder.observations with "
            "Claim.gaussian(noise_multiplier=..., delta=...) by dpaudit.audit(), and test the noise by "
            "recorder.diagnose(noise_multiplier=...)."
        )
    return float(sampling.sampling_prob)
