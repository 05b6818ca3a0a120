"""Observers as ``with`` blocks, and temporary replacement of methods and attributes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from dpaudit.errors import InputError
from dpaudit.recording import Recorder, WholeRunRecorder

T = TypeVar("T", bound=Recorder | WholeRunRecorder)
P = ParamSpec("P")
_MISSING = object()


class WithBlock(AbstractContextManager[T], Generic[T]):
    """A context manager that closes its recorder on exit; raise a helpful error if ``with`` is missing."""

    _given: T

    def __init__(self, name: str, inside: AbstractContextManager[T]) -> None:
        self._name, self._inside, self._was_entered = name, inside, False

    def __enter__(self) -> T:
        if self._was_entered:
            raise InputError(
                f"Expected a new {self._name}(...) for each with block, got one that was already used: its "
                "recorder holds the steps of that block."
            )
        self._was_entered = True
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
        what = self.__dict__.get("_name", "observe")  # not yet set while a copy is being created
        raise AttributeError(
            f"{what}() audits the steps inside a with block: write 'with {what}(...) as recorder:' around "
            f"the training loop and use recorder.{name}."
        )


def with_block(observe: Callable[P, Iterator[T]]) -> Callable[P, WithBlock[T]]:
    """Make a context manager like ``contextmanager``, with a helpful error if ``with`` is missing."""
    manager = contextmanager(observe)

    @wraps(observe)
    def around(*args: P.args, **options: P.kwargs) -> WithBlock[T]:
        return WithBlock(observe.__name__, manager(*args, **options))

    return around


@contextmanager
def replaced(owner: Any, name: str, new: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object; restore its own attribute, or remove it if there was none."""
    own = {key: value for key, value in vars(owner).items() if key == name}
    setattr(owner, name, new)
    try:
        yield
    finally:
        delattr(owner, name)
        vars(owner).update(own)


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
