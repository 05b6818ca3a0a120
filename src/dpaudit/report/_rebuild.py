"""The curve and the claim of a run again, from the words that it keeps; nothing of it is evaluated."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.report._values import Values
from dpaudit.stats import ApproximateDP, Gaussian, Laplace, PureDP, RandomizedResponse, TradeOff
from dpaudit.stats._claim import Hypothesis

__all__ = ["planned_steps", "rebuilt_hypothesis", "rebuilt_tradeoff"]

_KNOWN: dict[str, Callable[..., TradeOff]] = {
    one.__name__: one
    for one in (ApproximateDP, Gaussian, Laplace, PureDP, RandomizedResponse, SubsampledGaussian)
}
# of a curve that is composed for a picture
_MOST_STEPS = 10**6
_LEAST_NOISE, _MOST_NOISE = 0.1, 1000.0
_LEAST_RATE = 1e-7


def rebuilt_tradeoff(text: str) -> TradeOff | None:
    """The trade-off of this name with these numbers; None if it is not a known one.

    >>> rebuilt_tradeoff("SubsampledGaussian(sample_rate=0.1, num_steps=50)").num_steps
    50
    >>> rebuilt_tradeoff("__import__('os')")
    """
    try:
        called = ast.parse(text, mode="eval").body
        if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name) or called.args:
            return None
        values = {str(word.arg): ast.literal_eval(word.value) for word in called.keywords}
        return _made(called.func.id, values)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):  # also what a number is not
        return None


def _made(name: str, values: dict[str, Any]) -> TradeOff | None:
    make = _KNOWN.get(name)
    small = values.get("num_steps", 1) <= _MOST_STEPS and not values.get("num_lines")
    return make(**values) if make is not None and small else None


def rebuilt_hypothesis(values: Values, tradeoff: TradeOff | None, claimed: float) -> Hypothesis | None:
    """What the claim of a run of DP-SGD says of one observation; None if that cannot be known."""
    terms = ("noise_multiplier", "sample_rate", "num_steps", "delta")
    if tradeoff is None or not all(values.has(term) for term in terms):
        return None
    if values.whole("num_steps") > _MOST_STEPS or not _is_usual(values):
        return None
    try:
        claim = Claim.dpsgd(
            noise_multiplier=values.number("noise_multiplier"),
            sample_rate=values.number("sample_rate"),
            num_steps=values.whole("num_steps"),
            delta=values.number("delta"),
        )
        found = claim.hypothesis(tradeoff)
    except InputError:
        return None
    # another claim would be another picture
    return found if math.isclose(found.parameter, claimed, rel_tol=1e-6) else None


def _is_usual(values: Values) -> bool:
    """Whether the accountant takes no longer than for the trainings of people."""
    return _LEAST_NOISE <= values.number("noise_multiplier") <= _MOST_NOISE and (
        values.number("sample_rate") >= _LEAST_RATE
    )


def planned_steps(inference: str) -> int | None:
    """The horizon of ``Betting(horizon=...)``; None of everything else."""
    found = re.fullmatch(r"Betting\(horizon=(\d{1,9})\)", inference)
    return int(found[1]) if found else None
