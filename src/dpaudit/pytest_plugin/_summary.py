"""Audits in the reports of pytest: properties of a test, and a table at the end of the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dpaudit.stats import Result

__all__ = ["Summary", "note"]

_PREFIX = "dp_audit"
_COLUMNS = ("verdict", "epsilon", "claimed_epsilon", "confidence", "findings")
_TITLES = ("verdict", "epsilon >=", "claimed", "confidence", "findings", "test")


def note(node: pytest.Item, number: int, result: Result, findings: Sequence[str]) -> None:
    """Keep an audit as properties of its test, which JUnit files hold and pytest-xdist passes on."""
    bound = result.bound
    values = (
        result.verdict.name,
        f"{bound.epsilon:.4g}",
        f"{result.claim.epsilon:.4g}",
        f"{bound.confidence:.6g}",
        ", ".join(findings),
    )
    for name, value in zip(_COLUMNS, values, strict=True):
        node.user_properties.append((f"{_PREFIX}.{number}.{name}", value))


class Summary:
    """Collects the audits of all reports, also of those from other processes."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or a part of it, is done."""
        for name, value in report.user_properties:
            prefix, _, rest = name.partition(".")
            if prefix == _PREFIX:
                number, _, column = rest.partition(".")
                self._rows.setdefault((report.nodeid, number), {})[column] = str(value)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line an audit."""
        if not self._rows:
            return
        rows = [
            (*(row.get(column, "") or "-" for column in _COLUMNS), nodeid)
            for (nodeid, _), row in self._rows.items()
        ]
        widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
        terminalreporter.section("dp audits")
        for row in (_TITLES, *rows):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            terminalreporter.line("  ".join(cells).rstrip(), **_colour(row))


def _colour(row: Sequence[str]) -> dict[str, bool]:
    if row is _TITLES:
        return {"bold": True}
    is_bad = row[0] == "VIOLATION" or row[4] != "-"
    return {"red": True} if is_bad else {"yellow": row[0] == "UNDERPOWERED"}
