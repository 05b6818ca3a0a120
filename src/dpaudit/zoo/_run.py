"""A run of the zoo: entries one after another, each kept in a file when it is done."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io
from dpaudit._io import JsonCache
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.zoo._entries import ENTRIES
from dpaudit.zoo._entry import Entry
from dpaudit.zoo._judge import judge

_SCHEMA_VERSION = 2
_KEYS = {"name", "public", "wrong", "kind", "not_caught", "left_out", "is_as_expected", "broken", "correct"}


def run_zoo(
    entries: Sequence[Entry],
    *,
    seed: int,
    output: Path,
    watch: Callable[[int, int, str], None] = lambda *_: None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Return the matrix of all entries, as plain values.

    The twins of the whole zoo share the error rate: the probability that any of them is flagged is at most
    1 - confidence, whichever entries are run. Entries in ``output`` with the same seed, confidence and
    versions are reused. ``watch`` is called with the number of finished entries, the number of all, and the
    name of the current one.
    """
    twins = 1 - (1 - confidence) / max(len(entries), len(ENTRIES))
    cache, found = _finished(output, seed=seed, confidence=confidence, twin_confidence=twins), []
    with _io.locked(cache.folder):
        for number, entry in enumerate(entries):
            stored = cache.read(entry.name)
            if stored is None:
                watch(number, len(entries), entry.name)
                stored = _examined(entry, cache)
            found.append(stored)
    watch(len(entries), len(entries), "done")
    return {
        **cache.identity,
        "is_as_expected": all(one["is_as_expected"] for one in found),
        "entries": found,
    }


def _examined(entry: Entry, cache: JsonCache) -> dict[str, Any]:
    made = {name: cache.identity[name] for name in ("seed", "confidence", "twin_confidence")}
    try:
        values = examine_entry(entry, **made)
    except MissingExtraError as error:  # it is not kept: it may be there the next time
        return {**entry.described(), "left_out": str(error), "is_as_expected": True}
    cache.write(entry.name, values)
    return values


def examine_entry(
    entry: Entry, *, seed: int, confidence: float = 0.95, twin_confidence: float | None = None
) -> dict[str, Any]:
    """Judge the broken training in depth, and its correct twin, at its own confidence if one is given."""
    level = confidence if twin_confidence is None else twin_confidence
    broken = judge(entry.observe(is_broken=True, seed=seed), confidence=confidence, in_depth=True)
    correct = judge(entry.observe(is_broken=False, seed=seed), confidence=level)
    is_caught = bool(broken.caught_by) or entry.not_caught is not None
    return {
        **entry.described(),
        "left_out": None,
        "is_as_expected": is_caught and not correct.caught_by,
        "broken": broken.to_dict(),
        "correct": correct.to_dict(),
    }


def chosen(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    """Return the entries of these names, or all if there are none."""
    known = {entry.name: entry for entry in entries}
    wanted = dict.fromkeys(names)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"{', '.join(known)}."
            raise InputError(f"Expected the name of an entry of the zoo, got {name!r}: {hint}")
    return [known[name] for name in wanted] if wanted else list(entries)


def _finished(output: Path, *, seed: int, confidence: float, twin_confidence: float) -> JsonCache:
    """Return the cache of finished entries, each with the seed and the versions that it was made with."""
    identity = {
        "schema_version": _SCHEMA_VERSION,
        "seed": seed,
        "confidence": confidence,
        "twin_confidence": twin_confidence,
        **{f"{name}_version": _version(name) for name in ("dpaudit", "torch", "opacus")},
    }
    return JsonCache(_io.expanded(output), identity, keys=_KEYS, content="an entry of the zoo")


def _version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    if name == "dpaudit":
        return dpaudit.__version__  # of the running code, which may be newer than what was installed
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
