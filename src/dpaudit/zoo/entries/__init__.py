"""All faults of the zoo."""

from dpaudit.zoo._entry import Entry
from dpaudit.zoo.entries._native import NATIVE
from dpaudit.zoo.entries._opacus import OPACUS
from dpaudit.zoo.entries._steps import STEPS

__all__ = ["ENTRIES"]

ENTRIES: tuple[Entry, ...] = (*NATIVE, *STEPS, *OPACUS)
