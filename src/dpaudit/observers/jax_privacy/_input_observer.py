"""Input canaries: examples that also pass through the loss, from held-out data to their scores.

:func:`hold_out` splits off examples that are not used for training. :class:`JaxCrafting` makes canaries of
them at the weights of a step, inside compiled code, and :class:`InputInsertion` adds them to the clipped sum
and scores each along its gradient. The library's own code computes, clips and sums their gradients.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dpaudit._types import FloatArray
from dpaudit.canaries import (
    Adversarial,
    Blank,
    Crafted,
    CraftingSearch,
    HeldOutExamples,
    InputCanary,
    InputDomain,
    Mislabelled,
    fingerprints,
    require_held_out,
    split_indices,
    unseen_indices,
)
from dpaudit.errors import InputError
from dpaudit.observers.jax_privacy._clipping import JaxClip
from dpaudit.observers.jax_privacy._step_callbacks import (
    NO_GRADIENT,
    StepCallbacks,
    flat,
    num_entries,
    shape_of,
    tolerance_of,
    unflat,
)

ExampleFunction: TypeAlias = Callable[[Any, Any], jax.Array]
"""Maps one input and its class to the loss, or to its gradient as a vector."""
_CRAFTING = 4  # purpose of a random stream, besides those of CanaryPlan
_HINT = "does the model have that many classes? Set their number with num_classes of hold_out()."
_DIRECTION_TOLERANCE = 1e-3  # between unit vectors that are the same up to rounding
_MIN_NORM = 1e-12  # in clipping norms: a shorter gradient has no direction to score along


@dataclass(frozen=True, eq=False, repr=False)
class HeldOutArrays(HeldOutExamples[np.ndarray]):
    """Inputs and their classes; created only by :func:`hold_out`, so that no batch is passed by mistake."""

    _expected: ClassVar[str] = "hold_out(inputs, targets, ...)"


@dataclass(frozen=True, eq=False)
class Given(InputCanary):
    """Examples of your own, each used as a canary."""

    inputs: Any
    targets: Any

    def __post_init__(self) -> None:
        _require_pairs(np.asarray(self.inputs), np.asarray(self.targets))


def hold_out(
    inputs: Any, targets: Any, num_held_out: int, *, seed: int = 0, num_classes: int | None = None
) -> tuple[tuple[np.ndarray, np.ndarray], HeldOutArrays]:
    """Split off random examples, from which input canaries are made; never split a batch.

    Args:
        inputs: The inputs of all examples.
        targets: Their classes.
        num_held_out: How many to split off; duplicates of examples in the first part are dropped.
        seed: The seed of the choice.
        num_classes: The number of classes, by default that of the targets.

    Returns:
        Inputs and targets to train on, which is not verified, and the held-out examples.

    Example:
        ``(inputs, targets), held_out = hold_out(inputs, targets, 100)``

    """
    inputs, targets = np.asarray(inputs), np.asarray(targets)
    _require_pairs(inputs, targets)
    rest, held = split_indices(len(targets), num_held_out, seed)
    held = held[unseen_indices(fingerprints(inputs[held]), set(fingerprints(inputs[rest])))]
    count = 1 + int(targets.max()) if num_classes is None else num_classes
    return (inputs[rest], targets[rest]), HeldOutArrays.split_off(inputs[held], targets[held], count)


def _require_pairs(inputs: np.ndarray, targets: np.ndarray) -> None:
    if targets.ndim != 1 or inputs.ndim < 2 or len(inputs) != len(targets) or len(targets) == 0:
        raise InputError(
            f"Inputs must have one class each, got arrays of shapes {inputs.shape} and {targets.shape}."
        )


def num_inputs(canary: InputCanary, data: object, count: int | None) -> int:
    """Return the number of canaries, by default 16; raise if they cannot be made from the data."""
    if isinstance(canary, Given):
        if data is not None:
            raise InputError("Given(...) contains its own examples; leave out held_out.")
        if count not in (None, len(canary.targets)):
            raise InputError(
                f"num_canaries must be {len(canary.targets)}, the number of given examples, got {count}."
            )
        return len(canary.targets)
    if not isinstance(canary, Blank | Mislabelled | Adversarial | Crafted):
        raise InputError(
            f"canary must be Blank(), Mislabelled(), Adversarial(), Crafted() or Given(...), got {canary!r}."
        )
    dtype = require_held_out(canary, data, HeldOutArrays).inputs.dtype
    if canary.uses_weights and not np.issubdtype(dtype, np.floating):
        raise InputError(
            f"{canary!r} needs the gradient of the loss with respect to floating-point inputs, got {dtype}; "
            "use Mislabelled()."
        )
    return 16 if count is None else count


def first_examples(
    canary: InputCanary, data: HeldOutArrays | None, num_canaries: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and classes of canaries, each from a different example if there are enough."""
    if isinstance(canary, Given):
        return np.asarray(canary.inputs), np.asarray(canary.targets)
    assert data is not None  # required for this canary
    chosen = rng.choice(len(data), num_canaries, replace=num_canaries > len(data))
    inputs, targets = data.inputs[chosen], data.targets[chosen]
    if isinstance(canary, Blank):
        zeros = InputDomain.of(data.inputs).nearest(np.zeros_like(inputs))
        return zeros, rng.integers(0, data.num_classes, num_canaries).astype(targets.dtype)
    if isinstance(canary, Mislabelled):
        others = rng.integers(1, data.num_classes, num_canaries)
        return inputs, ((targets + others) % data.num_classes).astype(targets.dtype)
    return inputs, targets


