"""Parameters and batches of jax or torch: arrays in dictionaries, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.observers._arrays import as_numpy
from dpaudit.stats._types import FloatArray

__all__ = ["flat", "leaves", "mapped", "product"]


def leaves(tree: Any) -> list[Any]:
    """The arrays, those of a dictionary in the order of its keys."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    if not hasattr(tree, "shape"):
        raise InputError(
            f"Expected arrays in dictionaries, lists and tuples, got a {type(tree).__name__} among them."
        )
    return [tree]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same with ``function`` of each array."""
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [mapped(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return function(tree)


def flat(tree: Any) -> FloatArray:
    """All numbers, one after the other."""
    return np.concatenate([as_numpy(leaf).reshape(-1) for leaf in leaves(tree)])


def product(vector: Any, tree: Any) -> Any:
    """The dot product of a flat vector with all numbers of the tree, in the library of both."""
    total, start = 0.0, 0
    for leaf in leaves(tree):
        end = start + int(np.prod(leaf.shape))
        total = total + (vector[start:end].reshape(leaf.shape) * leaf).sum()
        start = end
    return total
