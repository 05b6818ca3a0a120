"""Entries one after another, each kept when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dpaudit.errors import InputError, MissingExtraError
from dpaudit.zoo._entry import Entry
from dpaudit.zoo._judge import Judged, judge
from dpaudit.zoo._store import Store

__all__ = ["chosen", "examine_entry", "run_zoo"]


def chosen(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    """The entries of these names, or all if there are none."""
    known = {entry.name: entry for entry in entries}
    wanted = dict.fromkeys(names)
    for name in wanted:
        if name not in known:
            raise InputError(f"Expected the name of an entry of the zoo, got {name!r}: {', '.join(known)}.")
    return [known[name] for name in wanted] if wanted else list(entries)


def run_zoo(
    entries: Sequence[Entry],
    *,
    seed: int,
    output: Path,
    watch: Callable[[int, int, str], None] = lambda *_: None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """The matrix of all entries, as plain values.

    What is in ``output`` already, of the same seed and confidence, is taken up. ``watch`` is told how many
    entries of how many are done, and what is done now.
    """
    store, found = Store(output, seed=seed, confidence=confidence), []
    with store.locked():
        for number, entry in enumerate(entries):
            stored = store.read(entry.name)
            if stored is None:
                watch(number, len(entries), entry.name)
                stored = _examined(entry, store, seed, confidence)
            found.append(stored)
    watch(len(entries), len(entries), "done")
    return {
        "schema_version": Store.schema_version,
        "seed": seed,
        "confidence": confidence,
        "is_as_expected": all(one["is_as_expected"] for one in found),
        "entries": found,
    }


def _examined(entry: Entry, store: Store, seed: int, confidence: float) -> dict[str, Any]:
    try:
        values = examine_entry(entry, seed=seed, confidence=confidence)
    except MissingExtraError as error:  # it is not kept: it may be there the next time
        return {**_described(entry), "left_out": str(error), "is_as_expected": True}
    store.write(entry.name, values)
    return values


def examine_entry(entry: Entry, *, seed: int, confidence: float = 0.95) -> dict[str, Any]:
    """The broken training in depth, and its correct twin."""
    broken = judge(entry.observe(is_broken=True, seed=seed), confidence=confidence, in_depth=True)
    correct = judge(entry.observe(is_broken=False, seed=seed), confidence=confidence)
    return {
        **_described(entry),
        "left_out": None,
        "is_as_expected": _is_as_expected(entry, broken, correct),
        "broken": broken.to_dict(),
        "correct": correct.to_dict(),
    }


def _described(entry: Entry) -> dict[str, Any]:
    names = ("name", "public", "wrong", "kind", "not_caught")
    return {name: getattr(entry, name) for name in names}


def _is_as_expected(entry: Entry, broken: Judged, correct: Judged) -> bool:
    is_caught = bool(broken.caught_by) or entry.not_caught is not None
    return is_caught and not correct.caught_by
