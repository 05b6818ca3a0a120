"""All entries of the zoo, read from ``catalogue.toml``.

The module of an engine holds the code of its entries by name, in ``SCENARIOS``: training runs of the native
engine in ``_native``, functions of gradients in ``_steps``, and Opacus in ``_opacus``, ``_opacus_loops`` and
``_opacus_distributed``, which are imported only when one of their entries is run. Entries of the engine
"step" name a fault of :mod:`dpaudit.zoo.faults` instead. Add new entries at the end.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from typing import Any

from dpaudit.zoo._evidence import Evidence, Scenario
from dpaudit.zoo._native import SCENARIOS as NATIVE
from dpaudit.zoo._steps import SCENARIOS as STEPS
from dpaudit.zoo._steps import ObservedFault


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One fault of the zoo, with a broken scenario and a correct twin."""

    name: str
    public: str
    """Where the fault was reported."""
    wrong: str
    """What was wrong, in one sentence."""
    kind: str
    """The kind of code that contains the fault."""
    scenario: Scenario
    not_caught: str | None = None
    """Why the fault is not expected to be caught; None if it is."""
    fix: str | None = None
    """How the fault is repaired, in one sentence; the twin does so."""
    family: str | None = None
    """The family of faults that the entry stands for."""
    expected: tuple[str, ...] = ()
    """What must be among the things that flag the fault: the bound, a replay, or names of findings."""

    def described(self) -> dict[str, str | None]:
        """Return the description as plain values."""
        names = "name", "public", "wrong", "kind", "not_caught", "fix", "family"
        return {name: getattr(self, name) for name in names}

    def observe(self, *, is_broken: bool, seed: int) -> Evidence:
        """Run the broken scenario or its twin, with a seed that does not depend on other entries."""
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        return self.scenario(is_broken, int.from_bytes(digest[:4], "big"))


def _lazy(engine: str, name: str) -> Scenario:
    """Return a scenario whose module is imported only when it runs."""

    def scenario(is_broken: bool, seed: int) -> Evidence:
        scenarios: Mapping[str, Scenario] = import_module(f"dpaudit.zoo._{engine}").SCENARIOS
        return scenarios[name](is_broken, seed)

    return scenario


def _entry(values: dict[str, Any]) -> Entry:
    engine, name, expected = values.pop("engine"), values["name"], tuple(values.pop("expected"))
    if engine == "step":
        scenario: Scenario = ObservedFault(**values.pop("step"))
    else:
        scenario = {"native": NATIVE, "steps": STEPS}.get(engine, {}).get(name) or _lazy(engine, name)
    return Entry(scenario=scenario, expected=expected, **values)


def _read() -> tuple[Entry, ...]:
    text = resources.files("dpaudit.zoo").joinpath("catalogue.toml").read_text()
    return tuple(_entry(values) for values in tomllib.loads(text)["entry"])


ENTRIES = _read()
ENTRIES_OF_PUBLIC_CODE = tuple(entry for entry in ENTRIES if entry.family is None)
"""Faults that were reported for public code, each observed in the way that suits it best."""
ENTRIES_FOUND_BY_TESTS = tuple(entry for entry in ENTRIES if entry.family is not None)
"""Faults that only tests of noise, sums and batches, lints or a replay reveal, with default settings."""
