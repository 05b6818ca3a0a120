"""The pytest plugin: a fixture ``dp_audit`` that fails the test if a privacy claim is refuted.

Pytest loads this at every start, also of projects that never use it, so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from dpaudit.pytest_plugin._options import add_options, header
from dpaudit.pytest_plugin._session import AUDITS, Audits
from dpaudit.pytest_plugin._summary import Summary

if TYPE_CHECKING:
    from dpaudit.pytest_plugin._fixture import DpAudit

__all__ = ["dp_audit"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of the plugin."""
    add_options(parser)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist copies the configuration for its workers
def pytest_configure(config: pytest.Config) -> None:
    """What all audits of the session share."""
    config.stash[AUDITS] = Audits.of(config)
    config.pluginmanager.register(Summary(), "dpaudit-summary")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """A worker of pytest-xdist draws from the seed of the session."""
    node.workerinput["dp_audit_seed"] = node.config.stash[AUDITS].seed


def pytest_report_header(config: pytest.Config) -> str:
    """The seed, without which a run could not be repeated."""
    return header(config.stash[AUDITS])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Now it is known between how many tests the error is shared out."""
    session.config.stash[AUDITS].share_between(session.items)


@pytest.fixture
def dp_audit(request: pytest.FixtureRequest) -> DpAudit:
    """Audit a step or what an observer recorded; a refuted claim fails the test."""
    from dpaudit.pytest_plugin._fixture import DpAudit  # noqa: PLC0415  # loads numpy and scipy

    return DpAudit(request.node, request.config.stash[AUDITS])
