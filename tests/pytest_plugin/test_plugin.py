"""The plugin as pytest sees it: real sessions, in processes of their own where that matters."""

from __future__ import annotations

import re
import shlex
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
    verdicts = "VIOLATION|no violation|underpowered"
    rows = [re.match(rf"(?:{verdicts}) +(\S+) .*epsilon >= (\S+) of ", line) for line in lines]
    return {row[1]: row[2] for row in rows if row}


def test_a_violation_fails_the_test_with_what_a_developer_needs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(FAULTS)
    done = pytester.runpytest_subprocess("--dp-audit-seed=1", "--junitxml=junit.xml", "-p", "no:randomly")
    done.assert_outcomes(passed=1, failed=4)
    done.stdout.fnmatch_lines(
        [
            "VIOLATION (privacy): epsilon >= *, but 4.38 is claimed",
            "  finding  noise-variance: The noise is *",
            "  cause    The noise is 7* % of the claimed level, about 1/sqrt(2): is it added by*",
            "  rerun    pytest '*::test_two_workers' --dp-audit-seed 1 --dp-audit-confidence 0.99",
            "  cause    Gradients are not clipped: is each gradient clipped before*",
            "  cause    The noise is 2* % of the claimed level, about 1/max_grad_norm: is it not*",
            "  call     2 of the test",
            "VIOLATION (mechanism): *",
            "  finding  repeated-noise: The noise repeats every 100 steps.",
            "  cause    Is the generator reseeded*",
            "*= dp audits (seed 1, 95 % joint) =*",
            "VIOLATION * noise-variance*",
            "no violation *test_correct * detects noise < * %",
        ]
    )
    assert "Traceback" not in done.stdout.str()
    cases = ET.parse(pytester.path / "junit.xml").iter("testcase")
    properties = {
        case.get("name"): {p.get("name"): p.get("value") for p in case.iter("property")} for case in cases
    }
    assert properties["test_correct"]["dp_audit.1.verdict"] == "NO_VIOLATION"
    assert properties["test_correct"]["dp_audit.seed"] == "1"
    assert 0.8 < float(properties["test_correct"]["dp_audit.1.sees_noise"]) < 1
    assert properties["test_unclipped"]["dp_audit.1.verdict"] == "VIOLATION"
    assert "repeated-noise" in properties["test_periodic"]["dp_audit.1.findings"]


