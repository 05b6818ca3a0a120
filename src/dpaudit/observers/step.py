"""Audits of any step: a function that maps gradients, or a loss and a batch, to a privatized gradient.

:func:`observe_step` runs a step on gradients with canaries among them, :func:`observe_loss_step` a step that
computes the gradients itself. :func:`replay` needs no statistics: it runs a step with the same noise on
batches that differ in one example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.accounting import Claim
from dpaudit.canaries import CanaryPlan, GradientCanary, Mixture, ParameterLayout, fresh_seed
from dpaudit.diagnostics import BatchRecord, Leaves, NoiseCheck, ObservedStep
from dpaudit.errors import InputError
from dpaudit.observers._arrays import (
    as_numpy,
    dot,
    flat,
    is_jax,
    is_torch,
    leaf_names,
    leaves,
    like,
    map_tree,
    precision,
    require_rows,
    require_vector,
    with_rows,
)
from dpaudit.observers._neighbors import Neighbor
from dpaudit.observers._replay import compare_neighbors
from dpaudit.observers._replay_result import ReleaseFunction, ReplayResult
from dpaudit.observers._residuals import KnownSum, UnknownSumError, is_refuted
from dpaudit.observers._session import end_diverged
from dpaudit.recording import LiveBound, ObservedCanaries, PerStep, Recorder, TrainingInfo, claimed_noise

__all__ = ["ReplayResult", "observe_loss_step", "observe_step", "replay"]

_MIXTURE = Mixture()
_NO_BATCHES = (
    "every step gets the same batch: sampling, accumulation over batches and the number of rows per example "
    "are not tested"
)
OTHERS_REPLACED = (
    f"other gradients were replaced by zeros: their sum did not look like one of clipped ones; {_NO_BATCHES}"
)
_STEP_CLAIM = "claim=..., such as Claim.gaussian(noise_multiplier=..., delta=..., epsilon=...) for one step"
_OWN_NOISE, _POSITIONS = 3, 5  # purposes of random streams, besides those of CanaryPlan and of native audits
_NUM_CANARIES = 64
_ROWS_COMPILED = 16  # a step that JAX compiles has a multiple of this number of rows


@_validate.reject_epsilon(_STEP_CLAIM)
def observe_step(
    step: Callable[[Any], Any],
    gradients: Any,
    *,
    claim: Claim,
    max_grad_norm: float,
    batch_size: float | None = None,
    num_steps: int = 300,
    canary: GradientCanary = _MIXTURE,
    num_canaries: int | None = None,
    leaves: Leaves | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Recorder:
    """Run a step again and again on gradients and canaries; fair coins decide which are present.

    The number of rows varies with the coins, and canaries are at random positions among them. Rows of zeros
    are added in every second step or so, so that a sum that depends on the number of rows is detected.

    Args:
        step: Takes per-example gradients (examples x parameters, in NumPy, torch or JAX) and returns the
            noisy sum of the clipped gradients.
        gradients: Those of the other examples. Zeros, or no rows at all, reveal the most, because another sum
            is known only if it is clipped as usual; if it is not, all steps run again with zeros.
        claim: What is claimed of a single step, or of a training run of such steps.
        max_grad_norm: The clipping norm.
        batch_size: What the step divides the sum by, if it does.
        num_steps: How often the step runs.
        canary: The kind of canary.
        num_canaries: By default 64, or half as many as there are parameters if those are fewer.
        leaves: The sizes of the parameter tensors in a gradient, optionally by name, for tests of the noise.
        confidence: The confidence of bound and tests together.
        tests: Whether anything but the scores is tested; without tests, the bound has the whole error rate.
        seed: The random seed of the audit, by default from the operating system.
        callbacks: Functions that receive the live bound; they may raise to end the audit.

    Returns:
        The recorder of all steps.

    Raises:
        InputError: An argument is invalid, or the step sums something unknown without refuting the claim.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> def quiet(rows):  # noise 1 claimed, 0.5 added
    ...     norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
    ...     return (rows / norms).sum(axis=0) + 0.5 * rng.standard_normal(rows.shape[1])
    >>> claim = Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    >>> recorder = observe_step(quiet, np.zeros((4, 100)), claim=claim, max_grad_norm=1.0, seed=0)
    >>> recorder.audit().verdict.name
    'VIOLATION'

    """
    num_examples, num_parameters = require_rows(gradients)
    audit = _StepAudit(
        CanaryPlan(canary, _number(num_canaries, canary, num_parameters), fresh_seed(seed)),
        ParameterLayout.of([num_parameters] if leaves is None else leaves),
        leaves,
        claim=claim,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        num_steps=num_steps,
        recording={"confidence": confidence, "tests": tests, "callbacks": callbacks},
    )

    def observed(others: Any, uncovered: str) -> Recorder:
        positions, has_zeros = audit.draws.rng(0, _POSITIONS), not as_numpy(others).any()

        def release(rows: FloatArray, present: BoolArray) -> tuple[FloatArray, int]:
            chosen, batch = rows[present], others
            if has_zeros and num_examples:
                batch = _more_zeros(others, len(chosen), positions)
            if len(batch) + len(chosen) == 0:  # a step may need at least one example
                chosen = np.zeros((1, num_parameters))
            batch = with_rows(batch, chosen, positions)
            return require_vector(step(batch), num_parameters), len(batch)

        return audit.run(release, others, like=others, uncovered=uncovered)

    try:
        return observed(gradients, _NO_BATCHES)
    except UnknownSumError as error:
        recorder = observed(like(gradients, np.zeros(gradients.shape)), OTHERS_REPLACED)
        if not (error.is_small or is_refuted(recorder)):
            raise
        return recorder


def _number(num_canaries: int | None, canary: GradientCanary, num_parameters: int) -> int:
    """Return the number of canaries, by default as many as fit."""
    if not isinstance(canary, GradientCanary):
        raise InputError(f"canary must be a gradient canary such as Dirac(), got {canary!r}.")
    fitting = max(1, min(_NUM_CANARIES, num_parameters // canary.places_per_canary))
    return fitting if num_canaries is None else num_canaries


def _more_zeros(zeros: Any, num_canaries: int, rng: np.random.Generator) -> Any:
    """Return the rows, in every second step with more; with JAX, so that few sizes are compiled."""
    number = len(zeros) + int(rng.integers(2)) * min(2 * len(zeros), _NUM_CANARIES)
    if is_jax(zeros):
        number += -(number + num_canaries) % _ROWS_COMPILED
    return like(zeros, np.zeros((number, zeros.shape[1])))


class _StepAudit:
    """The canaries, the claim and the options of an audit of one step, which runs it again and again."""

    def __init__(
        self,
        draws: CanaryPlan,
        layout: ParameterLayout,
        leaves: Leaves | None,
        *,
        claim: Claim,
        max_grad_norm: float,
        batch_size: float | None,
        num_steps: int,
        recording: dict[str, Any],
    ) -> None:
        self.draws, self._layout, self._leaves, self._claim = draws, layout, leaves, claim
        self._norm = _validate.positive("max_grad_norm", max_grad_norm)
        self._batch_size, self._num_steps, self._recording = batch_size, num_steps, recording
        self._divisor = 1.0 if batch_size is None else _validate.positive("batch_size", batch_size)
        if not isinstance(claim, Claim):
            raise InputError(f"claim must be a Claim such as Claim.gaussian(...), got {claim!r}.")
        size = draws.num_canaries, layout.num_parameters
        text = f"num_canaries={size[0]} gradients of {size[1]} parameters"
        _validate.fits_memory(text, 8.0 * size[0] * size[1])

    def run(
        self,
        release: Callable[[FloatArray, BoolArray], tuple[FloatArray, int]],
        gradients: Any,
        *,
        like: Any,
        uncovered: str = _NO_BATCHES,
    ) -> Recorder:
        """Record the releases of all steps on ``gradients`` and canaries; ``like`` has their dtype.

        ``release`` takes canaries, one per row, and which are present; it also returns the number of rows.
        """
        draws, canary, norm, num_others = self.draws, self.draws.canary, self._norm, list[int]()
        eps, largest = precision(like)
        layout = _fitting(replace(self._layout, largest=largest / norm), gradients)
        directions_of = lru_cache(canary.num_variants)(lambda variant: draws.directions(variant, layout))
        others = KnownSum(
            gradients,
            max_grad_norm=norm,
            noise_multiplier=claimed_noise(self._claim),
            rng=draws.rng(0, _OWN_NOISE),
        )
        observed = ObservedCanaries(
            canary,
            lambda index: directions_of(canary.variant(index)),
            lambda: layout,
            lambda: eps,
            num_others=num_others.__getitem__,
        )
        recorder = Recorder(
            claim=self._claim,
            num_steps=self._num_steps,
            checks=[NoiseCheck(), BatchRecord(uncovered)],
            scorer=PerStep(signal=min(canary.scale, 1.0), num_canaries=draws.num_canaries, canaries=observed),
            facts=lambda: TrainingInfo(canary=canary, max_grad_norm=norm, batch_size=self._batch_size),
            **self._recording,
        )
        for index in range(self._num_steps):
            directions, present = directions_of(canary.variant(index)), draws.coins(index)
            lengths = canary.lengths(directions)
            raw, num_rows = release(norm * lengths[:, None] * directions.dense(), present)
            num_others.append(num_rows - int(np.count_nonzero(present)))
            if not np.isfinite(raw).all():
                end_diverged(recorder)
                break
            released = self._divisor * raw - others.total
            clipped = np.where(present, norm * np.minimum(lengths, 1.0), 0.0)
            step = ObservedStep(
                scores=directions.project(released) / norm,
                present=present,
                leaves=self._leaves,
                released=raw,
                release_unit=self._divisor / norm,
                num_rows=num_rows,
                clipping_norm=norm,
                **others.observe(released, directions, present, clipped),
            )
            recorder.observe(step)
        others.require_known()
        return recorder


def _fitting(layout: ParameterLayout, gradients: Any) -> ParameterLayout:
    """Return the layout, or raise if it is not that of the gradients."""
    if layout.num_parameters != gradients.shape[1]:
        raise InputError(
            f"leaves must have {gradients.shape[1]} entries in all, like a gradient, got "
            f"{layout.num_parameters}."
        )
    return layout


@_validate.reject_epsilon(_STEP_CLAIM)
def observe_loss_step(
    step: Callable[[Callable[[Any, Any], Any], Any, Any], Any],
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    claim: Claim,
    max_grad_norm: float,
    batch_size: float | None = None,
    num_steps: int = 300,
    canary: GradientCanary = _MIXTURE,
    num_canaries: int | None = None,
    confidence: float = 0.95,
    tests: bool = True,
    seed: int | None = None,
    callbacks: Sequence[Callable[[LiveBound], None]] = (),
) -> Recorder:
    """Run a step that computes its own gradients; fair coins decide which canaries are present.

    The step is called with a different loss and a batch of at most as many examples as there are canaries.
    Each example is paired with a canary, whose dot product with the parameters replaces the loss: its
    gradient is the canary, or zero if the canary is absent. Batches have one of three sizes, so that noise
    that depends on the size is detected, and a compiled step is compiled three times at most.

    Args:
        step: ``step(loss, params, batch)`` computes the gradient of the loss for every example, with JAX or
            ``torch.func``, passes the batch to the loss unchanged, and returns the noisy sum of the clipped
            gradients, structured like ``params``.
        loss: ``loss(params, example)``.
        params: The parameters, the same in all steps.
        batch: Examples, through which the batches cycle.
        claim: As in :func:`observe_step`, like all that follow.
        max_grad_norm: The clipping norm.
        batch_size: What the step divides the sum by, if it does.
        num_steps: How often the step runs.
        canary: The kind of canary.
        num_canaries: Their number.
        confidence: The confidence of bound and tests together.
        tests: Whether anything but the scores is tested.
        seed: The random seed of the audit.
        callbacks: Functions that receive the live bound.

    Returns:
        The recorder of all steps.

    Raises:
        InputError: An argument is invalid, or the step returns another structure.

    Example:
        ``observe_loss_step(step, loss, params, batch, claim=claim, max_grad_norm=1.0).audit()``

    """
    shapes = [tuple(leaf.shape) for leaf in leaves(params)]
    if not shapes:
        raise InputError("There are no parameters; pass those of JAX or torch.")
    first = leaves(params)[0]
    if not (is_jax(first) or is_torch(first)):
        raise InputError(
            f"Parameters must be of JAX or torch, which compute gradients, got a {type(first).__name__}."
        )
    size = flat(params).size
    number = _number(num_canaries, canary, size)
    examples, observed = _repeated(batch, number), _with_canaries(loss)

    def release(rows: FloatArray, present: BoolArray) -> tuple[FloatArray, int]:
        chosen = _chosen(present)
        canaries = like(first, (rows * present[:, None])[chosen])
        batch_examples = map_tree(lambda leaf: leaf[chosen], examples)
        return _flat_gradient(step(observed, params, (batch_examples, canaries)), shapes), len(chosen)

    audit = _StepAudit(
        CanaryPlan(canary, number, fresh_seed(seed)),
        ParameterLayout(tuple(leaf_names(params)), tuple(shapes)),
        [int(np.prod(shape)) for shape in shapes],
        claim=claim,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
        num_steps=num_steps,
        recording={"confidence": confidence, "tests": tests, "callbacks": callbacks},
    )
    return audit.run(release, np.empty((0, size)), like=first)


def _with_canaries(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a loss for pairs of an example and a canary."""

    def observed(params: Any, example: Any) -> Any:
        plain_example, canary = example
        vector = canary.reshape(-1)  # a step may add a dimension of size 1
        return 0.0 * loss(params, plain_example) + dot(vector, params)

    return observed


