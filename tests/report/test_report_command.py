"""``dpaudit report`` as a command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dpaudit.cli._app import app


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in ("report", *words)])


def test_the_last_line_is_the_path_of_the_page(runs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    done = run(runs["correct"], runs["broken"], "--output", target)
    assert done.exit_code == 0, done.output  # whatever the verdicts are
    lines = done.stdout.splitlines()
    words = r"▲ VIOLATION \(privacy\)   epsilon >= [\d.]+, but [\d.]+ is claimed   broken"
    assert re.fullmatch(words, lines[0])  # before the others
    assert lines[1].startswith("? UNDERPOWERED   18 steps of 31 scores cannot test a claim of epsilon ")
    assert lines[1].endswith("   correct")
    assert lines[2:] == [str(target)]
    assert target.read_text().startswith("<!DOCTYPE html>")


def test_without_a_file_the_report_goes_to_the_run(copied: Any) -> None:
    folder = copied()
    assert run(folder, "--format", "md").stdout.splitlines()[-1] == str(folder / "report.md")
    assert (folder / "report.md").read_text().startswith("# Audit of correct")


def test_of_several_runs_it_goes_to_the_current_directory(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(runs["correct"], runs["paper"]).stdout.splitlines()[-1] == "report.html"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_json_is_one_object_and_the_file_is_the_same(runs: dict[str, Path], tmp_path: Path) -> None:
    done = run(runs["correct"], "--json", "--output", tmp_path / "r.json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == json.loads((tmp_path / "r.json").read_text())


def test_of_a_sealed_run_nothing_is_said_but_that_it_is_read(runs: dict[str, Path], tmp_path: Path) -> None:
    assert run(runs["correct"], "--output", tmp_path / "r.md").stderr == "Reading 1 run\n"


def test_a_pipe_stays_what_it_is(runs: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "pipe.html"
    os.mkfifo(target)
    done = run(runs["correct"], "--output", target)
    assert (done.exit_code, done.stdout) == (2, "")
    sentence = f"dpaudit: {target} is a pipe or a device, which cannot be replaced by a file."
    assert done.stderr.splitlines()[-1] == sentence
    assert target.is_fifo()


def test_a_link_that_is_named_stays(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    assert run(runs["correct"], "--output", tmp_path / "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("place", ["absolute", "relative", "link", "directory"])
@pytest.mark.parametrize("name", ["result.json", "manifest.json", "canary.json"])
def test_a_file_of_a_run_is_not_overwritten(
    name: str, place: str, copied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is a file added that the seal would refuse."""
    folder = copied()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    (tmp_path / "link.json").symlink_to(folder / name)
    (tmp_path / "linked").symlink_to(folder)
    target = {
        "absolute": folder / name,
        "relative": Path("..", folder.name, name),
        "link": tmp_path / "link.json",
        "directory": tmp_path / "linked" / name,
    }[place]
    done = run(folder, "--output", target)
    assert (done.exit_code, done.stdout) == (2, "")
    text = f"dpaudit: {folder / name} belongs to the run in {folder}"
    assert done.stderr.splitlines()[-1] == f"{text}, which would be damaged; choose another file."
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_another_name_of_a_sealed_file_is_replaced_alone(copied: Any, tmp_path: Path) -> None:
    folder = copied()
    before = (folder / "result.json").read_bytes()
    (tmp_path / "other.json").hardlink_to(folder / "result.json")
    assert run(folder, "--output", tmp_path / "other.json").exit_code == 0
    assert (folder / "result.json").read_bytes() == before != (tmp_path / "other.json").read_bytes()


def test_a_link_in_a_run_does_not_say_where_the_report_goes(copied: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = copied()
    (folder / "report.html").symlink_to(tmp_path / "mine")
    done = run(folder)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].endswith("report.html is a link; choose a file with --output.")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere"], "The directory nowhere does not exist."),
        ([".", "--format", "pdf"], "--format must be html, md or json, got 'pdf'."),
        ([".", "--output", "r.pdf"], "The file name must end in .html, .md or .json, got 'r.pdf'."),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"dpaudit: {sentence}"


def test_the_folder_of_a_demo_is_named_with_its_runs(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "dpaudit-demo"
    for name in ("too-little-noise", "correct"):
        shutil.copytree(runs["correct"], folder / name)
    (folder / "result.json").write_text(json.dumps({"notice": "", "as_expected": True, "trainings": []}))
    done = run(folder)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == (
        f"dpaudit: {folder} is the directory of dpaudit demo, not of a run; its runs are "
        f"{folder / 'correct'}, {folder / 'too-little-noise'}."
    )


def test_a_report_loads_neither_torch_nor_matplotlib(copied: Any) -> None:
    folder = copied()
    code = (
        "import atexit, sys; sys.argv = ['dpaudit', 'report', sys.argv[1]]; from dpaudit.cli import main; "
        "atexit.register(lambda: print([n for n in ('torch', 'matplotlib') if n in sys.modules]));"
        "main()"
    )
    words = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(folder / "report.html"), "[]"]
