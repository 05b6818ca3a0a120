"""The pytest plugin: a fixture ``dp_audit`` that fails the test if a privacy claim is refuted.

Pytest loads this at every start, also of projects that never use it, so nothing heavy is imported here.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

from dpaudit.pytest_plugin._session import AUDITS, Audits, add_options
from dpaudit.pytest_plugin._summary import NothingAuditedWarning, Summary, UnderpoweredWarning, note_seed

if TYPE_CHECKING:
    from dpaudit.pytest_plugin._fixture import DpAudit

__all__ = ["NothingAuditedWarning", "UnderpoweredWarning", "dp_audit"]

_PASSED: pytest.StashKey[bool] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist copies the configuration for its workers
def pytest_configure(config: pytest.Config) -> None:
    """What all audits of the session share."""
    audits = Audits.of(config)
    config.stash[AUDITS] = audits
    config.pluginmanager.register(Summary(audits), "dpaudit-summary")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist draws from the seed of the session."""
    node.workerinput["dp_audit_seed"] = node.config.stash[AUDITS].seed


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now it is known between how many tests the error is shared out."""
    session.config.stash[AUDITS].share_between(session.items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The fixture has to know, when it is torn down, whether its test came to its end."""
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def dp_audit(request: pytest.FixtureRequest) -> Generator[DpAudit, None, None]:
    """Audit a step or what an observer recorded; a refuted claim fails the test."""
    from dpaudit.pytest_plugin._fixture import DpAudit  # noqa: PLC0415  # loads numpy and scipy

    node, audits = request.node, request.config.stash[AUDITS]
    note_seed(node, audits.seed)
    yield DpAudit(node, audits)
    if node.stash.get(_PASSED, False) and audits.num_calls(node.nodeid) == 0:
        node.warn(NothingAuditedWarning(f"Expected {node.nodeid} to call dp_audit(...): it audited nothing."))
