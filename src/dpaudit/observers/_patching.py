"""Observers are for a ``with`` block, and say so to who forgets it.

Methods of one object that are others for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar


class Closable(Protocol):
    """What is told that the block is over, however it ended."""

    def close(self) -> None: ...


T = TypeVar("T", bound=Closable)
P = ParamSpec("P")


class WithBlock(AbstractContextManager[T], Generic[T]):
    """A context that has nothing but its beginning and its end: what is wanted is what it gives."""

    _given: T

    def __init__(self, name: str, inside: AbstractContextManager[T]) -> None:
        self._name, self._inside = name, inside

    def __enter__(self) -> T:
        self._given = self._inside.__enter__()
        return self._given

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self._inside.__exit__(kind, error, trace)
        finally:
            self._given.close()

    def __getattr__(self, name: str) -> NoReturn:
        what = self.__dict__.get("_name", "observe")  # a copy that is being made has none yet
        raise AttributeError(
            f"{what}() audits what is done inside of a with block, and nothing before: expected "
            f"'with {what}(...) as recorder:' around the training, and then recorder.{name}."
        )


def with_block(observe: Callable[P, Iterator[T]]) -> Callable[P, WithBlock[T]]:
    """As ``contextmanager``, with a sentence where the ``with`` is missing."""
    manager = contextmanager(observe)

    @wraps(observe)
    def around(*args: P.args, **options: P.kwargs) -> WithBlock[T]:
        return WithBlock(observe.__name__, manager(*args, **options))

    return around


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
