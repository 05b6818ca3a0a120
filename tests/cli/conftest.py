"""A way to call the command line and to make files of scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from dpaudit.cli._app import app

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call ``dpaudit`` with these words, on a pretended page of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words: object) -> Any:
        return CliRunner().invoke(app, [str(word) for word in words])

    return call


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """Call ``dpaudit`` with a mistake; gives its sentence."""

    def call(*words: object) -> str:
        result = run(*words)
        assert result.exit_code == 2, result.output
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        sentence = lines[0].removeprefix("dpaudit: ")
        if "--json" in words:
            assert json.loads(result.stdout) == {"error": sentence, "exit_status": 2}
        else:
            assert result.stdout == ""
        return sentence

    return call


class Scores:
    """Files of normalised scores of a Gaussian mechanism with mu = 2, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rng = np.random.default_rng(7)
        self.present = 1 + 0.5 * rng.standard_normal(300)
        self.absent = 0.5 * rng.standard_normal(250)
        self.scores = np.concatenate([self.present, self.absent])
        self.presence = np.arange(550) < 300

    def npy(self, name: str, values: Any) -> Path:
        np.save(self.folder / name, np.asarray(values), allow_pickle=True)
        return self.folder / name

    def npz(self, name: str, **arrays: Any) -> Path:
        np.savez(self.folder / name, **arrays)
        return self.folder / name

    def text(self, name: str, *lines: object) -> Path:
        (self.folder / name).write_text("\n".join(map(str, lines)) + "\n")
        return self.folder / name

    def parquet(self, name: str, **columns: Any) -> Path:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet  # noqa: PLC0415

        parquet.write_table(arrow.table(columns), self.folder / name)
        return self.folder / name

    def sides(self) -> list[object]:
        """The options for a pair of .npy files."""
        return ["--with", self.npy("w.npy", self.present), "--without", self.npy("o.npy", self.absent)]


@pytest.fixture
def files(tmp_path: Path) -> Scores:
    return Scores(tmp_path)