@dataclass(frozen=True, kw_only=True, eq=False)
class JaxCrafting:
    """A function that crafts canaries from held-out data, with loss and gradient at the current weights."""

    data: HeldOutArrays
    loss: ExampleFunction
    gradient: ExampleFunction
    max_grad_norm: float

    def __call__(self, canary: InputCanary, start: Any, targets: Any) -> Any:
        """Return the inputs that ``canary`` describes, crafted from ``start``."""
        match canary:
            case Adversarial():
                return self._search(self._negative_loss, canary, start, targets, radius=canary.radius)
            case Crafted():
                return self._search(self._cosine(canary), canary, start, targets)
        raise InputError(f"canary must be Adversarial() or Crafted(), got {canary!r}.")

    def _search(
        self,
        value: ExampleFunction,
        canary: Adversarial | Crafted,
        start: Any,
        targets: Any,
        *,
        radius: float | None = None,
    ) -> Any:
        search = CraftingSearch(
            domain=InputDomain.of(self.data.inputs),
            num_steps=canary.num_steps,
            step_size=canary.step_size,
            radius=radius,
            loop=partial(jax.lax.fori_loop, 0),
        )
        return search(jax.vmap(jax.value_and_grad(value)), start, targets)

    def _negative_loss(self, example: Any, target: Any) -> jax.Array:
        return -self.loss(example, target)

    def _cosine(self, canary: Crafted) -> ExampleFunction:
        """Return the absolute cosine to the mean gradient of held-out data; ``canary`` may add a term."""
        reference = mean_gradient(self.data, self.gradient)

        def value(example: Any, target: Any) -> jax.Array:
            gradient = self.gradient(example, target)
            norm, other = _norm(gradient), _norm(reference)
            cosine = jnp.abs(gradient @ reference / (norm * other))
            return jnp.asarray(canary.objective(cosine, norm, self.max_grad_norm))

        return value


def mean_gradient(data: HeldOutArrays, gradient: ExampleFunction) -> jax.Array:
    """Return the mean gradient of held-out examples, in chunks of equal size; padding has weight 0."""
    size = min(32, len(data))
    indices = np.arange(math.ceil(len(data) / size) * size)
    weights = (indices < len(data)).astype(np.float32)
    arrays = data.inputs[indices % len(data)], data.targets[indices % len(data)], weights
    chunks = jax.tree.map(lambda array: jnp.asarray(array).reshape(-1, size, *array.shape[1:]), arrays)
    sums = jax.lax.map(lambda chunk: chunk[2] @ jax.vmap(gradient)(*chunk[:2]), chunks)
    mean: jax.Array = sums.sum(axis=0) / len(data)
    return mean


