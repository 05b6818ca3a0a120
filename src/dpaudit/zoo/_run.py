"""Entries one after another, each kept when it is done."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dpaudit.errors import InputError, MissingExtraError
from dpaudit.zoo._entry import Entry
from dpaudit.zoo._judge import Judged, judge
from dpaudit.zoo._store import Store
from dpaudit.zoo.entries import ENTRIES

__all__ = ["chosen", "examine_entry", "run_zoo"]


def chosen(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    """The entries of these names, or all if there are none."""
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
    """The matrix of all entries, as plain values.

    The twins of the whole zoo share the error: that any of them is flagged by chance has a probability of
    1 - confidence at most. So a twin is judged alike, whichever entries are run with it. What is in
    ``output`` already, of the same seed, confidence and versions, is taken up. ``watch`` is told how many
    entries of how many are done, and what is done now.
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
    """The broken training in depth, and its correct twin, at a confidence of its own if there are many."""
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