@pytest.mark.long
def test_workers_order_and_choice_do_not_change_an_audit(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile(STEPS + "\n".join(f"def test_{n}(dp_audit): audit(dp_audit)" for n in "abc"))
    options = ("--dp-audit-seed=1", "--dp-audit-budget=quick")
    straight = pytester.runpytest_inprocess(*options)
    spread = pytester.runpytest_subprocess(*options, "-n", "2")
    straight.assert_outcomes(passed=3)
    spread.assert_outcomes(passed=3)
    found = epsilons(straight.outlines)
    assert len(set(found.values())) == 3  # each has coins of its own
    assert epsilons(spread.outlines) == found
    alone = pytester.runpytest_inprocess(*options, f"{path.name}::test_b")
    assert float(epsilons(alone.outlines)["test_b"]) > float(found["test_b"])


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
    for word in ("dp audits", "dp-audit", "confidence", "seed"):
        assert word not in done.stdout.str()


@pytest.mark.long
def test_the_seed_is_told_also_if_the_test_fails_before_its_audit(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_broken(dp_audit): raise RuntimeError(dp_audit.seed)")
    done = pytester.runpytest_subprocess("--dp-audit-seed=7", "-n", "1")
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*dp audits (seed 7, 95 % joint)*"])


def test_a_failure_can_be_seen_again_at_the_level_that_it_had(pytester: pytest.Pytester) -> None:
    tests = "\n".join(f"def test_{n}(dp_audit): audit(dp_audit, noise=0.7)" for n in "ab")
    pytester.path.joinpath("inside").mkdir()
    pytester.path.joinpath("inside", "test_them.py").write_text(STEPS + tests)
    options = ("--dp-audit-seed=3", "--dp-audit-budget=quick", "--dp-audit-confidence=0.9")
    done = pytester.runpytest_inprocess(*options)
    again = next(line for line in done.outlines if "  rerun  " in line and "test_b" in line).partition(
        "pytest "
    )[2]
    assert "--dp-audit-budget quick --dp-audit-confidence 0.95" not in again  # which is the default
    command = shlex.split(again)
    assert command == ["inside/test_them.py::test_b", "--dp-audit-seed", "3", "--dp-audit-budget", "quick"]
    repeated = pytester.runpytest_inprocess(*command)
    # pytest's own summary says every message a second time where the environment has CI in it.
    said = [
        dict.fromkeys(line for line in run.outlines if line.startswith("VIOLATION (privacy)"))
        for run in (done, repeated)
    ]
    bounds = [list(lines) for lines in said]
    assert len(bounds[0]) == 2
    assert bounds[1] == bounds[0][1:]


def test_a_test_that_audits_nothing_says_so(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_forgotten(dp_audit): pass

        def test_skipped(dp_audit): pytest.skip()
        """
    )
    done = pytester.runpytest_inprocess("-W", "default")
    done.assert_outcomes(passed=1, skipped=1, warnings=1)
    done.stdout.fnmatch_lines(
        ["*NothingAuditedWarning: *::test_forgotten requests dp_audit but does not call it*"]
    )
    strict = pytester.runpytest_inprocess("-W", "error::dpaudit.pytest_plugin.NothingAuditedWarning")
    strict.assert_outcomes(passed=1, skipped=1, errors=1)


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

def test_torch(dp_audit):
    dp_audit(lambda rows: rows.detach(), claim=CLAIM, max_grad_norm=1.0, num_parameters=200)
"""
    )
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(failed=4)
    done.stdout.fnmatch_lines_random(
        [
            "*dp_audit needs a step, which is a function of*or the recorder*of type int.",
            "*Pass either gradients=*got neither.",
            "E * rerun: pytest '*::test_nothing' --dp-audit-seed *",
            "no verdict *test_nothing*",
            "*pass gradients=torch.zeros(0, 200)*",
            "*make it an argument of the test or of one of its fixtures*",
        ]
    )


def test_what_cannot_be_used_shows_the_test_and_no_frames_of_ours(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(STEPS + "def test_nothing(dp_audit): dp_audit(make(), claim=3, max_grad_norm=1.0)")
    done = pytester.runpytest_inprocess()
    done.assert_outcomes(failed=1)
    assert not [line for line in done.outlines if re.match(r"\S*(_fixture|_step|_others)\.py:\d+", line)]


def test_an_audit_that_sees_little_warns_by_a_public_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        STEPS
        + """
@pytest.mark.parametrize(("num_steps", "num_canaries"), [(2, 8), (20, 1)])
def test_weak(dp_audit, num_steps, num_canaries):
    options = {"num_steps": num_steps, "num_canaries": num_canaries}
    dp_audit(make(), claim=CLAIM, max_grad_norm=1.0, num_parameters=200, **options)
"""
    )
    done = pytester.runpytest_inprocess("-W", "default")
    done.assert_outcomes(passed=2, warnings=2)
    done.stdout.fnmatch_lines(["*UnderpoweredWarning: *detects*Use more steps or canaries."])
    done.stdout.fnmatch_lines(["underpowered *test_weak[[]2-8[]] * detects nothing"])
    strict = pytester.runpytest_inprocess("-W", "error::dpaudit.pytest_plugin.UnderpoweredWarning")
    strict.assert_outcomes(failed=2)


@pytest.mark.parametrize("option", ["--dp-audit-seed=-1", "--dp-audit-confidence=1", "--dp-audit-budget=x"])
def test_options_that_cannot_be_used_end_the_session(pytester: pytest.Pytester, option: str) -> None:
    done = pytester.runpytest_subprocess(option)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*{option.partition('=')[0]}: *"])
    assert "_whole" not in done.stderr.str()


@pytest.mark.parametrize("is_github", [False, True])
def test_80_columns_name_the_finding_and_github_shows_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, is_github: bool
) -> None:
    for name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_WORKSPACE", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    summary = pytester.path / "summary.md"
    if is_github:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    test = "def test_step_is_private(dp_audit): audit(dp_audit, noise=0.7)\n"
    pytester.makepyfile(test_step=STEPS + test + "def test_good(dp_audit): audit(dp_audit)\n")
    done = pytester.runpytest_subprocess("--dp-audit-seed=1", "--dp-audit-budget=quick")
    done.assert_outcomes(passed=1, failed=1)
    (line,) = [line for line in done.outlines if line.startswith("FAILED ")]
    assert len(line) <= 80
    assert line.startswith("FAILED test_step.py::test_step_is_private - noise-variance: epsilon >= ")
    start = next(index for index, line in enumerate(done.outlines) if "= dp audits (" in line)
    rows = done.outlines[start + 1 : start + 3]
    assert [row.split()[0] for row in rows] == ["VIOLATION", "no"]
    assert max(map(len, rows)) <= 80
    annotations = [line for line in done.outlines if line.startswith("::")]
    assert len(annotations) == is_github
    assert summary.exists() == is_github
    if is_github:
        assert "title=dp audit%3A test_step_is_private::VIOLATION (privacy): " in annotations[0]
        assert "%0A  finding  noise-variance: " in annotations[0]
        assert "| VIOLATION | test_step_is_private | epsilon >= " in summary.read_text()
