"""All faults of the zoo."""

from dpaudit.zoo._entry import Entry
from dpaudit.zoo.entries._native import NATIVE

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*NATIVE,)
