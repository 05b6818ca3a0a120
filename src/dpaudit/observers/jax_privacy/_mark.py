"""Marks on what an observer made, so that nobody observes it again."""

from __future__ import annotations

from typing import Any

from dpaudit.errors import InputError

__all__ = ["marked", "require_unmarked"]

_MARK = "observed_by_dpaudit"


def marked(function: Any) -> Any:
    """The same function, with the mark."""
    setattr(function, _MARK, True)
    return function


def require_unmarked(function: Any, name: str) -> None:
    """Canaries of two observers would be in each other's way."""
    inner = function
    while inner is not None:
        if getattr(inner, _MARK, False):
            raise InputError(
                f"Expected a {name} that is not observed yet, got one that an observer made: observe each "
                "only once, and pass what the library returned."
            )
        inner = getattr(inner, "__wrapped__", None) or getattr(inner, "func", None)  # of jit, of partial
