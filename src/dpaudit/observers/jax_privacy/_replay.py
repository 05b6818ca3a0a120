"""``replay()`` for JAX Privacy: one whole training step, run on a batch and on neighbors of it.

A step in JAX is a pure function, so that nothing has to be restored: the random keys are part of its state.
The gradient function and the privatizer are passed to the step, which makes the sum and the release visible.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.errors import InputError
from dpaudit.observers._neighbors import batch_size
from dpaudit.observers._replay import compare_neighbors
from dpaudit.observers._replay_result import (
    NumberArray,
    ReleaseTrace,
    ReplayedStep,
    ReplayResult,
    StepTrace,
    fingerprint_rows,
    scale_between,
    unmatched_rows,
)
from dpaudit.observers.jax_privacy._clipping import JaxClip, bounded_callable, require_unmarked, with_function
from dpaudit.observers.jax_privacy._step_callbacks import precision_of, unflat


def replay(
    step: Callable[[Any, optax.GradientTransformation, Any, Any], Any],
    state: Any,
    batch: Any,
    *,
    grad_fn: Any,
    privatizer: optax.GradientTransformation,
    max_grad_norm: float | None = None,
    padding: int | str | None = None,
) -> ReplayResult:
    """Run a step on a batch and on neighbors of it, and compare everything.

    The step runs about 14 times, without compilation.

    Args:
        step: One whole training step, ``step(grad_fn, privatizer, state, batch)``. It returns the new state,
            or the new state followed by values that are not published.
        state: What the loop carries from step to step: parameters, states of privatizer and optimizer, keys.
        batch: Arrays with one row per example, in tuples, lists or dictionaries; a few examples are enough.
        grad_fn: What ``jax_privacy.clipped_grad`` returned.
        privatizer: The transformation that adds noise.
        max_grad_norm: The claimed bound on what one example adds to the input of the privatizer, by default
            that of ``grad_fn``, scaled as the step scales the sum.
        padding: The index or key of the array of the batch that marks padding, if there is one.

    Returns:
        The findings, and the largest change of the release.

    Example:
        ``replay(step, state, batch, grad_fn=grad_fn, privatizer=privatizer).raise_for_violation()``

    """
    bound = None if max_grad_norm is None else _validate.positive("max_grad_norm", max_grad_norm)
    require_unmarked(privatizer.update, "privatizer")
    replayed = _JaxStep(step, state, batch, grad_fn, privatizer, bound=bound, padding=padding)
    with jax.disable_jit():
        return compare_neighbors(replayed, batch, padding=padding)


class _JaxStep(ReplayedStep):
    """A pure step, which is passed functions that note what they are called with."""

    can_vary = False
    how_to_repeat = "keep all that the step carries to the next one in its state, also random keys"

    def __init__(
        self,
        step: Callable[..., Any],
        state: Any,
        batch: Any,
        grad_fn: Any,
        privatizer: optax.GradientTransformation,
        *,
        bound: float | None,
        padding: int | str | None,
    ) -> None:
        self._step, self._state, self._privatizer, self._bound = step, state, privatizer, bound
        self._gradients = _Gradients(grad_fn)
        self.num_examples = batch_size(batch)
        self.accepts_any_size = padding is not None  # compiled code often has one shape
        self.not_covered = ("what the step returns besides its state is not compared",)

    def run(
        self, batch: Any, first: StepTrace | None, *, norm_factor: float = 1.0, next_batch: Any = None
    ) -> StepTrace:
        assert norm_factor == 1.0  # the norm is fixed in grad_fn
        assert next_batch is None  # the next step depends on the state alone
        run = _JaxRun(self._gradients, self._privatizer, self._bound, first)
        try:
            result = self._step(run.grad_fn, run.privatizer, self._state, batch)
            run.trace.state.update(_state_digests(self._new_state(result)))
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # an error is a result, too
            run.trace.error = error
        run.compare_randomness()
        return run.trace

    def _new_state(self, result: Any) -> Any:
        """Return the part of a result that is the new state."""
        expected: Any = jax.tree.structure(self._state)
        candidates = [result]
        if isinstance(result, tuple):
            candidates += [result[0] if result else None]
            if isinstance(self._state, tuple):
                candidates.append(result[: len(self._state)])
        for candidate in candidates:
            if jax.tree.structure(candidate) == expected:
                return candidate
        raise InputError(
            f"The step must return a new state of the structure {expected}, optionally followed by other "
            f"values, got {jax.tree.structure(result)}."
        )


class _Gradients:
    """The gradient function and the gradients of the examples, compiled once for each shape."""

    def __init__(self, grad_fn: Any) -> None:
        self.bounded, self._clip = bounded_callable(grad_fn), JaxClip(grad_fn)
        self.bound, self._grad_fn = self._clip.bound, grad_fn
        self._compiled = jax.jit(self._call)

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, NumberArray, FloatArray]:
        """Return the result, the sum of clipped gradients in it, and fingerprints of the gradients."""
        try:
            with jax.disable_jit(False):
                result, rows = self._compiled(args, options)
        except Exception:  # noqa: BLE001  # arguments that are no arrays; an error of the code is raised below
            result, rows = self._call(args, options)
        total = _flat(result[0] if self._clip.has_aux else result)
        return result, total, fingerprint_rows(jax.tree.leaves(rows))

    def _call(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        return self._grad_fn(*args, **options), self._clip.gradients(args, options)


class _JaxRun:
    """The functions that the step is passed during one run."""

    def __init__(
        self,
        gradients: _Gradients,
        privatizer: optax.GradientTransformation,
        bound: float | None,
        first: StepTrace | None,
    ) -> None:
        self.trace = StepTrace()
        self._gradients, self._privatizer = gradients, privatizer
        self._bound, self._first = bound, first
        self._pending: list[tuple[NumberArray, FloatArray]] = []  # sums and rows since the last release
        self.grad_fn = with_function(gradients.bounded, self._gradient)
        self.privatizer = optax.GradientTransformation(privatizer.init, self._update)

    def _gradient(self, *args: Any, **options: Any) -> Any:
        """Replace the gradient function."""
        result, total, rows = self._gradients(args, options)
        self._pending.append((total, rows))
        return result

    def _update(self, updates: Any, state: Any, params: Any = None, **options: Any) -> tuple[Any, Any]:
        """Replace the privatizer: note the release, and return that of the first run."""
        noisy, state = self._privatizer.update(updates, state, params, **options)
        total, eps = _flat(updates), precision_of(noisy)
        factor, rows = self._take_pending(total, eps)
        unit = self._bound or self._gradients.bound * (abs(factor) if factor else 1.0)
        index = len(self.trace.releases)
        self.trace.releases.append(
            ReleaseTrace(
                total=total,
                noisy=_flat(noisy),
                unit=unit,
                eps=eps,
                rows=rows,
                row_eps=eps if jax.default_backend() == "cpu" else 2.0**-8,  # of products in bfloat16
                factor=factor,
            )
        )
        if self._first is not None and index < len(self._first.releases):
            noisy = unflat(jnp.asarray(self._first.releases[index].noisy), noisy)
        return noisy, state

    def _take_pending(self, total: NumberArray, eps: float) -> tuple[float | None, FloatArray | None]:
        """Return the factor of the sum since the last release and its rows, None where they are unknown."""
        pending, self._pending = self._pending, []
        if not pending:
            return None, None
        factor = scale_between(np.sum([clipped for clipped, _ in pending], axis=0), total, eps)
        if factor is None and len(pending) > 1:  # some are not part of the sum
            return None, None
        return factor, np.concatenate([rows for _, rows in pending])

    def compare_randomness(self) -> None:
        """Note whether gradients of unchanged examples differ although no other example can affect them.

        Random masks that are drawn for the whole batch depend on its size. If examples were coupled, the
        gradients would also differ in batches of the same size.
        """
        if self._first is not None:
            pairs = zip(self._first.releases, self.trace.releases, strict=False)
            self.trace.has_same_randomness = all(_is_same(first.rows, second.rows) for first, second in pairs)


def _is_same(before: FloatArray | None, after: FloatArray | None) -> bool:
    """Return whether one of two batches of different sizes has all gradients of the other, up to a factor."""
    if before is None or after is None or len(before) == len(after) or not len(before) or not len(after):
        return True
    ratio = len(before) / len(after)  # of gradients of a mean
    return any(min(unmatched_rows(factor * before, after)) == 0 for factor in (1.0, ratio, 1 / ratio))


def _flat(tree: Any) -> NumberArray:
    """Return all numbers of a tree as one vector; raise if they are not known, as while compiling."""
    leaves = jax.tree.leaves(tree)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise InputError(
            "The step must call grad_fn and privatizer with arrays, got abstract values; do not vectorize, "
            "differentiate or distribute the step."
        )
    vectors = [np.asarray(leaf).reshape(-1) for leaf in leaves]
    return np.concatenate(
        [vector if vector.dtype == np.float64 else vector.astype(np.float32) for vector in vectors]
    )


def _state_digests(state: Any) -> dict[tuple[str, str], str]:
    """Return a digest of each array of the state, by the finding that a change of it is."""
    digests = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_key = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        raw = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        text = hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()
        digests["other-state", f"state{jax.tree_util.keystr(path)}"] = text
    return digests
