"""What the machine or dpaudit itself does to an audit is an error of its test, not a failure."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

TESTS = """
import errno
import pytest
import dpaudit

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
OPTIONS = {"claim": CLAIM, "max_grad_norm": 1.0, "num_parameters": 200}

def raiser(error):
    def fail(*_, **__):
        raise error
    return fail

def test_bug(dp_audit, monkeypatch):
    monkeypatch.setattr("dpaudit.pytest_plugin._fixture.observe_step", raiser(ZeroDivisionError()))
    dp_audit(lambda rows: rows, **OPTIONS)

@pytest.mark.xfail(strict=True)
def test_bug_in_an_expected_failure(dp_audit, monkeypatch):
    monkeypatch.setattr("dpaudit.pytest_plugin._fixture.observe_step", raiser(KeyError("bug")))
    dp_audit(lambda rows: rows, **OPTIONS)

ANY = [SystemExit(0), SystemExit(1), GeneratorExit(), BaseException("odd"), RuntimeWarning("of numpy")]

@pytest.mark.parametrize("error", ANY, ids=repr)
def test_any_exception(dp_audit, monkeypatch, error):
    monkeypatch.setattr("dpaudit.pytest_plugin._fixture.observe_step", raiser(error))
    dp_audit(lambda rows: rows, **OPTIONS)

def test_bug_before_the_audit(dp_audit, monkeypatch):
    monkeypatch.setattr("dpaudit.pytest_plugin._suite.SuiteAudits.next_call", raiser(KeyError("bug")))
    dp_audit(lambda rows: rows, **OPTIONS)

def test_disk(dp_audit):
    dp_audit(raiser(OSError(errno.ENOSPC, "No space left on device")), **OPTIONS)

def test_memory(dp_audit):
    dp_audit(raiser(MemoryError()), **OPTIONS)

def test_step(dp_audit):
    dp_audit(raiser(ZeroDivisionError("of the tested code")), **OPTIONS)

@pytest.mark.parametrize("error", [SystemExit(0), RuntimeWarning("of the tested code")], ids=repr)
def test_exit_of_the_step(dp_audit, error):
    dp_audit(raiser(error), **OPTIONS)

def test_skip_in_the_step(dp_audit):
    dp_audit(lambda rows: pytest.skip("not here"), **OPTIONS)

@pytest.mark.xfail(strict=True)
def test_step_that_is_expected_to_fail(dp_audit):
    dp_audit(raiser(ZeroDivisionError("of the tested code")), **OPTIONS)
"""


def test_machine_and_dpaudit_cause_errors_and_the_tested_code_failures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess("--junitxml=found.xml", "-p", "no:cacheprovider")
    done.assert_outcomes(errors=10, failed=3, xfailed=1, skipped=1)
    assert done.ret == 1
    done.stdout.fnmatch_lines(["*dpaudit: the audit could not be completed, and nothing was judged."])
    cases = ET.parse(pytester.path / "found.xml").getroot().iter("testcase")
    found = {case.attrib["name"]: {part.tag for part in case} - {"properties"} for case in cases}
    errors = [name.partition("[")[0] for name, parts in found.items() if parts == {"error"}]
    assert errors == [
        "test_bug",
        "test_bug_in_an_expected_failure",
        *["test_any_exception"] * 5,
        "test_bug_before_the_audit",
        "test_disk",
        "test_memory",
    ]
    assert found["test_step"] == {"failure"}
