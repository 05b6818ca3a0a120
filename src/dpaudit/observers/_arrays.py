"""Arrays of numpy, torch or jax, told apart without loading what is not there."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import FloatArray

__all__ = ["as_numpy", "is_jax", "is_torch", "like", "require_rows", "require_vector", "with_rows"]


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def is_torch(array: Any) -> bool:
    """Whether it is a tensor of torch."""
    return _library(array) == "torch"


def is_jax(array: Any) -> bool:
    """Whether it is an array of jax."""
    return _library(array) in {"jax", "jaxlib"}


def as_numpy(array: Any) -> FloatArray:
    """The numbers of an array of any library, in double precision."""
    if is_torch(array):
        array = array.detach().cpu()
    return np.asarray(array, dtype=np.float64)


def with_rows(rows: Any, others: FloatArray) -> Any:
    """``rows``, and ``others`` below them, in the library and precision of ``rows``."""
    below = like(rows, others)
    if is_torch(rows):
        import torch  # noqa: PLC0415

        return torch.cat([rows, below])
    if is_jax(rows):
        import jax.numpy as jnp  # noqa: PLC0415

        return jnp.concatenate([rows, below])
    return np.concatenate([rows, below])


def like(array: Any, numbers: FloatArray) -> Any:
    """The numbers, in the library and precision of ``array``."""
    if is_torch(array):
        import torch  # noqa: PLC0415

        return torch.as_tensor(numbers, dtype=array.dtype, device=array.device)
    if is_jax(array):
        import jax.numpy as jnp  # noqa: PLC0415

        return jnp.asarray(numbers, dtype=array.dtype)
    return numbers.astype(array.dtype)


def require_rows(gradients: Any) -> tuple[int, int]:
    """The shape of per-example gradients."""
    shape = tuple(getattr(gradients, "shape", ()))
    if len(shape) != 2 or shape[1] == 0:
        raise InputError(f"Expected gradients of shape examples x parameters, got {shape}.")
    if "float" not in str(gradients.dtype):  # canaries would be cut off to whole numbers
        raise InputError(f"Expected gradients of floats, got {gradients.dtype}.")
    return shape


def require_vector(released: Any, num_parameters: int) -> FloatArray:
    """What a step released, as numbers."""
    shape = tuple(getattr(released, "shape", ()))
    if shape != (num_parameters,):
        raise InputError(f"Expected the step to return a gradient of shape ({num_parameters},), got {shape}.")
    return as_numpy(released)
