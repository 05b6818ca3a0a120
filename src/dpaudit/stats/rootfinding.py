"""Searches for the largest refuted value, which is a lower bound.

General root finders return a point on either side of the crossing; these
functions return one on the refuted side, which is the safe one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_TINY = 1e-9
_HUGE = 1e9
SMALLEST_ERROR = 1e-12  # smaller error rates are not more informative
LARGEST_ERROR = 0.5  # at which a bound is defined


def last_true(refuted: Callable[[float], bool], start: float = 1.0, tolerance: float = 1e-7) -> float:
    """Return the largest value at which ``refuted`` is true, from below; 0 if it is false above 1e-9.

    ``refuted`` must be true up to some point and false beyond it. ``tolerance`` is relative.

    >>> round(last_true(lambda x: x * x < 2), 6)
    1.414213
    """
    return last_positive(lambda x: 1.0 if refuted(x) else -1.0, start, tolerance)


def last_positive(
    margin: Callable[[float], float], start: float = 1.0, tolerance: float = 1e-7, *, step: float = 1.05
) -> float:
    """Return the same as :func:`last_true` for a margin that is positive where the value is refuted.

    If the margin is smooth, false position needs only a few evaluations. ``step`` is the first factor by
    which the search goes away from ``start``: a larger one is faster if the answer may be far away.
    """
    bracket = _bracket(margin, min(max(start, _TINY), _HUGE), step)
    if isinstance(bracket, float):
        return bracket
    low, high, at_low, at_high = bracket
    moved, stuck, width = 0, 0, high - low
    while high - low > tolerance * low:
        # false position (Illinois), or bisection if the bracket has not halved for three steps
        share = at_low / (at_low - at_high) if stuck < 3 else 0.5
        guard = 0.4 * tolerance * low  # step past the crossing, so that both ends close in
        middle = min(max(low + share * (high - low), low + guard), high - guard)
        if not low < middle < high:
            break
        at_middle = margin(middle)
        if at_middle > 0:
            at_high /= 2 if moved > 0 else 1
            low, at_low, moved = middle, at_middle, 1
        else:
            at_low /= 2 if moved < 0 else 1
            high, at_high, moved = middle, min(at_middle, -math.ulp(1.0)), -1
        halved = high - low <= width / 2
        stuck, width = (0, high - low) if halved else (stuck + 1, width)
    return low


def _bracket(
    margin: Callable[[float], float], start: float, step: float
) -> tuple[float, float, float, float] | float:
    """Return a refuted and an unrefuted value with their margins, or the answer itself if one is missing."""
    at, value = start, margin(start)
    if value > 0:
        while at < _HUGE:
            low, at_low = at, value
            at, step = min(at * step, _HUGE), step * step
            value = margin(at)
            if value <= 0:
                return low, at, at_low, min(value, -math.ulp(1.0))
        return math.inf
    while at > _TINY:
        high, at_high = at, value
        at, step = max(at / step, _TINY), step * step
        value = margin(at)
        if value > 0:
            return at, high, value, min(at_high, -math.ulp(1.0))
    return 0.0


def first_true_integer(enough: Callable[[int], bool], low: int, most: int) -> int | None:
    """Return the smallest integer in [low, most] that is ``enough``, a monotone predicate; None if none is.

    >>> first_true_integer(lambda n: n * n >= 50, 1, 1000)
    8
    """
    high = low
    while not enough(high):
        if high >= most:
            return None
        low, high = high + 1, min(high * 2 + 1, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def smallest_error(refutes: Callable[[float], bool], most: float = LARGEST_ERROR) -> float:
    """Return the smallest error rate at which ``refutes`` holds, from above, between 1e-12 and ``most``.

    The result is 1 if not even ``most`` is enough.

    >>> round(smallest_error(lambda error: error > 0.02), 3)
    0.02
    """
    low, high = min(SMALLEST_ERROR, most), most
    if not refutes(high):
        return 1.0
    if refutes(low):
        return low
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refutes(middle) else (middle, high)
    return high


def falling_root(
    function: Callable[[float], tuple[float, float]], start: float, low: float, high: float, tolerance: float
) -> float:
    """Return the root in [low, high] of a decreasing function that returns its value and slope.

    Uses Newton's method until a step is below ``tolerance`` (the error is then far smaller), and bisection
    where a step would leave the bracket.

    >>> round(falling_root(lambda x: (2 - x * x, -2 * x), 1.0, 0.0, 9.0, 1e-4), 6)
    1.414214
    """
    at = min(max(start, low), high)
    while high - low > tolerance:
        value, slope = function(at)
        low, high = (at, high) if value > 0 else (low, at)
        step = -value / slope if slope < 0 else math.inf
        if abs(step) <= tolerance:
            return at + step
        at = at + step if low < at + step < high else (low + high) / 2
    return high


class MonotonePredicate:
    """A predicate that is true up to some point, evaluated only where earlier results do not imply its value.

    >>> evaluated = []
    >>> small = MonotonePredicate(lambda x: evaluated.append(x) or x < 3)
    >>> small(2.0), small(1.0), small(4.0), small(5.0), evaluated
    (True, True, False, False, [2.0, 4.0])
    """

    def __init__(self, holds: Callable[[float], bool]) -> None:
        self._holds = holds
        self._low, self._high = -math.inf, math.inf

    def __call__(self, value: float) -> bool:
        if value <= self._low or value >= self._high:
            return value <= self._low
        if self._holds(value):
            self._low = value
        else:
            self._high = value
        return self._low == value
