"""``dpaudit demo`` tells a correct training from a broken one and writes what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def test_the_demo_tells_the_trainings_apart(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "demo"
    result = run("demo", "--output", folder)
    assert result.exit_code == 0, result.output
    assert "The scores are simulated" in result.stdout
    assert "NO_VIOLATION" in result.stdout
    assert " VIOLATION. The observations refute the claim" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines() if "Written" not in line) <= 80
    values = json.loads((folder / "result.json").read_text())
    assert values["simulated"] is True
    assert [one["verdict"] for one in values["trainings"]] == ["NO_VIOLATION", "VIOLATION"]
    assert values["trainings"][0]["bound"]["epsilon"] < 8 < values["trainings"][1]["bound"]["epsilon"]
    report = (folder / "report.md").read_text()
    assert "The scores are simulated: no model was trained." in report
    assert values["trainings"][1]["bound"]["statement"] in report
    assert sorted(path.name for path in folder.iterdir()) == ["report.md", "result.json"]
    assert json.loads(run("demo", "--output", folder, "--json").stdout) == values


def test_a_folder_that_cannot_be_made_is_named(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused("demo", "--output", tmp_path / "file") == f"Cannot write {tmp_path / 'file'}: File exists."


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dpaudit.cli._paths import write_text  # noqa: PLC0415
    from dpaudit.errors import InputError  # noqa: PLC0415

    path = tmp_path / "report.md"
    write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match=r"Cannot write .*report.md: No space left on device\."):
        write_text(path, "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]
