"""Faulty runs end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from robustness_runs import FaultyRun, start


@pytest.fixture
def begin() -> Iterator[Callable[..., FaultyRun]]:
    """Start ``dpaudit run``; whatever is left of it is killed with the test."""
    started: list[FaultyRun] = []

    def call(*words: object, limit: str = "") -> FaultyRun:
        started.append(start(*words, limit=limit))
        return started[-1]

    yield call
    for one in started:
        one.kill_all()
