"""Identifiers of canaries: scores and presence that come from different places are joined by them.

A permuted array does not look wrong: it audits as "no leak". Identifiers make it impossible.
"""

from __future__ import annotations

import numpy as np

from dpaudit._types import ArrayLike, IdArray
from dpaudit.errors import InputError

_FEW, _LONGEST = 3, 60  # identifiers quoted in one message, and their length


def as_ids(name: str, ids: ArrayLike, size: int) -> IdArray:
    """Return identifiers, integers or strings, as an array of this size."""
    if isinstance(ids, np.ma.MaskedArray):
        raise InputError(f"Expected {name} to be a plain array, got a masked array.")
    words: set[bool] = set()
    try:
        array = np.asarray(ids)
        if not isinstance(ids, np.ndarray) or array.dtype == object:  # numpy turns 1 and "a" into "1" and "a"
            words = {isinstance(identifier, str) for identifier in np.asarray(ids, dtype=object).flat}
            array = np.asarray(array.tolist())
    except ValueError:  # rows of different lengths
        raise InputError(f"Expected {name} to be a one-dimensional array of integers or strings.") from None
    if len(words) > 1:
        raise InputError(f"Expected {name} to be all integers or all strings, got both.")
    if array.ndim != 1 or array.dtype.kind not in "iuUS":
        raise InputError(
            f"Expected {name} to be a one-dimensional array of integers or strings, got shape {array.shape} "
            f"of type {array.dtype}."
        )
    if array.size != size:
        raise InputError(f"Expected {size:,} identifiers in {name}, one per canary, got {array.size:,}.")
    return array


def joined_presence(
    present: ArrayLike, ids: IdArray | None, present_ids: ArrayLike | None, *, paired: bool = False
) -> ArrayLike:
    """Return ``present`` in the order of ``ids``; missing, unknown and duplicate ones raise."""
    if ids is not None and not paired:
        _require_once("ids", ids)
    if present_ids is None:
        return present
    if ids is None or paired:
        raise InputError("Expected present_ids= only together with ids= and without paired=True.")
    flags = np.asarray(present)  # checked by the caller
    names = as_ids("present_ids", present_ids, flags.shape[-1] if flags.ndim else 0)
    _require_once("present_ids", names)
    if (names.dtype.kind in "iu") != (ids.dtype.kind in "iu"):
        raise InputError(f"Expected ids and present_ids of one type, got {ids.dtype} and {names.dtype}.")
    for missing, text in (
        (np.setdiff1d(ids, names), "Expected a presence flag for every canary with a score, got none for"),
        (np.setdiff1d(names, ids), "Expected a score for every canary with a presence flag, got none for"),
    ):
        if missing.size:
            raise InputError(f"{text} {_first(missing)}.")
    order = np.empty(ids.size, np.int64)
    order[np.argsort(ids, kind="stable")] = np.argsort(names, kind="stable")
    return flags[..., order]


def _require_once(name: str, ids: IdArray) -> None:
    values, times = np.unique(ids, return_counts=True)
    if (times > 1).any():
        raise InputError(f"Expected each identifier once in {name}, got {_first(values[times > 1])} again.")


def _first(ids: IdArray) -> str:
    """Return the first few identifiers, for an error message."""
    more = f" and {ids.size - _FEW:,} more" if ids.size > _FEW else ""
    return ", ".join(repr(identifier)[:_LONGEST] for identifier in ids[:_FEW].tolist()) + more


def require_twice(ids: IdArray) -> None:
    """Require sorted identifiers to come in pairs."""
    values, times = np.unique(ids, return_counts=True)
    if (times != 2).any():
        raise InputError(
            "Expected each identifier to name two columns with paired=True, one score with and one without "
            f"the canary, got another number for {_first(values[times != 2])}."
        )