def _norm(vector: jax.Array) -> jax.Array:
    """Return the norm, kept above zero, where the square root has no derivative."""
    return jnp.sqrt(vector @ vector + 1e-30)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class CanaryDirections:
    """The directions along which a release is scored, and the contributions of the canaries."""

    directions: Any  # canaries x parameters; unit vectors, or zeros where a gradient is too short
    lengths: Any  # the largest contribution of each canary, on the scale of the noise
    others: Any  # the contribution of the other canaries along each canary
    inserted: Any  # the contribution of all canaries
    losses: Any  # one per canary


class InputInsertion:
    """Input canaries, which also pass through the loss.

    A score is the component of the release along the canary's gradient, without the batch and the other
    canaries, divided by the largest contribution of the canary: 1 if it is present, more if it was not
    clipped. Examples are kept between steps, and their directions between a gradient and its release.
    """

    def __init__(self, callbacks: StepCallbacks, canary: InputCanary, data: HeldOutArrays | None) -> None:
        self._callbacks, self._canary, self._data = callbacks, canary, data
        self._coins = callbacks.audited.plan
        self._examples = self._first_examples(0)
        self._made_at: int | None = None
        self._along: CanaryDirections | None = None

    def join(self, clip: JaxClip, args: tuple[Any, ...], total: Any, measured: Any) -> Any:
        inputs, rows, losses = self._gradients(clip, args)
        joins = self._callbacks.presence()
        summed = partial(_summed, clip=clip, args=args, like=total)
        together = summed(jnp.where(joins[:, None] > 0, rows, 0.0))  # one that is absent may be NaN
        alone = jax.lax.map(lambda row: flat(summed(row[None])), rows)
        joined = jax.tree.map(jnp.add, total, together)
        norms = clip.norm(self._callbacks.norm), self._callbacks.norm
        along = _directions(rows, alone, joins, flat(together), norms=norms)
        along = replace(along, losses=losses)
        off = jnp.max(jnp.abs(along.inserted - joins @ alone))
        stray = off > tolerance_of(total) * jnp.max(jnp.abs(alone))
        batch, both = (along.directions @ flat(tree) for tree in (total, joined))
        self._callbacks.call(self._note_inputs, None, inputs, (batch, both, measured), stray, along)
        return joined

    def _gradients(self, clip: JaxClip, args: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the inputs of this step's canaries, their gradients before clipping, and their losses."""
        shapes = jax.tree.map(shape_of, (np.zeros((), np.bool_), *self._examples))
        is_due, inputs, targets = self._callbacks.call(self._current_examples, shapes)
        loss = partial(clip.loss, args)

        def gradient(example: Any, target: Any) -> jax.Array:
            return flat(clip.gradient(args, example, target))

        if self._canary.uses_weights:
            assert self._data is not None  # required for this canary
            crafting = JaxCrafting(
                data=self._data, loss=loss, gradient=gradient, max_grad_norm=clip.norm(self._callbacks.norm)
            )
            craft = partial(crafting, self._canary)
            inputs = jax.lax.cond(is_due, craft, lambda start, _: start, inputs, targets)
        return inputs, jax.vmap(gradient)(inputs, targets), jax.vmap(loss)(inputs, targets)

    def _current_examples(self) -> tuple[Any, ...]:
        """Return whether to craft canaries in this step, and their inputs and classes."""
        index = self._callbacks.audited.steps.index
        is_due = not self._callbacks.audited.steps.is_over and self._canary.is_due(index, self._made_at)
        if is_due:
            self._examples, self._made_at = self._first_examples(index), index
        return np.bool_(is_due), *self._examples

    def _first_examples(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rng = self._coins.rng(index, _CRAFTING)
        examples = first_examples(self._canary, self._data, self._coins.num_canaries, rng)
        # only NumPy: callbacks from compiled code must not use JAX, which would deadlock
        inputs, targets = (array.astype(jax.dtypes.canonicalize_dtype(array.dtype)) for array in examples)
        return inputs, targets

    def _note_inputs(self, inputs: Any, sums: Any, stray: Any, along: CanaryDirections) -> None:
        """Keep the projections of a gradient with and without canaries, and the crafted inputs."""
        self._examples = np.asarray(inputs), self._examples[1]
        self._callbacks.add_pending(*sums)
        is_first = self._along is None
        self._along = self._along or jax.tree.map(np.asarray, along)
        if stray:
            raise InputError(
                "The gradient function does not clip each example separately: the sum of all canaries "
                "differs from the sum one by one, so examples affect each other."
            )
        if self._callbacks.audited.steps.index == 0:
            self._check_first(np.asarray(along.losses), np.asarray(along.directions))
        if is_first:
            return
        if np.abs(np.asarray(along.directions) - self._along.directions).max() > _DIRECTION_TOLERANCE:
            raise InputError("All gradients of one step must be computed at the same weights.")

    def _check_first(self, losses: np.ndarray, directions: np.ndarray) -> None:
        """Raise or warn if a canary reveals nothing at the initial weights; later, training may diverge."""
        is_silent = ~directions.any(axis=1)
        lost, silent = (
            np.unique(self._examples[1][what]).tolist() for what in (~np.isfinite(losses), is_silent)
        )
        if lost:
            raise InputError(
                f"Canaries must have a finite loss, got an infinite or NaN loss for classes {lost}: {_HINT}"
            )
        if silent:
            warnings.warn(
                f"{is_silent.sum()} of {len(losses)} canaries, of classes {silent}, have zero gradients and "
                f"reveal nothing: {_HINT}",
                stacklevel=2,
            )

    def subtract(self, arrived: Any, released: Any) -> Any:
        count, size = self._coins.num_canaries, num_entries(arrived)
        shapes = np.zeros((count, size), np.float32), np.zeros(size, np.float32)
        directions, inserted = self._callbacks.call(self._current_directions, jax.tree.map(shape_of, shapes))
        after, before = (directions @ flat(tree) for tree in (released, arrived))
        sampled = self._callbacks.sample_release(released, arrived)
        room = np.float32(tolerance_of(arrived))
        scale = self._callbacks.call(self._release, shape_of(after), after, before, sampled, room)[0]
        return jax.tree.map(jnp.subtract, arrived, unflat(scale * inserted, arrived))

    def _current_directions(self) -> tuple[Any, Any]:
        if self._along is None:
            raise InputError(NO_GRADIENT)
        return self._along.directions, self._along.inserted

    def _release(self, products: Any, arrived: Any, sampled: Any, tolerance: Any) -> FloatArray:
        """Keep the scores of a release; return the factor by which the loop multiplied the sum."""
        along, self._along = self._along, None
        pending, scale = self._callbacks.take_pending(arrived, tolerance)
        assert along is not None  # _current_directions comes first
        with self._callbacks.audited.steps.guard():
            others = scale * (pending.batch + np.asarray(along.others, np.float64))
            scores = (np.asarray(products, np.float64) - others) / along.lengths
            lengths = np.where(np.any(along.directions, axis=1), along.lengths / self._callbacks.norm, 0.0)
            self._callbacks.finish_release(scores, pending, scale, sampled, lengths=lengths)
        return np.full_like(products, np.mean(scale))


def _summed(rows: jax.Array, *, clip: JaxClip, args: Any, like: Any) -> Any:
    """Return the clipped sum of these gradients, computed by the library; zeros pad a microbatch."""
    missing = math.ceil(len(rows) / clip.multiple) * clip.multiple - len(rows)
    return clip.total(args, unflat(jnp.pad(rows, ((0, missing), (0, 0))), like))


def _directions(
    rows: Any, alone: Any, joins: Any, inserted: Any, *, norms: tuple[float, float]
) -> CanaryDirections:
    """Return the directions along which canaries with these gradients are scored.

    ``norms`` are the clipping norm and the largest contribution of one example to the sum.
    """
    clip_norm, most = norms
    row_norms = jnp.linalg.norm(rows, axis=1)
    is_usable = jnp.isfinite(row_norms) & (row_norms > _MIN_NORM * clip_norm)
    directions = jnp.where(is_usable[:, None], rows / jnp.where(is_usable, row_norms, 1.0)[:, None], 0.0)
    lengths = jnp.where(is_usable, jnp.minimum(row_norms / clip_norm, 1.0) * most, 1.0)
    along_itself = joins * jnp.sum(directions * alone, axis=1)
    return CanaryDirections(directions, lengths, directions @ inserted - along_itself, inserted, losses=None)