def _chosen(present: BoolArray) -> IntArray:
    """Return the numbers of the present canaries and of a few absent ones, so that few sizes occur."""
    quarter = -(-present.size // 4)
    needed = max(2 * quarter, quarter * -(-int(np.count_nonzero(present)) // quarter))
    first = np.argsort(~present, kind="stable")  # the present ones
    return np.sort(first[:needed])


def _repeated(batch: Any, count: int) -> Any:
    """Return ``count`` examples, cycling through the batch."""
    sizes = {leaf.shape[0] if leaf.shape else 0 for leaf in leaves(batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(f"Arrays must have the same, nonzero number of examples, got {sorted(sizes)}.")
    indices = np.arange(count) % sizes.pop()
    return map_tree(lambda leaf: leaf[indices], batch)


def _flat_gradient(gradient: Any, shapes: list[tuple[int, ...]]) -> FloatArray:
    """Return the flattened gradient; its order is known only if it is structured like the parameters."""
    shapes_returned = [tuple(leaf.shape) for leaf in leaves(gradient)]
    if shapes_returned != shapes:
        raise InputError(
            f"The step must return a gradient of shapes {shapes}, like the parameters, got {shapes_returned}."
        )
    return flat(gradient)


def replay(
    release: Callable[[Any], Any],
    batch: Any,
    neighbors: Iterable[Any] | None = None,
    *,
    reseed: Callable[[], object],
    max_grad_norm: float,
    batch_size: float | None = None,
) -> ReplayResult:
    """Release a batch and each of its neighbors with the same noise, and compare.

    Args:
        release: Maps a batch of any type to a noisy sum of clipped gradients. It starts from examples, so
            that code that couples them before their gradients is detected too.
        batch: The batch.
        neighbors: Batches with one example more or less. By default they are made from a batch of arrays with
            one row per example; those with an example replaced may move the release by two clipping norms.
        reseed: Resets the noise.
        max_grad_norm: The clipping norm.
        batch_size: What ``release`` divides the sum by, if it does.

    Returns:
        The findings, and the largest change of the release.

    Raises:
        InputError: There are no neighbors, or an argument is invalid.

    >>> def clipped_mean(rows):  # divides by the number of examples, which is private
    ...     norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
    ...     return (rows / norms).mean(axis=0)
    >>> batch = np.eye(10)
    >>> neighbors = [batch[1:], np.concatenate([batch, -50 * batch[:1]])]
    >>> result = replay(
    ...     clipped_mean, batch, neighbors, reseed=lambda: None, max_grad_norm=1.0, batch_size=10
    ... )
    >>> print(result.findings[0].name, round(result.largest, 3))
    sensitivity 1.054

    """
    unit = _validate.positive("max_grad_norm", max_grad_norm)
    divisor = 1.0 if batch_size is None else _validate.positive("batch_size", batch_size)
    step = ReleaseFunction(release, reseed, unit=unit, divisor=divisor)
    if neighbors is None:
        return compare_neighbors(step, batch)
    changes = {f"added or removed, as in neighbors[{index}]": other for index, other in enumerate(neighbors)}
    if not changes:
        raise InputError("neighbors must contain at least one batch.")
    named = [
        Neighbor(change=change, batch=other, size_change=1, is_natural=False)
        for change, other in changes.items()
    ]
    return compare_neighbors(step, batch, named)
