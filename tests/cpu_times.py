"""The CPU time of every test, so that growth is seen: the slowest are listed at the end of a test run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

MOST = 5.0  # CPU-seconds, with set-up and with the processes that a test waited for
_PROPERTY = "cpu_seconds"


def _now() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CpuTimes:
    """A plugin of the test run that measures tests where they run, and lists the slow ones where it ends."""

    def __init__(self) -> None:
        self._slow: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[_START] = _now()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        outcome = yield
        if call.when == "teardown" and not item.get_closest_marker("slow"):
            outcome.get_result().user_properties.append((_PROPERTY, _now() - item.stash[_START]))  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get(_PROPERTY)
        if isinstance(seconds, float) and seconds > MOST:
            self._slow[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._slow:
            terminalreporter.section(f"tests over {MOST:g} CPU-seconds that are not marked slow")
            for name, seconds in sorted(self._slow.items(), key=lambda slow: -slow[1]):
                terminalreporter.write_line(f"{seconds:6.1f} s  {name}")


_START = pytest.StashKey[float]()
