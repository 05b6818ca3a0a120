"""What version 0.1 wrote is read, reported and resumed.

The fixtures are its own: finished runs, runs that were killed, and a report of the first of them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpaudit
from dpaudit._io import JsonCache
from dpaudit.errors import InputError
from dpaudit.experiments import Config, load_config, run
from dpaudit.experiments._verification import verify
from dpaudit.report import Report

STORED = Path(__file__).parent / "fixtures" / "version_1"
MANY_RUNS = "many-runs"
FINISHED = "one-run", "paper", "stopped", "input", "final-model", "end-to-end", MANY_RUNS
SLOW = "final-model", "end-to-end", MANY_RUNS  # curves of whole runs take seconds
FUNCTION = 'model={name="function", function="old_training:train"}'


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixtures, which is the current directory."""
    shutil.copytree(STORED, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def config(name: str, *changes: str) -> Config:
    return load_config(f"{name}.toml", list(changes))


def stored_result(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((STORED / name / "result.json").read_text())
    return values


@pytest.fixture(scope="module")
def report(is_long: bool) -> Report:
    """Of all finished runs; in `make test` without those whose curves take seconds."""
    return Report.read([STORED / name for name in FINISHED if is_long or name not in SLOW])


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in SLOW else []) for name in FINISHED]
)
def test_a_finished_run_is_reported_with_its_numbers(name: str, report: Report) -> None:
    values = report.to_dict()["runs"][FINISHED.index(name)]
    stored = stored_result(name)
    assert values["verdict"] == stored["verdict"]
    assert values["bound"]["epsilon"] == stored["bound"]["epsilon"]
    assert [row["epsilon"] for row in values["methods"]] == [row["epsilon"] for row in stored["methods"]]
    assert any(note.startswith("This run is not sealed") for note in values["notes"])
    assert values["seal"] is None


def test_finished_runs_are_shown_on_one_page(report: Report) -> None:
    page = report.to_text()
    assert all(f">{name}<" in page for name in FINISHED[: len(report.runs)])
    assert "JointExact()" in page


def test_a_report_of_a_finished_run_says_what_it_said(report: Report) -> None:
    before = json.loads((STORED / "report.json").read_text())["runs"][0]
    now = report.to_dict()["runs"][FINISHED.index("one-run")]
    assert set(before) <= set(now)
    for values in (now["figures"], before["figures"]):
        del values["course"]  # bets have changed since
    assert now["figures"] == before["figures"]
    assert not report.runs[FINISHED.index("one-run")].figures.of_verdict


@pytest.mark.usefixtures("old")
def test_a_finished_run_is_not_trained_again() -> None:
    outcome = run(config("base"))
    assert outcome.was_finished
    assert outcome.seal is None
    assert outcome.remarks[0].startswith("This run is not sealed")
    assert outcome.values["verdict"] == stored_result("one-run")["verdict"]


INTERRUPTED = {
    "one-run": ("base",),
    "paper": ("base", "audit.mode=paper", "audit.num_canaries=1"),
    "end-to-end": ("base", "audit.mode=end-to-end"),
    "many-runs": ("blackbox",),
}


# the other modes are resumed by the same code, and `make test` resumes runs of this version in each
LONG = "paper", "end-to-end", "many-runs"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in INTERRUPTED]
)
@pytest.mark.usefixtures("old")
def test_an_interrupted_run_ends_with_the_scores_of_an_undisturbed_one(name: str) -> None:
    base, *changes = INTERRUPTED[name]
    outcome = run(config(base, f"output={name}-interrupted", *changes))
    assert not outcome.was_finished
    assert verify(f"{name}-interrupted").status == "sealed"
    assert outcome.values["bound"]["counts"] == stored_result(name)["bound"]["counts"]
    for path in (STORED / name).glob("*.npy"):
        resumed = np.load(Path(f"{name}-interrupted") / path.name)
        np.testing.assert_allclose(resumed, np.load(path), rtol=1e-4, atol=1e-5)  # made on another machine


@pytest.mark.usefixtures("old")
@pytest.mark.long
def test_a_store_of_a_function_of_the_user_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    remarks: list[str] = []
    outcome = run(config("blackbox", "output=function-interrupted", FUNCTION), say=remarks.append)
    assert outcome.values["num_failed"] == 0
    assert not [text for text in remarks if "damaged" in text]


@pytest.mark.parametrize("wrap", [dict, lambda values: {"identity": values}], ids=["zoo", "figure"])
def test_finished_work_with_other_numbers_is_refused(wrap: Any, tmp_path: Path) -> None:
    """Bets have changed since 0.1: a table must not mix their numbers with new ones."""

    def cache(version: str) -> JsonCache:
        return JsonCache(tmp_path, wrap({"dpaudit_version": version, "seed": 1}))

    cache("0.1.0").write("old", {"epsilon": 1.0})
    with pytest.raises(InputError, match=r"0\.1\.0"):
        cache(dpaudit.__version__).read("old")
