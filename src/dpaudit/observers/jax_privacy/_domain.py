"""Where the inputs of canaries live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["Domain"]


@dataclass(frozen=True, eq=False)
class Domain:
    """From ``low`` to ``high`` in each entry, or only these two values, if features are binary.

    Pixels of an image share one range. Features of a table have one each.
    """

    low: np.ndarray
    high: np.ndarray
    is_binary: bool

    @classmethod
    def of(cls, inputs: np.ndarray) -> Domain:
        """The domain of inputs that are known."""
        low, high = inputs.min(), inputs.max()
        if low < high and bool(((inputs == low) | (inputs == high)).all()):
            return cls(low, high, is_binary=True)
        axis = 0 if inputs.ndim == 2 else None
        return cls(inputs.min(axis=axis), inputs.max(axis=axis), is_binary=False)

    @property
    def span(self) -> np.ndarray:
        """The length of the range: the unit of steps and radii."""
        return np.asarray(self.high - self.low)

    def nearest(self, inputs: Any) -> Any:
        """The nearest inputs in the domain, of their type; halfway is low."""
        # numpy stays numpy: what is called from compiled code must not compute with jax, which would wait
        array = np if isinstance(inputs, np.ndarray) else jnp
        if self.is_binary:
            found = array.where(inputs > (self.low + self.high) / 2, self.high, self.low)
        else:
            found = array.clip(inputs, self.low, self.high)
        return found.astype(inputs.dtype)

    def flipped(self, inputs: Any) -> Any:
        """Every binary feature as the other one."""
        return self.low + self.high - inputs
