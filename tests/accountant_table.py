"""Epsilons of the accountant that many tests need, computed once and kept in a file.

A composition takes dp-accounting a fraction of a second, and an audit needs a dozen. Tests of the accounting
call the accountant itself, and one of them compares the file with it. Values that are missing are computed;
``DPAUDIT_TEST_UPDATE_TABLE=1 make test`` adds them to the file.
"""

from __future__ import annotations

import json
import math
import os
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dpaudit.accounting import _pld, _subsampled

PATH = Path(__file__).parent / "fixtures" / "accountant.json"
IS_UPDATE = bool(os.environ.get("DPAUDIT_TEST_UPDATE_TABLE"))
compute, compute_removal = _pld._epsilon.__wrapped__, _pld._removal_epsilon.__wrapped__
_OUTPUT = "accountant_table"  # what a worker sends to the process that started it


class AccountantTable:
    """A plugin of the test run: looks epsilons up, and collects those that are missing."""

    def __init__(self) -> None:
        stored = json.loads(PATH.read_text()) if PATH.exists() else {}
        self.known: dict[str, float] = stored.get("epsilons", {})
        if stored.get("dp-accounting") != version("dp-accounting"):
            self.known = {}
        self.missing: dict[str, float] = {}

    def epsilon(self, *setting: float) -> float:
        """Return what ``_pld._epsilon`` returns."""
        name = ",".join(map(repr, map(float, setting)))
        if name not in self.known:
            self.known[name] = self.missing[name] = float(compute(*setting))
        return self.known[name]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.missing |= getattr(node, "workeroutput", {}).get(_OUTPUT, {})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[_OUTPUT] = self.missing

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        # workers send what they miss only after the session of this process has finished
        if self.missing and IS_UPDATE:
            found = {
                name: value for name, value in (self.known | self.missing).items() if math.isfinite(value)
            }
            lines = {"dp-accounting": version("dp-accounting"), "epsilons": dict(sorted(found.items()))}
            PATH.write_text(json.dumps(lines, indent=0) + "\n")
        elif self.missing:
            terminalreporter.write_line(f"{len(self.missing)} epsilons are not in {PATH.name}.")


def install(config: pytest.Config) -> None:
    """Let dpaudit look its epsilons up in the table from now on."""
    table = AccountantTable()
    config.pluginmanager.register(table, "accountant-table")
    # removal has the larger epsilon of both directions in all settings of the table, which a test checks
    _pld._epsilon = _pld._removal_epsilon = lru_cache(maxsize=4096)(table.epsilon)  # type: ignore[assignment]


def bypass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dpaudit call the accountant itself, and forget what was looked up."""
    monkeypatch.setattr(_pld, "_epsilon", lru_cache(maxsize=4096)(compute))
    monkeypatch.setattr(_pld, "_removal_epsilon", lru_cache(maxsize=4096)(compute_removal))
    _subsampled._table.cache_clear()
