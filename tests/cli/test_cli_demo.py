"""``dpaudit demo`` tells a correct training from a broken one and writes what it found."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from digits_config import digits_config

from dpaudit.cli._demo_command import DemoTraining


@pytest.mark.long  # the page on commands shows its output, which is compared
def test_the_demo_tells_the_trainings_apart(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "demo"
    result = run("demo", "--output", folder)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert len(lines) <= 16
    assert max(map(len, lines[:-2])) <= 80
    assert re.search(r"correct +[\d.]+ % +7\.\d\d   ○ NO VIOLATION FOUND\n", result.stdout)
    assert re.search(r"20 % less noise +[\d.]+ % +[\d.]+   ▲ VIOLATION \(privacy\)\n", result.stdout)
    assert re.search(r"\n  finding +noise-variance: ", result.stdout)
    assert "refuted the claim with 95 % confidence." in " ".join(result.stdout.split())
    assert f"Report  {folder / 'report.html'}" in lines
    values = json.loads((folder / "result.json").read_text())
    assert values["as_expected"] is True
    assert [one["verdict"] for one in values["trainings"]] == ["NO_VIOLATION", "VIOLATION"]
    correct, broken = (one["bound"]["epsilon"] for one in values["trainings"])
    assert 0.9 * 8 < correct < 8 < broken
    assert all(one["accuracy"] > 0.8 for one in values["trainings"])  # a model was trained
    report = (folder / "report.md").read_text()
    for one in values["trainings"]:
        assert one["bound"]["statement"] in report
    page = (folder / "report.html").read_text()
    assert page.count('<svg class="plot"') == 11  # five of each run, and both over each other
    names = ["correct", "report.html", "report.md", "result.json", "too-little-noise"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_a_demo_does_not_replace_a_run(run: Any, tmp_path: Path) -> None:
    from dpaudit import experiments  # noqa: PLC0415

    text = digits_config(
        tmp_path / "run" / "correct", num_examples=100, num_steps=2, audit="num_canaries = 4"
    )
    experiments.rehearse(experiments.parse_config(text, "the config"), keep=True)
    for folder, sentence in (
        (tmp_path / "run", "holds a run with another config"),
        (
            tmp_path / "run" / "correct",
            "{}/result.json belongs to",
        ),
    ):
        result = run("demo", "--output", folder)
        assert (result.exit_code, result.stdout) == (2, "")
        assert sentence.format(folder) in result.stderr
    assert run("verify", tmp_path / "run" / "correct").exit_code == 0


def test_an_interrupted_demo_does_not_promise_to_resume(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def demonstrate(folder: Path, *_: object) -> None:
        from dpaudit import experiments  # noqa: PLC0415

        text = digits_config(folder / "correct")
        experiments.rehearse(experiments.parse_config(text, "the config"), keep=True)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("dpaudit.cli._demo_command.demonstrate", demonstrate)
    result = run("demo", "--output", tmp_path)
    assert result.exit_code == 143
    kept = f"finished work is kept in {tmp_path / 'correct'}, but the same command starts over."
    assert result.stderr.endswith(f"dpaudit: Interrupted by SIGTERM; {kept}\n")
    assert (tmp_path / "correct" / "manifest.json").exists()


@pytest.mark.parametrize("verdicts", [("VIOLATION", "VIOLATION"), ("NO_VIOLATION", "UNDERPOWERED")])
def test_the_demo_fails_if_one_of_its_verdicts_is_unexpected(
    verdicts: tuple[str, str], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "NO_VIOLATION", "VIOLATION"
    found = [
        DemoTraining("a run", tmp_path, 1.0, wanted, {"verdict": verdict})
        for wanted, verdict in zip(expected, verdicts, strict=True)
    ]
    monkeypatch.setattr("dpaudit.cli._demo_command.demonstrate", lambda *_: found)
    monkeypatch.setattr("dpaudit.cli._demo_command._report", lambda _: Mock())
    result = run("demo", "--output", tmp_path, "--json")
    assert result.exit_code == 1
    values = json.loads(result.stdout)
    assert values["as_expected"] is False
    assert sorted(one["as_expected"] for one in values["trainings"]) == [False, True]


def test_without_torch_the_demo_says_how_to_install_it(
    refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.startswith(("dpaudit.training", "dpaudit.experiments"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("dpaudit.experiments", raising=False)
    monkeypatch.delattr("dpaudit.training", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    assert refused("demo", "--output", tmp_path / "demo").endswith("pip install torch pydantic")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert (
        refused("demo", "--output", tmp_path / "file") == f"{tmp_path / 'file'} is a file, not a directory."
    )
