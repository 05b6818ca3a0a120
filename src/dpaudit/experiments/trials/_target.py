"""Functions that are named by text."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from dpaudit._foreign import open_file
from dpaudit.errors import InputError

__all__ = ["extend_search_path", "load", "search_path", "source_digest"]


def load(target: str) -> Callable[..., Any]:
    """The function that ``target`` names, as ``module:function``.

    Modules of the current directory are found too.

    >>> load("math:sqrt")(4.0)
    2.0
    """
    module_name, colon, name = target.partition(":") if isinstance(target, str) else ("", "", "")
    if not (module_name and colon and name):
        raise InputError(f"Expected a function as 'module:function', got {target!r}.")
    extend_search_path([str(Path.cwd())])
    module = _module(target, module_name)
    function = getattr(module, name, None)
    if not callable(function):
        place = getattr(module, "__file__", None) or module_name
        wrong = f"{name} is no function" if hasattr(module, name) else f"there is no {name}"
        raise InputError(f"Expected a function as 'module:function', got {target!r}: {wrong} in {place}.")
    return function  # type: ignore[no-any-return]


def source_digest(target: str) -> str:
    """What tells the code of a function from other code: its whole module, as it is on disk."""
    extend_search_path([str(Path.cwd())])
    name = target.partition(":")[0]
    try:
        found = find_spec(name)
    except (ImportError, ValueError, AttributeError):
        found = None
    if found is None or found.origin is None or not Path(found.origin).is_file():
        return ""
    with open_file(found.origin) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def search_path() -> tuple[str, ...]:
    """Where this process finds modules, in a way that another process understands."""
    return tuple(str(Path(entry or ".").absolute()) for entry in sys.path)


def extend_search_path(places: Iterable[str]) -> None:
    """Find modules in these places first, unless they are known already."""
    known = set(search_path())
    sys.path[:0] = [place for place in places if place not in known]


def _module(target: str, name: str) -> ModuleType:
    importlib.invalidate_caches()  # a file that was written a moment ago
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise InputError(
                f"Expected a function as 'module:function', got {target!r}: there is no module {missing} in "
                f"{Path.cwd()} or among the installed ones."
            ) from error
        raise InputError(
            f"Expected {target!r} to be importable, but its module {name} needs {missing}."
        ) from error
    except Exception as error:  # the user's module may raise anything
        raise InputError(
            f"Expected {target!r} to be importable, but its module {name} raised "
            f"{type(error).__name__}: {error}"
        ) from error
