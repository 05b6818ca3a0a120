"""Audits in the output of pytest: warnings, test properties, and a table at the end of the session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dpaudit.diagnostics import Diagnosis
    from dpaudit.pytest_plugin._suite import SuiteAudits
    from dpaudit.stats import Result

_PREFIX, _SEED = "dp_audit", "seed"
_COLUMNS = ("verdict", "epsilon", "claimed_epsilon", "sees_noise", "confidence", "findings")
_TITLES = ("test", "verdict", "epsilon >=", "claimed", "detects noise at", "confidence", "noise tests")
_ERROR = "ERROR"
_INCOMPLETE = "_dpaudit_incomplete"  # attribute of an exception


class UnderpoweredWarning(UserWarning):
    """An audit that detects twice the claimed epsilon with less than 80 % probability."""


class NothingAuditedWarning(UserWarning):
    """A test that requested ``dp_audit`` and passed without auditing anything."""


def note_seed(node: pytest.Item, seed: int) -> None:
    """Record the seed of the session, which the test may depend on."""
    node.user_properties.append((f"{_PREFIX}.{_SEED}", str(seed)))


def note(node: pytest.Item, number: int, result: Result | None, diagnosis: Diagnosis | None) -> None:
    """Record an audit as properties of its test, which appear in JUnit files and work with pytest-xdist."""
    findings = "not run"
    if diagnosis is not None:
        findings = ", ".join(finding.name for finding in diagnosis.findings) or "none"
    if result is None:
        _record(node, number, ("", "", "", "", "", findings))
        return
    bound = result.bound
    values = (
        result.verdict.name,
        f"{bound.epsilon:.4g}",
        f"{result.claim.epsilon:.4g}",
        _detectable_noise(result),
        f"{bound.confidence:.6g}",
        findings,
    )
    _record(node, number, values)


def _detectable_noise(result: Result) -> str:
    """Return the noise, relative to the claim, that would have been detected with 80 % probability."""
    factor = result.power.noise_factor
    if factor is None:
        return ""
    return f"{factor:.3g}" if factor > 0 else "none"


def note_error(node: pytest.Item, number: int) -> None:
    """Record an audit without a verdict."""
    _record(node, number, (_ERROR, "", "", "", "", "not run"))


def mark_incomplete(error: BaseException) -> None:
    """Mark an exception of the machine or of dpaudit itself: it says nothing about the tested code."""
    setattr(error, _INCOMPLETE, True)


def report_as_error(report: pytest.TestReport, error: BaseException) -> None:
    """Report a marked exception as an error of the test: a failure, even an expected one, is a verdict."""
    if getattr(error, _INCOMPLETE, False):
        report.outcome = "failed"
        report.when = "setup"  # what pytest and JUnit files call an error
        report.__dict__.pop("wasxfail", None)


def _record(node: pytest.Item, number: int, values: Sequence[str]) -> None:
    for name, value in zip(_COLUMNS, values, strict=True):
        node.user_properties.append((f"{_PREFIX}.{number}.{name}", value))


class Summary:
    """The audits of all test reports, including those from other processes."""

    def __init__(self, session: SuiteAudits) -> None:
        self._session = session
        self._is_used = False
        self._rows: dict[tuple[str, str], dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the audits of a finished test."""
        for name, value in report.user_properties:
            prefix, _, rest = name.partition(".")
            if prefix != _PREFIX:
                continue
            self._is_used = True
            number, _, column = rest.partition(".")
            if number != _SEED:
                self._rows.setdefault((report.nodeid, number), {})[column] = str(value)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the seed, which is needed to repeat the session, and one line per audit."""
        if not self._is_used:
            return
        from dpaudit import _validate  # noqa: PLC0415  # sessions without audits do not load dpaudit

        terminalreporter.section("dp audits")
        session = self._session
        terminalreporter.line(
            f"seed {session.seed}, budget {session.budget}, "
            f"{_validate.percent(session.confidence)} joint confidence for all audits"
        )
        rows = [
            (
                nodeid if number == "1" else f"{nodeid} (call {number})",
                *(row.get(column, "") or "-" for column in _COLUMNS),
            )
            for (nodeid, number), row in self._rows.items()
        ]
        widths = [max(map(len, column)) for column in zip(_TITLES, *rows, strict=True)]
        for row in (_TITLES, *rows) if rows else ():
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            terminalreporter.line("  ".join(cells).rstrip(), **_color(row))


def _color(row: Sequence[str]) -> dict[str, bool]:
    if row is _TITLES:
        return {"bold": True}
    is_bad = row[1] in {"VIOLATION", _ERROR} or row[-1] not in {"none", "not run"}
    return {"red": True} if is_bad else {"yellow": row[1] == "UNDERPOWERED"}
