"""The fixture ``dp_audit`` of one test, without a session of pytest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dpaudit.pytest_plugin._fixture import DpAudit
from dpaudit.pytest_plugin._suite import SuiteAudits


def counted(*nodeids: str, seed: int = 0, budget: str = "full") -> SuiteAudits:
    """A session with these tests."""
    session = SuiteAudits(seed=seed, budget=budget, confidence=0.95)
    session.count_tests([SimpleNamespace(nodeid=name, fixturenames=["dp_audit"]) for name in nodeids])
    return session


def fixture(
    seed: int = 0, session: SuiteAudits | None = None, nodeid: str = "t.py::test", verbosity: int = 0
) -> Any:
    config = SimpleNamespace(get_verbosity=lambda: verbosity)
    node = SimpleNamespace(nodeid=nodeid, user_properties=[], warn=lambda _: None, config=config)
    return DpAudit(node, session or counted(nodeid, seed=seed))
