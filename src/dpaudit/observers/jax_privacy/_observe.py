"""``observe()`` for loops with ``clipped_grad`` and a privatizer, and the claim that it reads from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, final

import numpy as np
import optax
from jax_privacy.batch_selection import CyclicPoissonSampling
from jax_privacy.clipping import BoundedSensitivityCallable
from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix

from dpaudit import _validate
from dpaudit.canaries import CanaryCoins, GradientCanary, InputCanary, Mixture, fresh_seed, refuse_held_out
from dpaudit.diagnostics._row_digests import RowRecord
from dpaudit.errors import InputError
from dpaudit.observers._session import LaidOutCanaries, StepRecorder
from dpaudit.observers.jax_privacy._canaries import Given, HeldOutArrays, require_examples
from dpaudit.observers.jax_privacy._clipping import require_unmarked
from dpaudit.observers.jax_privacy._input_observer import InputInsertion
from dpaudit.observers.jax_privacy._observer import GradientInsertion, Insertion, JaxObserver
from dpaudit.observers.jax_privacy._step_callbacks import StepBarrier, StepCallbacks, observed_batches
from dpaudit.recording import DPSGDParams, LiveBound, Recorder, TrainingInfo
from dpaudit.recording._claim_source import CLAIM_PARTS

_MIXTURE = Mixture()


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
                "Expected a new observe(...) for each with block, got one that was already used: its "
                "recorder holds the steps of that block."
            )
        self._block = ExitStack()
        self._block.enter_context(self.barrier.own_error())
        self._block.callback(self.barrier.wait)  # for the last step
        self._block.callback(self.recorder.close)
        return self

    def __exit__(self, *error: Any) -> bool | None:
        assert self._block is not None  # the block was entered
        return self._block.__exit__(*error)


@_validate.reject_epsilon(CLAIM_PARTS)
def observe(
    grad_fn: Any,
    privatizer: optax.GradientTransformation,
    *,
    canary: GradientCanary | InputCanary = _MIXTURE,
    held_out: HeldOutArrays | None = None,
    num_canaries: int | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float | None = None,
    sample_rate: float | None = None,
    num_steps: int | None = None,
    delta: float | None = None,
    sampling: Any = None,
    num_examples: int | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    every: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Observed:
    """Audit the steps that use the two returned functions; use them in a ``with`` block for short errors.

    ``grad_fn`` is the function that ``jax_privacy.clipped_grad`` returned. Canaries pass through its own
    clipping and the noise of ``privatizer``, and are subtracted before the update, so that the weights are
    the same as without the audit, up to rounding. The input of the privatizer must be the sum of all
    gradients since its last update, or, if ``max_grad_norm`` states the resulting bound on one example, the
    same multiple of it in every step; anything else raises an error. The step may be compiled or not. The
    noise multiplier is read from both functions, and the sample rate from ``sampling`` (a strategy of
    ``jax_privacy.batch_selection``), unless passed here or to ``audit()``. The default of ``max_grad_norm``
    is the bound that ``grad_fn`` states. If each example is always the same row, pass ``num_examples``, the
    number of examples in the data set: then the batches are tested by digests of their rows. ``seed`` is the
    random seed of the audit, by default from the operating system. ``callbacks`` receive the live bound every
    ``every`` steps; they may raise to end the training run. Bound and tests share the error rate of
    ``confidence``; with ``tests=False`` nothing but the scores is tested, and the bound has all of it. If
    gradients stop being finite, the audit ends there with a warning.

    By default there are 1,024 gradient canaries, or half as many as a smaller model has parameters (64 if
    they move, or if code of others clips or wraps the clipping). With ``held_out``, the examples that
    :func:`hold_out` split off, ``canary`` may be an input canary such as ``Crafted()``: by default 16, which
    also pass through the loss. :class:`Given` holds examples of your own. A batch must consist of inputs with
    one class each.
    """
    noise = noise_of(privatizer)
    rate = None if sampling is None else rate_of(sampling)

    def read() -> DPSGDParams:
        multiplier = None if noise is None else noise / step_callbacks.norm
        origins = {"noise_multiplier": "the privatizer", "sample_rate": "sampling="}
        return DPSGDParams(noise_multiplier=multiplier, sample_rate=rate, origins=origins)

    is_input = isinstance(canary, InputCanary)
    if isinstance(canary, InputCanary):
        require_examples(canary, held_out)
        num_canaries = _num_inputs(canary, num_canaries)
        coins = CanaryCoins(num_canaries, fresh_seed(seed))
    else:
        refuse_held_out(canary, held_out)
        canaries = LaidOutCanaries(canary, num_canaries, fresh_seed(seed))
    barrier = StepBarrier()
    steps = StepRecorder(
        canary,
        read,
        DPSGDParams(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        ),
        batches=observed_batches(RowRecord(num_examples)),
        facts=lambda: TrainingInfo(canary=canary, max_grad_norm=step_callbacks.norm),
        confidence=confidence,
        tests=tests,
        coupled=is_input,
        every=every,
        callbacks=callbacks,
        synchronize=barrier.wait,
        num_canaries=num_canaries,
        canaries=None if is_input else canaries.observed(),
    )
    step_callbacks = StepCallbacks(steps, barrier)
    insertion: Insertion
    if isinstance(canary, InputCanary):
        insertion = InputInsertion(step_callbacks, coins, canary, held_out)
    else:
        insertion = GradientInsertion(step_callbacks, canaries)
    observer = JaxObserver(step_callbacks, insertion, max_grad_norm)
    observed = Observed(observer.gradient(grad_fn), observer.privatizer(privatizer), steps.recorder)
    observed.barrier = barrier
    return observed


def _num_inputs(canary: InputCanary, count: int | None) -> int:
    if not isinstance(canary, Given):
        return 16 if count is None else count
    if count not in (None, len(canary.targets)):
        raise InputError(
            f"Expected num_canaries={count} to be {len(canary.targets)}, the number of given examples."
        )
    return len(canary.targets)


def noise_of(privatizer: Any) -> float | None:
    """Return the standard deviation of the noise per step; None if the privatizer is not the library's."""
    if not isinstance(privatizer, optax.GradientTransformation):
        raise InputError(
            f"Expected a privatizer of jax_privacy.noise_addition, got a {type(privatizer).__name__}."
        )
    update = privatizer.update
    require_unmarked(update, "privatizer")
    if getattr(update, "__module__", "").startswith("optax"):
        raise InputError(
            f"Expected the privatizer alone, got a transformation of {update.__module__}: pass the "
            "privatizer to observe(), and chain the one that it returns."
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
            "Expected noise that is independent between steps, as from gaussian_privatizer, got noise from a "
            "matrix factorization, which a DP-SGD claim does not describe."
        )
    return float(dense[0, 0])


def rate_of(sampling: Any) -> float:
    """Return the sample rate of a strategy of ``jax_privacy.batch_selection``."""
    plain = isinstance(sampling, CyclicPoissonSampling) and sampling.cycle_length == 1
    if not plain or sampling.truncated_batch_size is not None:
        raise InputError(
            f"Expected Poisson sampling with a single cycle and no truncation, got {sampling!r}: there is no "
            "claim for that sampler yet. To audit the steps alone, leave out sampling=, compare "
            "recorder.observations with Claim.gaussian(noise_multiplier=..., delta=...) by dpaudit.audit(), "
            "and test the noise by recorder.diagnose(noise_multiplier=...)."
        )
    return float(sampling.sampling_prob)
