"""The clipping inside a gradient function, applied to canaries, which are not gradients of any loss.

:class:`JaxClip` runs the library's own code on them. Functions returned by an observer are marked, so that
they are not observed again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.clipping import BoundedSensitivityCallable

from dpaudit.errors import InputError

_MARK = "observed_by_dpaudit"  # attribute of functions returned by an observer
_LIBRARY = "jax_privacy.clipping"


class JaxClip:
    """The part of ``clipped_grad`` after the gradient of an example: clip, scale, sum, divide.

    The library implements it as one function whose closure variable ``fun`` computes the gradient to clip.
    Here the same function, with everything wrapped around it, is called with another ``fun``, which returns
    a canary in place of the gradient of an example. So a fault in the library's code is detected too.
    """

    def __init__(self, grad_fn: Any) -> None:
        bounded = bounded_callable(grad_fn)
        self.has_aux = bool(bounded.has_aux)  # whether the gradient is the first of two results
        self.bound = float(bounded.l2_norm_bound)  # the largest contribution of one example
        self._clipping_functions: list[FunctionType] = []
        self._is_library_only = True
        self._function = self._copied(grad_fn, set())
        # the library's variable for the loss and its derivative
        loss = [_closure_variable(clip, "value_and_grad_fn") for clip in self._clipping_functions]
        self._loss: Any = loss[0] if loss else None
        if self._loss is None:
            raise InputError(
                "The gradient function does not contain its clipping and its loss; pass the one that "
                "jax_privacy.clipped_grad returned."
            )
        self._settings = inspect.getclosurevars(self._clipping_functions[0]).nonlocals

    @property
    def needs_full_rows(self) -> bool:
        """Whether canaries need an entry for each parameter: code of others may depend on the shapes."""
        clip_pytree = self._clipping_functions[0].__globals__["clip_pytree"]
        return not (self._is_library_only and inspect.isfunction(clip_pytree) and _is_of_library(clip_pytree))

    def norm(self, bound: float) -> float:
        """Return the clipping norm; without clipping, the norm whose contribution is ``bound``."""
        norm = float(self._settings["l2_clip_norm"])
        return norm if 0 < norm < math.inf else bound * float(self._settings["normalize_by"])

    @property
    def multiple(self) -> int:
        """The microbatch size, which must divide the number of examples."""
        return self._settings["microbatch_size"] or 1

    def measured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> dict[str, Any]:
        """Return what is known of a call: norm and rows of its sum, the weights, the largest gradient.

        A loop that does not mark its padding may have any number of padding rows.
        """
        total, aux = result[:2] if self.has_aux else (result, None)
        leaves, padding = self._batch(args), kwargs.get("is_padding_example")
        count = leaves[0].shape[0] if leaves else 0
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(total)]
        norms = getattr(aux, "grad_norms", None)
        if norms is not None and padding is not None:
            norms = jnp.where(jnp.asarray(padding, bool), 0.0, norms)
        return {
            "example_sum_norm": jnp.sqrt(sum(squares)),
            "num_rows": jnp.asarray(count if padding is None else count - jnp.sum(padding)),
            "has_padding": jnp.asarray(padding is None),
            "weights": self._weights(args, total),
            "max_row_norm": None if norms is None else jnp.max(norms, initial=0.0),
        }

    def _weights(self, args: tuple[Any, ...], total: Any) -> Any:
        """Return the argument with respect to which gradients are computed, recognized by its shapes."""
        shapes, structure = _shapes_and_structure(total)
        for position, value in enumerate(args):
            if position not in self._settings["batch_argnums"]:
                others, other_structure = _shapes_and_structure(value)
                if others == shapes and other_structure == structure:
                    return value
        return None

    def _batch(self, args: tuple[Any, ...]) -> list[Any]:
        """Return the arrays of the batch, whose first axis is that of the examples."""
        positions = [position for position in self._settings["batch_argnums"] if position < len(args)]
        leaves = jax.tree.leaves([args[position] for position in positions])
        return [jnp.asarray(leaf) for leaf in leaves] if all(jnp.ndim(leaf) for leaf in leaves) else []

    def digests(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> jax.Array:
        """Return a digest of each row of the batch, rows x 2; zeros for padding that is marked."""
        leaves, padding = self._batch(args), kwargs.get("is_padding_example")
        if not leaves:
            return jnp.zeros((0, 2), jnp.uint32)
        digests: jax.Array = _digests(leaves, jnp.zeros(len(leaves[0]), bool) if padding is None else padding)
        return digests

    def total(self, args: tuple[Any, ...], rows: Any) -> Any:
        """Return the clipped sum of ``rows``; arguments other than the batch are those in ``args``."""
        size = jax.tree.leaves(rows)[0].shape[0]
        positions = self._settings["batch_argnums"]
        new = {position: jnp.zeros(size) for position in positions} | {positions[0]: rows}
        result = self._function(*_with_arguments(args, new))
        return result[0] if self.has_aux else result

    def with_batch(self, args: tuple[Any, ...], inputs: Any, targets: Any) -> list[Any]:
        """Return the arguments of a call with its batch replaced by these examples.

        A batch has two arrays, in any order and structure: inputs of this shape, and classes.
        """
        positions = self._settings["batch_argnums"]
        leaves, structure = jax.tree.flatten([args[position] for position in positions])
        shapes = [tuple(leaf.shape[1:]) for leaf in leaves]
        if sorted(shapes) != sorted([tuple(inputs.shape[1:]), ()]):
            raise InputError(
                f"Batches must be inputs of shape {tuple(inputs.shape[1:])} with one class each, like the "
                f"canaries, got arrays of shapes {[tuple(leaf.shape) for leaf in leaves]}."
            )
        new = [targets if shape == () else inputs for shape in shapes]
        cast = [array.astype(leaf.dtype) for array, leaf in zip(new, leaves, strict=True)]
        return _with_arguments(args, dict(zip(positions, jax.tree.unflatten(structure, cast), strict=True)))

    def gradient(self, args: tuple[Any, ...], inputs: Any, targets: Any) -> Any:
        """Return the gradient of one example, computed by the library from the loss, before clipping."""
        return self._settings["fun"](*self._with_one(args, inputs, targets))[0]

    def gradients(self, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Return the gradients of all examples of a call, before clipping; those of padding are zero."""
        batched, key = self._settings["batch_argnums"], self._settings.get("prng_argnum")
        size = jax.tree.leaves(args[batched[0]])[0].shape[0]
        if key is not None:
            args = tuple(_with_arguments(args, {key: jax.random.split(args[key], size)}))
        keep = self._settings["keep_batch_dim"]
        named = dict(options)
        padding = named.pop("is_padding_example", None)

        def one(*example: Any) -> Any:
            lifted = {place: jax.tree.map(lambda leaf: leaf[None], example[place]) for place in batched}
            return self._settings["fun"](*_with_arguments(example, lifted if keep else {}), **named)[0]

        axes = [0 if place in batched or place == key else None for place in range(len(args))]
        rows = jax.vmap(one, in_axes=axes)(*args)
        if padding is None:
            return rows
        real = ~jnp.asarray(padding, dtype=bool)
        return jax.tree.map(
            lambda leaf: jnp.where(real.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, jnp.zeros_like(leaf)), rows
        )

    def loss(self, args: tuple[Any, ...], inputs: Any, targets: Any) -> Any:
        """Return the loss of one example, which the library wraps in its gradient."""
        return self._loss.__wrapped__(*self._with_one(args, inputs, targets))[0]

    def _with_one(self, args: tuple[Any, ...], inputs: Any, targets: Any) -> list[Any]:
        """Return the arguments of a call for one example, as inside the library's loop over the batch."""
        arguments = self.with_batch(args, inputs[None], targets[None])
        if not self._settings["keep_batch_dim"]:
            for position in self._settings["batch_argnums"]:
                arguments[position] = jax.tree.map(lambda leaf: leaf[0], arguments[position])
        return arguments

    def _copied(self, value: Any, seen: set[int]) -> Any:
        """Return a copy of ``value`` that clips canaries, or None if it does not clip."""
        if id(value) in seen:
            return None
        seen.add(id(value))
        require_unmarked(value, "gradient function")
        if inspect.isfunction(value):
            return self._copied_function(value, seen)
        if isinstance(value, BoundedSensitivityCallable):
            inner = self._copied(function_of(value), seen)
            return inner and with_function(value, inner)
        if isinstance(value, functools.partial):
            inner = self._copied(value.func, seen)
            return inner and functools.partial(inner, *value.args, **value.keywords)
        # a function compiled by jit is the same as the one it wraps
        wrapped = getattr(value, "__wrapped__", None)
        return None if wrapped is None else self._copied(wrapped, seen)

    def _copied_function(self, function: FunctionType, seen: set[int]) -> FunctionType | None:
        if _clips(function):
            self._clipping_functions.append(function)
            return _with_cells(function, {"fun": self._canary})
        variables = inspect.getclosurevars(function).nonlocals
        copies = {name: self._copied(held, seen) for name, held in variables.items()}
        copies = {name: copy for name, copy in copies.items() if copy is not None}
        self._is_library_only &= not copies or _is_of_library(function)
        return _with_cells(function, copies) if copies else None

    def _canary(self, *args: Any, **_: Any) -> tuple[Any, tuple[()]]:
        """Replace the function that computes the gradient of one example, called for each row."""
        row = args[self._settings["batch_argnums"][0]]
        if self._settings["keep_batch_dim"]:
            row = jax.tree.map(lambda leaf: leaf[0], row)
        return row, ()


