"""How the error of a session is shared out, and that a session keeps to it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_calls import counted, fixture
from statistical_limits import most_flagged

import dpaudit
from dpaudit.pytest_plugin._suite import SuiteAudits


def audits(num_tests: int, seed: int = 0) -> SuiteAudits:
    return counted(*map(str, range(num_tests)), seed=seed, budget="quick")


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_all_calls_together_never_use_more_than_the_error(calls: list[int]) -> None:
    session = audits(len(calls))
    used = sum(
        session.next_call(str(test)).error_rate for test, count in enumerate(calls) for _ in range(count)
    )
    assert used <= 0.05 + 1e-12


def test_tests_without_the_fixture_do_not_count() -> None:
    session = audits(1)
    session.count_tests([SimpleNamespace(nodeid="a", fixturenames=["dp_audit"]), SimpleNamespace(nodeid="b")])
    assert session.num_tests == 1
    assert session.next_call("a").error_rate == pytest.approx(0.025)
    assert session.next_call("a", 0.7).error_rate == pytest.approx(0.05)  # a sixth of its own


def test_each_call_has_a_seed_of_its_own_that_does_not_depend_on_the_rest() -> None:
    few, many = audits(2), audits(9)
    seeds = {session.next_call(test).seed for session in (few, many) for test in ("0", "1", "0")}
    assert len(seeds) == 3
    assert audits(2, seed=1).next_call("0").seed not in seeds


@given(st.integers(0, 2**32), st.text())
def test_a_seed_is_one_for_every_library(seed: int, nodeid: str) -> None:
    found = audits(1, seed).seed_of(nodeid, 0)
    np.random.RandomState(found)  # what steps of long ago are seeded with
    assert 0 <= found < 2**31


@pytest.mark.long
def test_correct_sessions_are_green_as_often_as_they_say() -> None:
    """60 sessions of 8 tests each at 50 % confidence: any failure in at most half of them.

    If every test had the whole error, four of five sessions would fail.
    """
    rng = np.random.default_rng(0)
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)

    def step(rows: np.ndarray) -> np.ndarray:
        norms = np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        return (rows / norms).sum(axis=0) + rng.standard_normal(rows.shape[1])

    alarms = sum(session_fails(step, claim, seed) for seed in range(60))
    assert alarms <= most_flagged(60, 0.5, broken=0.82)


def session_fails(step: object, claim: dpaudit.Claim, seed: int) -> bool:
    session = audits(8, seed)
    for test in range(8):
        try:
            fixture(session=session, nodeid=str(test)).step(
                step, claim=claim, max_grad_norm=1.0, num_parameters=20, num_steps=30, confidence=0.5
            )
        except pytest.fail.Exception:
            return True
    return False
