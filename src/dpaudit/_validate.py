"""Checks that return a valid value or raise an error such as "Expected confidence=1.2 in [0.5, 1).".

:func:`percent` prints a level that was checked.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from numbers import Integral, Real
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from dpaudit.errors import InputError, quoted

P = ParamSpec("P")
R = TypeVar("R")
_MOST_STEPS = 10_000_000
_NOISES = 1e-9, 1e9  # smallest and largest noise multipliers: squares and exponentials of others overflow
MOST_CONFIDENT: Final = 1 - 1e-12


def no_epsilon(keywords: Mapping[str, Any], expected: str) -> None:
    """Reject an epsilon among keywords: many mechanisms share it, and their steps differ."""
    for name in ("epsilon", "target_epsilon"):
        if name in keywords:
            raise InputError(
                f"Expected {expected}, got {name}={keywords[name]}: an epsilon alone does not determine the "
                "privacy of a step."
            )


def reject_epsilon(expected: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
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
        raise InputError(f"Expected {name}={quoted(value)} to be a number.")
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"Expected {name} in (-inf, inf), got a number too large for a float.") from error


def _inside(name: str, value: float, low: float, high: float, ends: str = "()") -> float:
    """Require a number in an interval that is open at a parenthesis and closed at a bracket."""
    number = _number(name, value)
    is_inside = low < number < high or (number == low and "[" in ends) or (number == high and "]" in ends)
    if not is_inside:  # includes NaN, for which comparisons are false
        raise InputError(f"Expected {name}={number:g} in {ends[0]}{low:g}, {high:g}{ends[1]}.")
    return number


def finite(name: str, value: float) -> float:
    """Require a finite number."""
    return _inside(name, value, -math.inf, math.inf)


def positive(name: str, value: float) -> float:
    """Require a finite number above zero."""
    return _inside(name, value, 0.0, math.inf)


def at_least(name: str, value: float, low: float) -> float:
    """Require a finite number of at least ``low``."""
    return _inside(name, value, low, math.inf, "[)")


def fraction(name: str, value: float) -> float:
    """Require a number strictly between 0 and 1."""
    return _inside(name, value, 0.0, 1.0)


def confidence(value: float) -> float:
    """Require a confidence level of at least one half, below which a "bound" would exceed the estimate.

    Error rates below 1e-12 are lost in rounding, here and in files.
    """
    number = _inside("confidence", value, 0.5, 1.0, "[)")
    if number > MOST_CONFIDENT:
        raise InputError(f"Expected confidence={number!r} to be at most 1 - 1e-12.")
    return number


def noise_multiplier(value: float) -> float:
    """Require a noise multiplier whose privacy can be computed in floating point."""
    return _inside("noise_multiplier", positive("noise_multiplier", value), *_NOISES, "[]")


def flag(name: str, value: bool) -> bool:
    """Require True or False: a string or an array would silently count as one of them."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"Expected {name}={quoted(value)} to be True or False.")
    return bool(value)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Require a dictionary, such as one that was read from a file."""
    if not isinstance(value, Mapping):
        raise InputError(f"Expected {name} to be a dictionary, got {quoted(value)}.")
    return value


@contextmanager
def state_dict_errors(kind: str, state: Any) -> Iterator[None]:
    """Turn what a damaged ``state_dict`` raises into an ``InputError``."""
    mapping(f"the state of {kind}", state)
    try:
        yield
    except InputError:
        raise
    except (
        KeyError,
        IndexError,
        TypeError,
        ValueError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise InputError(
            f"Expected the state_dict of {kind} that was created in the same way, got a damaged one "
            f"({type(error).__name__}: {quoted(str(error))})."
        ) from error


def fits_memory(what: str, num_bytes: float) -> None:
    """Require that an allocation fits into the memory of this machine, before anything is allocated."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > available:
        raise InputError(
            f"Expected {what} to fit into memory, but they need about {min(num_bytes, 1e100) / 1e9:,.3g} GB "
            f"and this machine has {available / 1e9:,.3g} GB; choose smaller numbers."
        )


def percent(share: float) -> str:
    """Return a share as a percentage with as many digits as distinguish it from 100 %.

    >>> percent(0.95), percent(1 - 1e-12)
    ('95 %', '99.9999999999 %')
    """
    texts = (f"{100 * share:.{digits}g}" for digits in range(6, 17))
    return next((text for text in texts if share >= 1 or float(text) < 100), f"{100 * share!r}") + " %"


def delta(value: float) -> float:
    """Require a valid delta of (eps, delta)-DP."""
    return _inside("delta", value, 0.0, 1.0, "[)")


def sample_rate(value: float) -> float:
    """Require a valid probability of sampling an example into a batch."""
    return _inside("sample_rate", value, 0.0, 1.0, "(]")


def num_steps(value: int) -> int:
    """Require a realistic number of steps: composing too many would exhaust memory."""
    return integer("num_steps", value, high=_MOST_STEPS)


def integer(name: str, value: int, low: int = 1, high: int | None = None) -> int:
    """Require an integer of at least ``low`` and at most ``high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"Expected {name}={quoted(value)} to be a whole number.")
    if value < low:
        raise InputError(f"Expected {name}={value} to be at least {low}.")
    if high is not None and value > high:
        raise InputError(f"Expected {name}={value} to be at most {high}.")
    return int(value)
