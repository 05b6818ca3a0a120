"""Checks that return a valid value or raise an error such as "Expected confidence=1.2 in [0.5, 1)."."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

from dpaudit.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
_MOST_STEPS = 10_000_000


def no_epsilon(keywords: Mapping[str, Any], expected: str) -> None:
    """Reject an epsilon among keywords: many mechanisms share it, and their steps differ."""
    for name in ("epsilon", "target_epsilon"):
        if name in keywords:
            raise InputError(
                f"Expected {expected}, got {name}={keywords[name]}: an epsilon alone does not determine the "
                "privacy of a step."
            )


def without_epsilon(expected: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function that is called with an epsilon raise an ``InputError`` that names what to pass."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            no_epsilon(options, expected)
            return function(*args, **options)

        return checked

    return decorated


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"Expected {name}={value!r} to be a number.")
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"Expected {name} in (-inf, inf), got a number too large for a float.") from error


def _inside(name: str, value: float, ok: bool, interval: str) -> float:
    if not ok:  # includes NaN, for which comparisons are false
        raise InputError(f"Expected {name}={value:g} in {interval}.")
    return value


def finite(name: str, value: float) -> float:
    """Require a finite number."""
    number = _number(name, value)
    return _inside(name, number, math.isfinite(number), "(-inf, inf)")


def positive(name: str, value: float) -> float:
    """Require a finite number above zero."""
    number = _number(name, value)
    return _inside(name, number, 0 < number < math.inf, "(0, inf)")


def at_least(name: str, value: float, low: float) -> float:
    """Require a finite number of at least ``low``."""
    number = _number(name, value)
    return _inside(name, number, low <= number < math.inf, f"[{low:g}, inf)")


def fraction(name: str, value: float) -> float:
    """Require a number strictly between 0 and 1."""
    number = _number(name, value)
    return _inside(name, number, 0 < number < 1, "(0, 1)")


def confidence(value: float) -> float:
    """Require a confidence level of at least one half, below which a "bound" would exceed the estimate."""
    number = _number("confidence", value)
    return _inside("confidence", number, 0.5 <= number < 1, "[0.5, 1)")


def delta(value: float) -> float:
    """Require a valid delta of (eps, delta)-DP."""
    number = _number("delta", value)
    return _inside("delta", number, 0 <= number < 1, "[0, 1)")


def sample_rate(value: float) -> float:
    """Require a valid probability of sampling an example into a batch."""
    number = _number("sample_rate", value)
    return _inside("sample_rate", number, 0 < number <= 1, "(0, 1]")


def num_steps(value: int) -> int:
    """Require a realistic number of steps: composing too many would exhaust memory."""
    return whole("num_steps", value, high=_MOST_STEPS)


def whole(name: str, value: int, low: int = 1, high: int | None = None) -> int:
    """Require an integer of at least ``low`` and at most ``high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"Expected {name}={value!r} to be a whole number.")
    if value < low:
        raise InputError(f"Expected {name}={value} to be at least {low}.")
    if high is not None and value > high:
        raise InputError(f"Expected {name}={value} to be at most {high}.")
    return int(value)
