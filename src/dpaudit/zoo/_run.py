"""A run of the zoo: entries one after another, each kept in a file when it is done."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import dpaudit
from dpaudit import _io
from dpaudit._io import read_json
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.zoo._entries import ENTRIES
from dpaudit.zoo._entry import Entry
from dpaudit.zoo._judge import Judged, judge

_KEYS = {"name", "public", "wrong", "kind", "not_caught", "left_out", "is_as_expected", "broken", "correct"}


class Store:
    """Each file is whole or not there, and says by which seed and with which versions it was made."""

    schema_version: ClassVar[int] = 2

    def __init__(self, path: Path, *, seed: int, confidence: float, twin_confidence: float) -> None:
        self._path = _io.expanded(path)
        self.identity: dict[str, Any] = {
            "schema_version": self.schema_version,
            "seed": seed,
            "confidence": confidence,
            "twin_confidence": twin_confidence,
            **{f"{name}_version": _version(name) for name in ("dpaudit", "torch", "opacus")},
        }

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else runs here meanwhile."""
        with _io.locked(self._path):
            yield

    def read(self, name: str) -> dict[str, Any] | None:
        """A finished entry; None if it is not, refused if it is of another run."""
        path = self._file(name)
        if not path.exists():
            return None
        values = _read(path)
        for key, value in self.identity.items():
            if (made := values.pop(key, None)) != value:
                raise InputError(f"Expected {key} = {value} in {path}, got {made}; give another --output.")
        if set(values) != _KEYS:
            raise _damaged(path)
        return values

    def write(self, name: str, values: Mapping[str, Any]) -> None:
        """Keep a finished entry."""
        text = json.dumps({**self.identity, **values}, indent=2, allow_nan=False)
        _io.write_text(self._file(name), text + "\n")

    def _file(self, name: str) -> Path:
        return self._path / f"{name}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except InputError as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> InputError:
    return InputError(f"Expected an entry of the zoo in {path}, but it cannot be read; delete it.")


def _version(name: str) -> str | None:
    """Of dpaudit that of the code that runs, which may be newer than what was installed."""
    if name == "dpaudit":
        return dpaudit.__version__
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def chosen(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    """Return the entries of these names, or all if there are none."""
    known = {entry.name: entry for entry in entries}
    wanted = dict.fromkeys(names)
    for name in wanted:
        if name not in known:
            raise InputError(f"Expected the name of an entry of the zoo, got {name!r}: {_near(name, known)}")
    return [known[name] for name in wanted] if wanted else list(entries)


def _near(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{', '.join(names)}."


def run_zoo(
    entries: Sequence[Entry],
    *,
    seed: int,
    output: Path,
    watch: Callable[[int, int, str], None] = lambda *_: None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Return the matrix of all entries, as plain values.

    The twins of the whole zoo share the error rate: any of them is flagged with a probability of
    1 - confidence at most. So a twin is judged alike, whichever entries are run with it. What is in
    ``output`` already, of the same seed, confidence and versions, is reused. ``watch`` is called with how
    many entries of how many are done, and the name of the current one.
    """
    twins = 1 - (1 - confidence) / max(len(entries), len(ENTRIES))
    store, found = Store(output, seed=seed, confidence=confidence, twin_confidence=twins), []
    with store.locked():
        for number, entry in enumerate(entries):
            stored = store.read(entry.name)
            if stored is None:
                watch(number, len(entries), entry.name)
                stored = _examined(entry, store)
            found.append(stored)
    watch(len(entries), len(entries), "done")
    return {
        **store.identity,
        "is_as_expected": all(one["is_as_expected"] for one in found),
        "entries": found,
    }


def _examined(entry: Entry, store: Store) -> dict[str, Any]:
    made = {name: store.identity[name] for name in ("seed", "confidence", "twin_confidence")}
    try:
        values = examine_entry(entry, **made)
    except MissingExtraError as error:  # it is not kept: it may be there the next time
        return {**entry.described(), "left_out": str(error), "is_as_expected": True}
    store.write(entry.name, values)
    return values


def examine_entry(
    entry: Entry, *, seed: int, confidence: float = 0.95, twin_confidence: float | None = None
) -> dict[str, Any]:
    """Judge the broken training in depth, and its correct twin, at its own confidence if there are many."""
    level = confidence if twin_confidence is None else twin_confidence
    broken = judge(entry.observe(is_broken=True, seed=seed), confidence=confidence, in_depth=True)
    correct = judge(entry.observe(is_broken=False, seed=seed), confidence=level)
    return {
        **entry.described(),
        "left_out": None,
        "is_as_expected": _is_as_expected(entry, broken, correct),
        "broken": broken.to_dict(),
        "correct": correct.to_dict(),
    }


def _is_as_expected(entry: Entry, broken: Judged, correct: Judged) -> bool:
    is_caught = bool(broken.caught_by) or entry.not_caught is not None
    return is_caught and not correct.caught_by
