"""What the audits of a pytest session share: options, seed and error rate, and a summary at its end.

The summary is made of test properties, which also appear in JUnit files and work with pytest-xdist. On
GitHub, failed audits are also annotations, and the summary is also that of the job.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from dpaudit.errors import InputError

if TYPE_CHECKING:
    from dpaudit.diagnostics import Diagnosis
    from dpaudit.stats import Result

BUDGETS = {"quick": 100, "full": 500}  # steps, unless a test sets them
DEFAULT_BUDGET, CONFIDENCE = "full", 0.95
_FIXTURE = "dp_audit"
_SEED = "seed"
_COLUMNS = (
    "verdict",
    "epsilon",
    "claimed_epsilon",
    "sees_noise",
    "confidence",
    "findings",
    "to_check",
    "numbers",
)
_WORDS = {  # of a verdict in the summary, the worst first
    "VIOLATION": "VIOLATION",
    "ERROR": "no verdict",
    "UNDERPOWERED": "underpowered",
    "NO_VIOLATION": "no violation",
    "": "no finding",
}
_ERROR, _BAD = "ERROR", ("VIOLATION", "no verdict")
_INCOMPLETE, _SUMMARY = "_dpaudit_incomplete", "_dpaudit_summary"  # attributes of an exception


@dataclass(frozen=True)
class AuditCall:
    """One call of the fixture: its share of the error rate, its seed, and how to rerun it."""

    number: int  # position of the call in its test, from 1
    error_rate: float  # its allotted probability of a false alarm
    seed: int
    rerun: str  # the command that runs its test alone


@dataclass
class SuiteAudits:
    """The audits of a session, which share its error rate: without faults, it passes with its confidence.

    Every test that requests the fixture gets the same share, and its successive calls get 1/2, 1/6, 1/12, ...
    of that, which add up to at most 1. Hence the number of calls need not be known in advance, and it does
    not matter in which order, on which worker or how often a test runs.
    """

    seed: int
    budget: str
    confidence: float
    is_strict: bool = False  # whether a fact to check fails its test
    root: Path | None = None  # the directory that node ids are relative to
    invocation_dir: Path | None = None
    num_tests: int = 0
    _counted: set[str] = field(default_factory=set)
    _calls: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: pytest.Config) -> SuiteAudits:
        """Read the options; a pytest-xdist worker has the seed of its session."""
        option = config.getoption("--dp-audit-seed")
        seed = getattr(config, "workerinput", {}).get("dp_audit_seed", option)
        return cls(
            seed=secrets.randbits(32) if seed is None else seed,
            budget=config.getoption("--dp-audit-budget"),
            confidence=config.getoption("--dp-audit-confidence"),
            is_strict=config.getoption("--dp-audit-strict"),
            root=config.rootpath,
            invocation_dir=config.invocation_params.dir,
        )

    @property
    def num_steps(self) -> int:
        """The number of steps of an audit whose test does not set it."""
        return BUDGETS[self.budget]

    def count_tests(self, items: Sequence[pytest.Item]) -> None:
        """Count the tests that request the fixture, directly or through another fixture."""
        requesting = [item.nodeid for item in items if _FIXTURE in getattr(item, "fixturenames", ())]
        self.num_tests, self._counted = len(requesting), set(requesting)

    def next_call(self, nodeid: str, confidence: float | None = None) -> AuditCall:
        """Return the next call in this test, which may have a confidence of its own to share."""
        if nodeid not in self._counted:
            raise InputError(
                f"{nodeid} requests {_FIXTURE} at run time; make it an argument of the test or of one of "
                "its fixtures, so that the error rate can be split before the first audit."
            )
        self._calls[nodeid] += 1
        number = self._calls[nodeid]
        error_rate = 1 - (self.confidence if confidence is None else confidence)
        rerun = self._rerun(nodeid)
        if confidence is not None and self.num_tests > 1:
            rerun += "  # alone, it shares its confidence= with no other test"
        share = 1 / (self.num_tests * number * (number + 1))
        return AuditCall(number, share * error_rate, self.seed_of(nodeid, number), rerun)

    def num_calls(self, nodeid: str) -> int:
        """Return the number of audits in this test so far."""
        return self._calls[nodeid]

    def seed_of(self, nodeid: str, number: int) -> int:
        """Return the seed of an audit, which does not depend on other tests or on the directory.

        It has 31 bits, which the RNGs of all libraries accept.
        """
        text = f"{self.seed} {number} {nodeid.rpartition('/')[2]}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1

    def _rerun(self, nodeid: str) -> str:
        """Return the command that repeats the audits of one test at the same confidence."""
        path, _, test = nodeid.partition("::")
        if self.root is not None and self.invocation_dir is not None:
            path = os.path.relpath(self.root / path, self.invocation_dir)
        words = [f"pytest '{path}::{test}' --dp-audit-seed {self.seed}"]
        if self.budget != DEFAULT_BUDGET:
            words.append(f"--dp-audit-budget {self.budget}")
        test_confidence = 1 - (1 - self.confidence) / max(self.num_tests, 1)
        if test_confidence != CONFIDENCE:
            words.append(f"--dp-audit-confidence {test_confidence:.12g}")
        if self.is_strict:
            words.append("--dp-audit-strict")
        return " ".join(words)


SESSION: pytest.StashKey[SuiteAudits] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the four options of the plugin."""
    group = parser.getgroup("dpaudit", "audits of differential privacy")
    group.addoption(
        "--dp-audit-seed",
        type=_integer,
        metavar="N",
        help="random seed of canaries and coins; by default drawn at random and printed at the end",
    )
    group.addoption(
        "--dp-audit-budget",
        choices=list(BUDGETS),
        default=DEFAULT_BUDGET,
        help="steps per audit, unless the test sets num_steps: "
        + ", ".join(f"{name} {steps}" for name, steps in BUDGETS.items()),
    )
    group.addoption(
        "--dp-audit-confidence",
        type=_probability,
        metavar="P",
        default=CONFIDENCE,
        help="joint confidence of all audits of the session (default: 0.95)",
    )
    group.addoption(
        "--dp-audit-strict",
        action="store_true",
        help="also fail a test whose audit has something to check, which a correct run may have",
    )


