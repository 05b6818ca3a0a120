"""From numbers to places on a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Scale", "number"]


@dataclass(frozen=True)
class Scale:
    """Numbers from ``low`` to ``high`` at places from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    counts: bool = False
    """Whether the numbers are whole."""

    def __call__(self, value: float) -> float:
        """The place of a number; what lies far outside, or is infinite, is put not so far outside."""
        share = min(max((value - self.low) / (self.high - self.low), -1.0), 2.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round numbers inside, at most so many and one more."""
        step = self._step(most)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def label(self, value: float, most: int = 5) -> str:
        """The number with the digits that tell ticks apart."""
        step = self._step(most)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{value:,.{digits}f}" if digits <= 6 else f"{value:.3g}"

    def _step(self, most: int) -> float:
        step = _round_step((self.high - self.low) / most)
        return max(step, 1.0) if self.counts else step


def _round_step(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def number(value: float | None) -> str:
    """Four digits, which is more than any of these numbers is certain to."""
    if value is None:
        return "\N{EN DASH}"
    return "infinite" if math.isinf(value) else f"{value:.4g}"
