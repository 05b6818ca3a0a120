"""The examples beside the canaries of an audited step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.observers._arrays import require_rows

__all__ = ["others_of", "silent", "with_hint"]


def others_of(gradients: Any, num_parameters: int | None) -> Any:
    """Their gradients, examples x parameters; none at all if only the number of parameters is given."""
    if (gradients is None) == (num_parameters is None):
        raise InputError(
            "Expected either gradients=..., those of the other examples, or num_parameters=..., got "
            f"{'neither' if gradients is None else 'both'}."
        )
    if num_parameters is not None:
        return np.zeros((0, _validate.whole("num_parameters", num_parameters)), np.float32)
    require_rows(gradients)
    return gradients


def silent(gradients: Any) -> Any:
    """Zeros in their place, which are the same with any clipping."""
    return 0 * gradients


def with_hint(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same step; if it cannot use arrays of numpy, it is said how it gets others."""

    @wraps(step)
    def called(rows: Any) -> Any:
        try:
            return step(rows)
        except (AttributeError, TypeError) as error:
            error.add_note(
                "With num_parameters=..., dp_audit gives the step arrays of numpy. For torch or jax pass "
                f"gradients=torch.zeros(0, {rows.shape[1]}), or that of jax.numpy."
            )
            raise

    return called
