"""The plugin as pytest sees it: real sessions in processes of their own."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

STEPS = """
import numpy as np
import pytest
import dpaudit

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def make(noise=1.0, clip=True, period=None):
    rng = np.random.default_rng(5)
    kept = rng.standard_normal((period or 1, 200))
    calls = iter(range(10**6))

    def step(rows):
        if clip:
            rows = rows / np.maximum(1.0, np.linalg.norm(rows, axis=1, keepdims=True))
        call = next(calls)
        drawn = kept[call % period] if period else rng.standard_normal(200)
        return rows.sum(axis=0) + noise * drawn

    return step


def audit(dp_audit, **fault):
    return dp_audit(make(**fault), claim=CLAIM, max_grad_norm=1.0, num_parameters=200)
"""

FAULTS = (
    STEPS
    + """
def test_correct(dp_audit):
    audited = audit(dp_audit)
    assert audited.result.bound.epsilon < CLAIM.epsilon
    assert audited.diagnosis.findings == ()

def test_two_workers(dp_audit):
    audit(dp_audit, noise=0.5**0.5)

def test_unclipped(dp_audit):
    audit(dp_audit, clip=False)

def test_unscaled(dp_audit):
    step = make()
    dp_audit(lambda rows: step(rows / 4) * 4, claim=CLAIM, max_grad_norm=4.0, num_parameters=200)
    quiet = make(noise=0.25)
    dp_audit(lambda rows: 4 * quiet(rows / 4), claim=CLAIM, max_grad_norm=4.0, num_parameters=200)

def test_periodic(dp_audit):
    audit(dp_audit, period=100)
"""
)


def epsilons(lines: list[str]) -> dict[str, str]:
    """The bounds of the table at the end, by test."""
    rows = [line.split() for line in lines if re.match(r"(NO_)?VIOLATION|UNDERPOWERED", line)]
    return {row[-1]: row[1] for row in rows}


def test_a_violation_fails_the_test_with_what_a_developer_needs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAULTS)
    done = pytester.runpytest_subprocess("--dp-audit-seed=1", "--junitxml=junit.xml", "-p", "no:randomly")
    done.assert_outcomes(passed=1, failed=4)
    done.stdout.fnmatch_lines(
        [
            "dpaudit: seed 1, budget full, 95 % confidence for all audits together",
            "dpaudit: The observations refute the claim: the training leaks more than it says.",
            "  claim: one Gaussian step, noise multiplier 1 with epsilon = *",
            "  bound: mu >= *, with 99.6 % confidence",  # 0.05 / 5 tests / 2 for the first call, 0.8 of it
            "  session: 95 % confidence, shared between 5 tests with audits",
            "  noise: 0.7* of the claimed (* to *)",
            "  canary: arrives with * clipping norms; a clipped one has at most 1",
            "  cause? effective noise is 0.7* of the claim = 1/sqrt(2): added by each of 2 workers*",
            "  again: pytest '*::test_two_workers' --dp-audit-seed 1",
            "  cause? the canary arrives unclipped: is each gradient clipped, before the sum?",
            "  cause? effective noise is 0.2* of the claim = 1/max_grad_norm: noise not scaled by the clip*",
            "dpaudit: the noise is not what the claim says.",
            "  found: repeated-noise * The noise repeats every 100 steps.",
        ]
    )
    assert "Traceback" not in done.stdout.str()
    cases = ET.parse(pytester.path / "junit.xml").iter("testcase")
    properties = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases
    }
    assert properties["test_correct"]["dp_audit.1.verdict"] == "NO_VIOLATION"
    assert properties["test_unclipped"]["dp_audit.1.verdict"] == "VIOLATION"
    assert "repeated-noise" in properties["test_periodic"]["dp_audit.1.findings"]
    assert [test.partition("::")[2] for test in epsilons(done.outlines)] == list(properties)


def test_workers_order_and_choice_do_not_change_an_audit(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(STEPS + "\n".join(f"def test_{n}(dp_audit): audit(dp_audit)" for n in "abc"))
    options = ("--dp-audit-seed=1", "--dp-audit-budget=quick")
    straight = pytester.runpytest_subprocess(*options)
    spread = pytester.runpytest_subprocess(*options, "-n", "2")
    straight.assert_outcomes(passed=3)
    spread.assert_outcomes(passed=3)
    found = epsilons(straight.outlines)
    assert len(set(found.values())) == 3  # each has coins of its own
    assert epsilons(spread.outlines) == found
    alone = pytester.runpytest_subprocess(*options, f"{path.name}::test_b")
    assert float(epsilons(alone.outlines)[f"{path.name}::test_b"]) > float(found[f"{path.name}::test_b"])


def test_a_session_without_audits_loads_nothing_heavy_and_says_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            assert not {"numpy", "scipy", "torch", "jax", "dp_accounting"} & set(sys.modules)
        """
    )
    done = pytester.runpytest_subprocess()
    done.assert_outcomes(passed=1)
    assert "dp audits" not in done.stdout.str()


def test_what_cannot_be_used_is_told_in_a_sentence(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        STEPS
        + """
def test_number(dp_audit):
    dp_audit(3)

def test_nothing(dp_audit):
    dp_audit(make(), claim=CLAIM, max_grad_norm=1.0)

def test_late(request):
    audit(request.getfixturevalue("dp_audit"))

def test_weak(dp_audit):
    with pytest.warns(UserWarning, match="would have been flagged"):
        dp_audit(make(), claim=CLAIM, max_grad_norm=1.0, num_parameters=200, num_steps=2, num_canaries=8)
"""
    )
    done = pytester.runpytest_subprocess()
    done.assert_outcomes(passed=1, failed=3)
    done.stdout.fnmatch_lines_random(
        [
            "*Expected a step, which is a function of per-example gradients, or the recorder*got a int.",
            "*Expected either gradients=*got neither.",
            "*Expected dp_audit to be an argument of the test or of one of its fixtures*",
        ]
    )


@pytest.mark.parametrize("option", ["--dp-audit-seed=-1", "--dp-audit-confidence=1", "--dp-audit-budget=x"])
def test_options_that_cannot_be_used_end_the_session(pytester: pytest.Pytester, option: str) -> None:
    done = pytester.runpytest_subprocess(option)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*{option.partition('=')[0]}*invalid*"])