def _integer(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value


class UnderpoweredWarning(UserWarning):
    """An audit that detects twice the claimed epsilon with less than 80 % probability."""


class NothingAuditedWarning(UserWarning):
    """A test that requested ``dp_audit`` and passed without auditing anything."""


def note_seed(node: pytest.Item, seed: int) -> None:
    """Record the seed of the session, which the test may depend on."""
    node.user_properties.append((f"{_FIXTURE}.{_SEED}", str(seed)))


def note(node: pytest.Item, number: int, result: Result | None, diagnosis: Diagnosis | None) -> None:
    """Record an audit as properties of its test."""
    findings, to_check = "not run", ""
    if diagnosis is not None:
        findings = ", ".join(finding.name for finding in diagnosis.findings) or "none"
        to_check = ", ".join(finding.name for finding in diagnosis.to_check)
    if result is None:
        verdict = "VIOLATION" if diagnosis is not None and diagnosis.findings else ""
        _record(node, number, (verdict, "", "", "", "", findings, to_check, ""))
        return

    from dpaudit import _validate  # noqa: PLC0415  # loads numpy
    from dpaudit.stats import claimed_figure  # noqa: PLC0415

    claimed = claimed_figure(result.claim.epsilon, result.claim.parts)

    factor, reached = result.power.noise_factor, _validate.rounded_down(result.bound.epsilon)
    values = (
        result.verdict.name,
        f"{result.bound.epsilon:.4g}",
        f"{result.claim.epsilon:.4g}",
        "" if factor is None else f"{factor:.3g}" if factor > 0 else "none",
        f"{result.bound.confidence:.6g}",
        findings,
        to_check,
        f"epsilon >= {reached} of {claimed}",
    )
    _record(node, number, values)


def note_error(node: pytest.Item, number: int) -> None:
    """Record an audit without a verdict."""
    _record(node, number, (_ERROR, "", "", "", "", "not run", "", ""))


def mark_incomplete(error: BaseException) -> None:
    """Mark an exception of the machine or of dpaudit itself: it says nothing about the tested code."""
    setattr(error, _INCOMPLETE, True)


def fail(message: str, summary: str) -> NoReturn:
    """Fail the test; pytest's line about it, of which it prints what fits, is ``summary``."""
    __tracebackhide__ = True
    failure = pytest.fail.Exception(message, pytrace=False)
    setattr(failure, _SUMMARY, summary)
    raise failure


def adjust_report(report: pytest.TestReport, error: BaseException) -> None:
    """Report a marked exception as an error of the test: a failure, even an expected one, is a verdict."""
    if getattr(error, _INCOMPLETE, False):
        report.outcome = "failed"
        report.when = "setup"  # what pytest and JUnit files call an error
        report.__dict__.pop("wasxfail", None)
    crash: Any = getattr(report.longrepr, "reprcrash", None)
    if crash is not None and hasattr(error, _SUMMARY):
        crash.message = getattr(error, _SUMMARY)


def _record(node: pytest.Item, number: int, values: Sequence[str]) -> None:
    for name, value in zip(_COLUMNS, values, strict=True):
        node.user_properties.append((f"{_FIXTURE}.{number}.{name}", value))


class Summary:
    """The audits of all test reports, including those from other processes."""

    def __init__(self, session: SuiteAudits) -> None:
        self._session = session
        self._is_used = False
        self._rows: dict[tuple[str, str], dict[str, str]] = {}
        self._failed: dict[str, pytest.TestReport] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the audits of a finished test."""
        for name, value in report.user_properties:
            prefix, _, rest = name.partition(".")
            if prefix != _FIXTURE:
                continue
            self._is_used = True
            number, _, column = rest.partition(".")
            if number != _SEED:
                self._rows.setdefault((report.nodeid, number), {})[column] = str(value)
                if report.failed:
                    self._failed[report.nodeid] = report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write the seed, which is needed to repeat the session, and one line per audit, the worst first."""
        if not self._is_used:
            return
        session, rows = self._session, self._table()
        budget = "" if session.budget == DEFAULT_BUDGET else f", {session.budget}"
        title = f"dp audits (seed {session.seed}, {100 * session.confidence:.6g} % joint{budget})"
        terminalreporter.section(title)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        if rows:  # names of tests give way, the end of a name last
            widths[1] = min(widths[1], max(12, terminalreporter._tw.fullwidth - sum(widths) + widths[1] - 6))
        for row in rows:
            name = row[1] if len(row[1]) <= widths[1] else f"...{row[1][3 - widths[1] :]}"
            cells = (row[0], name, *row[2:])
            line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            terminalreporter.line(line.rstrip(), red=row[0] in _BAD, yellow=row[0] == "underpowered")
        if os.environ.get("GITHUB_ACTIONS"):
            terminalreporter.write(
                "".join(annotation(report, session.root) for report in self._failed.values())
            )
            _write_job_summary(title, rows)

    def _table(self) -> list[tuple[str, str, str, str]]:
        """Return verdict, test, numbers, and the findings or the power of each audit, the worst first."""
        names = Counter(nodeid.rpartition("::")[2] for nodeid in {nodeid for nodeid, _ in self._rows})
        order = list(_WORDS)
        rows = []
        for (nodeid, number), row in self._rows.items():
            name = nodeid.rpartition("::")[2]
            name = nodeid if names[name] > 1 else name
            call = "" if number == "1" else f" (call {number})"
            rows.append((order.index(row["verdict"]), f"{name}{call}", row["numbers"], _detail(row)))
        rows.sort(key=lambda row: row[0])
        return [(_WORDS[order[rank]], name, numbers, text) for rank, name, numbers, text in rows]


def _detail(row: dict[str, str]) -> str:
    """Return the findings of an audit; without any, what is to check, or what the audit detects."""
    if row["findings"] not in {"none", "not run"}:
        return row["findings"]
    if row["to_check"]:
        return f"to check: {row['to_check']}"
    if row["sees_noise"] in {"", "none"}:
        return "detects nothing" if row["sees_noise"] else ""
    return f"detects noise < {100 * float(row['sees_noise']):.0f} %"


def annotation(report: pytest.TestReport, root: Path | None) -> str:
    """Return the command of a GitHub workflow that shows a failed audit at its test."""
    path, line, name = report.location
    place = os.path.relpath((root or Path()) / path, os.environ.get("GITHUB_WORKSPACE", root))
    values = {"file": place, "line": str((line or 0) + 1), "title": f"dp audit: {name}"}
    escaped = (
        f"{key}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in values.items()
    )
    return f"::error {','.join(escaped)}::{_escaped(report.longreprtext.strip())}\n"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _write_job_summary(title: str, rows: Sequence[Sequence[str]]) -> None:
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    table = [("verdict", "test", "bound", "finding or power"), ("---",) * 4, *rows]
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in table]
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("\n".join([f"### {title}", "", *lines, "", ""]))
