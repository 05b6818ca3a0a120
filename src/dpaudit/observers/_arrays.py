"""Arrays of numpy, torch or jax, told apart without loading what is not there."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._types import FloatArray

__all__ = ["as_numpy", "require_rows", "require_vector", "with_rows"]


def _library(array: Any) -> str:
    return type(array).__module__.partition(".")[0]


def as_numpy(array: Any) -> FloatArray:
    """The numbers of an array of any library, in double precision."""
    if _library(array) == "torch":
        array = array.detach().cpu()
    return np.asarray(array, dtype=np.float64)


def with_rows(rows: Any, others: FloatArray) -> Any:
    """``rows``, and ``others`` below them, in the library and precision of ``rows``."""
    library = _library(rows)
    if library == "torch":
        import torch  # noqa: PLC0415

        return torch.cat([rows, torch.as_tensor(others, dtype=rows.dtype, device=rows.device)])
    if library in {"jax", "jaxlib"}:
        import jax.numpy as jnp  # noqa: PLC0415

        return jnp.concatenate([rows, jnp.asarray(others, dtype=rows.dtype)])
    return np.concatenate([rows, others.astype(rows.dtype)])


def require_rows(gradients: Any) -> tuple[int, int]:
    """The shape of per-example gradients."""
    shape = tuple(getattr(gradients, "shape", ()))
    if len(shape) != 2 or shape[1] == 0:
        raise InputError(f"Expected gradients of shape examples x parameters, got {shape}.")
    return shape


def require_vector(released: Any, num_parameters: int) -> FloatArray:
    """What a step released, as numbers."""
    shape = tuple(getattr(released, "shape", ()))
    if shape != (num_parameters,):
        raise InputError(f"Expected the step to return a gradient of shape ({num_parameters},), got {shape}.")
    return as_numpy(released)
