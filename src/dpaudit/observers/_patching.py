"""Temporary replacement of methods and attributes of objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object; restore its own attribute, or remove it if there was none."""
    attributes = {key: value for key, value in vars(owner).items() if key == name}
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(attributes)


@contextmanager
def attribute_restored(owners: Sequence[Any], name: str) -> Iterator[None]:
    """Restore an attribute of each owner at the end, or remove it if there was none."""
    before = [getattr(owner, name, _MISSING) for owner in owners]
    try:
        yield
    finally:
        for owner, value in zip(owners, before, strict=True):
            if value is not _MISSING:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)
