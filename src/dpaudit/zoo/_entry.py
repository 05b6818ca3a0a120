"""A fault that was public, and how to see it again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from dpaudit.zoo._evidence import Evidence

__all__ = ["Entry", "Specimen"]

Specimen: TypeAlias = Callable[[bool, int], Evidence]
"""Runs the broken training or its correct twin, with this seed."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One fault of the zoo: a specimen that has it, and a twin that has not."""

    name: str
    public: str
    """Where it was public."""
    wrong: str
    """What was wrong, in a sentence."""
    kind: str
    """What the specimen is made of."""
    specimen: Specimen
    not_caught: str | None = None
    """Why it is expected not to be seen, if it is."""

    def described(self) -> dict[str, str | None]:
        """What it is, as plain values."""
        return {name: getattr(self, name) for name in ("name", "public", "wrong", "kind", "not_caught")}

    def observe(self, *, is_broken: bool, seed: int) -> Evidence:
        """Run one of the two; each entry has chance of its own, whatever else is run."""
        text = f"{seed} {self.name}"
        own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        return self.specimen(is_broken, own)
