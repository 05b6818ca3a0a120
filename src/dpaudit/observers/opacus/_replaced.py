"""Methods of one object that are others for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """What the object itself had by this name, or that it had nothing, comes back at the end."""
    own = {key: value for key, value in vars(owner).items() if key == name}
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(own)
