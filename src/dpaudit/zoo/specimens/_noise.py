"""Tests of noise that was kept, after the steps that are looked at."""

from __future__ import annotations

import copy

from dpaudit.diagnostics import Diagnostics
from dpaudit.stats._types import FloatArray
from dpaudit.zoo._evidence import looks

__all__ = ["diagnosed"]


def diagnosed(noise: FloatArray) -> dict[int, Diagnostics]:
    """What the tests had seen of noise, steps x coordinates, after each number of steps that is asked for."""
    record, seen = Diagnostics(), dict[int, Diagnostics]()
    for number, row in enumerate(noise, 1):
        record.observe_noise(row)
        if number in looks(len(noise)):
            seen[number] = copy.deepcopy(record)
    return seen
