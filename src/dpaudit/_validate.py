"""Checks that return a valid value or raise an error such as "confidence must be below 1, got 2.".

A message says what is wrong, what is allowed and, where it helps, what to do. :func:`percent` and
:func:`rounded` print numbers that were checked.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from decimal import ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from functools import wraps
from numbers import Integral, Real
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np

from dpaudit.errors import InputError, quoted

P = ParamSpec("P")
R = TypeVar("R")
_MOST_STEPS = 10_000_000
_NOISES = 1e-9, 1e9  # smallest and largest noise multipliers: squares and exponentials of others overflow
_PERCENTAGES = "confidence", "power", "fraction"  # often given as a percentage
MOST_CONFIDENT: Final = 1 - 1e-12


def no_epsilon(keywords: Mapping[str, Any], instead: str, *names: str) -> None:
    """Reject an epsilon among keywords: many mechanisms share it, and their steps differ."""
    for name in names or ("epsilon", "target_epsilon"):
        if name in keywords:
            raise InputError(
                f"{name}={keywords[name]} alone does not determine the privacy of a step; pass {instead}."
            )


def reject_epsilon(instead: str, *names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function that is called with an epsilon raise an ``InputError`` that names what to pass."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            no_epsilon(options, instead, *names)
            return function(*args, **options)

        return checked

    return decorated


def choice(name: str, value: str, allowed: Collection[str]) -> str:
    """Require one of a few words, and suggest the nearest one."""
    if value not in allowed:
        raise InputError(
            f"{name} must be {either(allowed)}, got {quoted(value)}.{suggestion(value, allowed)}"
        )
    return value


def either(words: Collection[str]) -> str:
    """Return quoted words as an enumeration.

    >>> either(["step", "run", "one-run"])
    "'step', 'run' or 'one-run'"
    """
    *others, last = map(repr, words)
    return f"{', '.join(others)} or {last}" if others else last


def suggestion(value: object, words: Collection[str], cutoff: float = 0.6) -> str:
    """Return the question whether the nearest of these words was meant; nothing if none is near."""
    near = difflib.get_close_matches(str(value), words, n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def instance(name: str, value: object, kind: type, example: str) -> None:
    """Require an instance of a class: a class or a bare number is a frequent mistake."""
    if not isinstance(value, kind):
        raise InputError(f"{name} must be {example}, got {quoted(value)}.")


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, got {quoted(value)}.")
    try:
        return float(value)
    except OverflowError as error:
        raise InputError(f"{name} is too large for a floating-point number.") from error


def _inside(name: str, value: float, low: float, high: float, ends: str = "()") -> float:
    """Require a number in an interval that is open at a parenthesis and closed at a bracket."""
    number = _number(name, value)
    is_inside = low < number < high or (number == low and "[" in ends) or (number == high and "]" in ends)
    if not is_inside:  # includes NaN, for which comparisons are false
        allowed = "finite" if math.isinf(number) and high == math.inf else _range(low, high, ends)
        is_percentage = name in _PERCENTAGES and number > 1 and low <= number / 100 < high
        hint = f" Did you mean {number / 100:g}?" if is_percentage else ""
        raise InputError(f"{name} must be {allowed}, got {number:g}.{hint}")
    return number


def _range(low: float, high: float, ends: str) -> str:
    """Return an interval in words."""
    lower = f"{'at least' if '[' in ends else 'above'} {low:g}"
    upper = f"{'at most' if ']' in ends else 'below'} {high:g}"
    if high == math.inf:
        return "finite" if low == -math.inf else "positive" if lower == "above 0" else lower
    return f"between {low:g} and {high:g}" if ends == "[]" else f"{lower} and {upper}"


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
        raise InputError(f"confidence must be at most 1 - 1e-12, got {number!r}.")
    return number


def noise_multiplier(value: float) -> float:
    """Require a noise multiplier whose privacy can be computed in floating point."""
    return _inside("noise_multiplier", positive("noise_multiplier", value), *_NOISES, "[]")


def flag(name: str, value: bool) -> bool:
    """Require True or False: a string or an array would silently count as one of them."""
    if not isinstance(value, bool | np.bool_):
        raise InputError(f"{name} must be True or False, got {quoted(value)}.")
    return bool(value)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Require a dictionary, such as one that was read from a file."""
    if not isinstance(value, Mapping):
        raise InputError(f"{name} must be a dictionary, got {quoted(value)}.")
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
            f"The state_dict of {kind} is damaged or was made with other settings "
            f"({type(error).__name__}: {quoted(str(error))})."
        ) from error


def fits_memory(what: str, num_bytes: float) -> None:
    """Require that an allocation fits into the memory of this machine, before anything is allocated."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > available:
        raise InputError(
            f"{what} would need about {min(num_bytes, 1e100) / 1e9:,.3g} GB of memory, but this machine has "
            f"{available / 1e9:,.3g} GB; choose smaller numbers."
        )


def percent(share: float, digits: int = 6) -> str:
    """Return a share as a percentage with as many digits, or more, as distinguish it from 100 %.

    >>> percent(0.95), percent(1 - 1e-12), percent(0.79962, 2), percent(12.3, 2)
    ('95 %', '99.9999999999 %', '80 %', '1230 %')
    """
    fewest = max(digits, len(f"{100 * share:.0f}") if share > 1 else 1)
    texts = (f"{100 * share:.{number}g}" for number in range(fewest, 17))
    return next((text for text in texts if share >= 1 or float(text) < 100), f"{100 * share!r}") + " %"


def rounded(value: float, rounding: str = ROUND_HALF_EVEN, digits: int = 2) -> str:
    """Return a number with this many decimals, or with two significant digits if it would be zero.

    >>> rounded(5.809), rounded(5.809, ROUND_FLOOR), rounded(1269.0), rounded(0.0012)
    ('5.81', '5.80', '1,269.00', '0.0012')
    """
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e12:
        return f"{value:.3g}"
    exact = Decimal(repr(float(value)))
    if rounding != ROUND_FLOOR and 0 < abs(exact) < Decimal(1).scaleb(-digits):
        digits = 1 - exact.adjusted()
    return f"{exact.quantize(Decimal(1).scaleb(-digits), rounding=rounding):,}"


def rounded_down(value: float, digits: int = 2) -> str:
    """Return a lower bound with this many decimals, never above its exact value."""
    return rounded(value, ROUND_FLOOR, digits)


def delta(value: float) -> float:
    """Require a valid delta of (eps, delta)-DP."""
    return share("delta", value)


def share(name: str, value: float) -> float:
    """Require a number of at least 0 and below 1."""
    return _inside(name, value, 0.0, 1.0, "[)")


def sample_rate(value: float) -> float:
    """Require a valid probability of sampling an example into a batch."""
    return _inside("sample_rate", value, 0.0, 1.0, "(]")


def num_steps(value: int) -> int:
    """Require a realistic number of steps: composing too many would exhaust memory."""
    return integer("num_steps", value, high=_MOST_STEPS)


def integer(name: str, value: int, low: int = 1, high: int | None = None) -> int:
    """Require an integer of at least ``low`` and at most ``high``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, got {quoted(value)}.")
    if value < low:
        raise InputError(f"{name} must be at least {low:,}, got {value}.")
    if high is not None and value > high:
        raise InputError(f"{name} must be at most {high:,}, got {value}.")
    return int(value)