@jax.jit
def _digests(leaves: list[jax.Array], padding: jax.Array) -> jax.Array:
    """Return 64 bits per row, from products of all its words with random odd numbers.

    Zeros at the end of any axis change nothing: an example is the same row however far its batch is padded.
    """
    first = second = jnp.ones(len(leaves[0]), jnp.uint32)
    for number, leaf in enumerate(leaves):
        words = _words(leaf)
        odd = _odd_numbers(number, words.shape[1:])
        words = words.reshape(len(words), -1)
        mixed = words * odd[0]
        mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x85EBCA6B)
        first = first * np.uint32(31) + jnp.sum(mixed, axis=1, dtype=jnp.uint32)
        second = second * np.uint32(37) + jnp.sum((mixed ^ (mixed >> 13)) * odd[1], axis=1, dtype=jnp.uint32)
    both = jnp.stack([first | 1, second], axis=1)  # never zero
    return jnp.where(jnp.asarray(padding, bool)[:, None], jnp.uint32(0), both)


def _odd_numbers(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return two random odd numbers for each place of a row, 2 x places, in any larger row the same."""
    odd = np.ones((2, *shape), np.uint32)
    for axis, size in enumerate((1, *shape)):
        drawn = np.random.default_rng([number, axis]).integers(0, 2**31, (size, 2), np.uint32) * 2 + 1
        odd *= drawn.T.reshape(2, *(size if place == axis else 1 for place in range(1, len(shape) + 1)))
    return odd.reshape(2, -1)


def _words(leaf: jax.Array) -> jax.Array:
    """Return the bits of each row as 32-bit numbers, one or two for each of its numbers."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == bool:
        leaf = leaf.astype(jnp.uint8)
    is_whole = jnp.issubdtype(leaf.dtype, jnp.integer)
    limits: Any = (jnp.iinfo if is_whole else jnp.finfo)(leaf.dtype)
    if limits.bits < 8:  # numbers that share a byte have no bits of their own
        leaf = leaf.astype(jnp.int8 if is_whole else jnp.float32)
    bits = 8 * leaf.dtype.itemsize
    unsigned = jnp.uint32 if bits > 32 else jnp.dtype(f"uint{bits}")
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _shapes_and_structure(tree: Any) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree.flatten(tree)
    return [jnp.shape(leaf) for leaf in leaves], structure


def _with_arguments(args: Sequence[Any], new: Mapping[int, Any]) -> list[Any]:
    """Return positional arguments with those at the given positions replaced."""
    return [new.get(position, value) for position, value in enumerate(args)]


def bounded_callable(grad_fn: Any) -> BoundedSensitivityCallable:
    """Return the function that states its sensitivity, even if it was compiled afterwards."""
    inner = grad_fn
    while not isinstance(inner, BoundedSensitivityCallable) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    if not isinstance(inner, BoundedSensitivityCallable):
        name = getattr(grad_fn, "__name__", type(grad_fn).__name__)
        raise InputError(
            f"{name} is not private; pass the gradient function that jax_privacy.clipped_grad returned."
        )
    return inner


def function_of(bounded: Any) -> Any:
    """Return the function inside the callable."""
    return getattr(bounded, _function_name(bounded))


def with_function(bounded: Any, function: Any) -> Any:
    """Return the callable with another function inside."""
    return dataclasses.replace(bounded, **{_function_name(bounded): function})


def _function_name(bounded: Any) -> str:
    """Return the name of the field with the function, which depends on the version of JAX Privacy."""
    return next(name for name in ("bounded_sensitivity_fun", "fun") if hasattr(bounded, name))


def _clips(function: FunctionType) -> bool:
    inside = {"fun", "l2_clip_norm", "batch_argnums", "normalize_by", "keep_batch_dim", "microbatch_size"}
    return function.__module__ == _LIBRARY and inside <= set(function.__code__.co_freevars)


def _is_of_library(function: FunctionType) -> bool:
    # the module of the code itself: functools.wraps changes __module__
    return bool(function.__globals__["__name__"] == _LIBRARY)


def _closure_variable(function: Any, name: str) -> Any:
    """Return a closure variable of a library function, or of one that it calls."""
    if not inspect.isfunction(function) or function.__module__ != _LIBRARY:
        return None
    variables = inspect.getclosurevars(function).nonlocals
    inner = (_closure_variable(held, name) for held in variables.values())
    return variables.get(name) or next(filter(None, inner), None)


def _with_cells(function: FunctionType, new: dict[str, Any]) -> FunctionType:
    """Return the same function with some of its closure variables replaced."""
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    cells = tuple(CellType(new[name]) if name in new else cell for name, cell in names)
    code, name = function.__code__, function.__name__
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def marked(function: Any) -> Any:
    """Mark ``function`` as returned by an observer, and return it."""
    setattr(function, _MARK, True)
    return function


def require_unmarked(function: Any, name: str) -> None:
    """Raise if an observer returned it: the canaries of two observers would interfere."""
    inner = function
    while inner is not None:
        if getattr(inner, _MARK, False):
            raise InputError(
                f"This {name} is already observed; pass the one that the library returned, and observe it "
                "only once."
            )
        inner = getattr(inner, "__wrapped__", None) or getattr(inner, "func", None)  # jit, partial
