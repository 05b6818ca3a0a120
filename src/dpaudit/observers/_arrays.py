"""Arrays of NumPy, torch or JAX, distinguished without importing a library that is not installed.

Parameters and batches of JAX or torch are trees: arrays in dictionaries, lists and tuples. :func:`replaced`
and :func:`attribute_restored` change objects of a library for the time of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dpaudit._types import FloatArray
from dpaudit.errors import InputError

_ROOM_FOR_SQUARES = 16.0
_MISSING = object()


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def is_torch(array: Any) -> bool:
    """Return whether ``array`` is a torch tensor."""
    return _library(array) == "torch"


def is_jax(array: Any) -> bool:
    """Return whether ``array`` is a JAX array."""
    return _library(array) in {"jax", "jaxlib"}


def as_numpy(array: Any) -> FloatArray:
    """Return an array of any library as a NumPy array in double precision."""
    if is_torch(array):
        array = array.detach().cpu()
        array = array.float() if str(array.dtype) == "torch.bfloat16" else array  # unknown to NumPy
    return np.asarray(array, dtype=np.float64)


def with_rows(rows: Any, others: FloatArray, rng: np.random.Generator) -> Any:
    """Return ``rows`` with the ``others`` at random positions, in the library and precision of ``rows``.

    Both keep their order, so that code that treats a position differently does so for any of them.
    """
    is_other = rng.permutation(len(rows) + len(others)) >= len(rows)
    order = np.argsort(np.argsort(is_other, kind="stable"))  # from positions to rows and then others
    if is_torch(rows):
        import torch  # noqa: PLC0415

        return torch.cat([rows, like(rows, others)])[order]
    if is_jax(rows):
        import jax.numpy as jnp  # noqa: PLC0415

        # on the host, because JAX would compile the operations for every number of rows
        return jnp.asarray(np.concatenate([rows, others], dtype=rows.dtype)[order])
    return np.concatenate([rows, others], dtype=rows.dtype)[order]


def like(array: Any, numbers: FloatArray) -> Any:
    """Return the numbers in the library and precision of ``array``."""
    if is_torch(array):
        import torch  # noqa: PLC0415

        return torch.as_tensor(numbers, dtype=array.dtype, device=array.device)
    if is_jax(array):
        import jax.numpy as jnp  # noqa: PLC0415

        return jnp.asarray(numbers, dtype=array.dtype)
    return numbers.astype(array.dtype)


def require_rows(gradients: Any) -> tuple[int, int]:
    """Return the shape of per-example gradients; raise if it is not examples x parameters."""
    shape = tuple(getattr(gradients, "shape", ()))
    if len(shape) != 2 or shape[1] == 0:
        raise InputError(f"gradients must have shape examples x parameters, got {shape}.")
    if "float" not in str(gradients.dtype):  # canaries would be truncated to integers
        raise InputError(f"gradients must have a floating-point dtype, got {gradients.dtype}.")
    return shape


def require_vector(released: Any, num_parameters: int) -> FloatArray:
    """Return the release of a step in double precision; raise if it has the wrong shape."""
    shape = tuple(getattr(released, "shape", ()))
    if shape != (num_parameters,):
        raise InputError(f"The step must return a gradient of shape ({num_parameters},), got {shape}.")
    return as_numpy(released)


def leaves(tree: Any) -> list[Any]:
    """Return the arrays of a tree; those of a dictionary are sorted by key."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for subtree in tree for leaf in leaves(subtree)]
    if not hasattr(tree, "shape"):
        raise InputError(f"Dictionaries, lists and tuples must contain arrays, got a {type(tree).__name__}.")
    return [tree]


def leaf_names(tree: Any, prefix: str = "") -> list[str]:
    """Return a name for each array of a tree, in the order of :func:`leaves`."""
    if isinstance(tree, dict):
        return [name for key in sorted(tree) for name in leaf_names(tree[key], f"{prefix}.{key}")]
    if isinstance(tree, list | tuple):
        return [name for i, subtree in enumerate(tree) for name in leaf_names(subtree, f"{prefix}.{i}")]
    return [prefix.removeprefix(".") or "params"]


def precision(array: Any) -> tuple[float, float]:
    """Return the relative precision of a dtype, and the longest vector whose square it represents."""
    name = str(array.dtype).rpartition(".")[2]
    if name == "bfloat16":
        return 2.0**-8, math.sqrt(float(np.finfo(np.float32).max)) / _ROOM_FOR_SQUARES
    limits = np.finfo(name)
    return float(limits.eps), math.sqrt(float(limits.max)) / _ROOM_FOR_SQUARES


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with ``function`` applied to each array."""
    if isinstance(tree, dict):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        mapped = [map_tree(function, subtree) for subtree in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    return function(tree)


def flat(tree: Any) -> FloatArray:
    """Return the concatenation of all arrays of a tree."""
    return np.concatenate([as_numpy(leaf).reshape(-1) for leaf in leaves(tree)])


def dot(vector: Any, tree: Any) -> Any:
    """Return the dot product of a flat vector with the flattened tree, in the library of both."""
    total, start = 0.0, 0
    for leaf in leaves(tree):
        end = start + int(np.prod(leaf.shape))
        total = total + (vector[start:end].reshape(leaf.shape) * leaf).sum()
        start = end
    return total


@contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object; restore its own attribute, or remove it if there was none."""
    attributes = {key: value for key, value in vars(owner).items() if key == name}
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(attributes)


@contextmanager
def attribute_restored(owners: Sequence[Any], name: str) -> Iterator[None]:
    """Restore an attribute of each owner at the end, or remove it if there was none."""
    before = [getattr(owner, name, _MISSING) for owner in owners]
    try:
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            if value is not _MISSING:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)
