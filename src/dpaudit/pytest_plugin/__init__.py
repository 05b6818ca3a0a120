"""The pytest plugin: a fixture ``dp_audit`` that fails the test if a privacy claim is refuted.

Pytest loads this module at every start, even in projects that never use it, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from dpaudit.pytest_plugin._suite import (
    SESSION,
    NothingAuditedWarning,
    SuiteAudits,
    Summary,
    UnderpoweredWarning,
    adjust_report,
    note_seed,
    pytest_addoption,  # noqa: F401  # a hook
)

if TYPE_CHECKING:
    from dpaudit.pytest_plugin._fixture import DpAudit

__all__ = ["NothingAuditedWarning", "UnderpoweredWarning", "dp_audit"]

_PASSED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist copies the configuration for its workers
def pytest_configure(config: pytest.Config) -> None:
    """Set up the state shared by all audits of the session."""
    config.stash[SESSION] = SuiteAudits.of(config)
    config.pluginmanager.register(Summary(config.stash[SESSION]), "dpaudit-summary")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass the seed of the session to a pytest-xdist worker."""
    node.workerinput["dp_audit_seed"] = node.config.stash[SESSION].seed


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count the tests that share the error rate, once they are collected."""
    session.config.stash[SESSION].count_tests(session.items)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # also after pytest has decided about expected failures
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record whether a test passed, for the teardown of the fixture; adjust what pytest says of it."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
        if call.excinfo is not None:
            adjust_report(report, call.excinfo.value)
    return report


@pytest.fixture
def dp_audit(request: pytest.FixtureRequest) -> Generator[DpAudit, None, None]:
    """Audit a step or the recorder of an observer; a refuted claim fails the test."""
    from dpaudit.pytest_plugin._fixture import DpAudit  # noqa: PLC0415  # loads numpy and scipy

    node, session = request.node, request.config.stash[SESSION]
    note_seed(node, session.seed)
    yield DpAudit(node, session)
    if node.stash.get(_PASSED, False) and session.num_calls(node.nodeid) == 0:
        node.warn(
            NothingAuditedWarning(
                f"{node.nodeid} requests dp_audit but does not call it, so nothing was audited."
            )
        )
