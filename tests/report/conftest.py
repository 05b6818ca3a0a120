"""Real runs of a second each, and their report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import forged
from digits_config import digits_config

from dpaudit.experiments import parse_config, rehearse
from dpaudit.report import Report

CHANGES = {
    "correct": (),
    "broken": ("training.fault.name=noise-too-small", "training.fault.factor=0.4"),
    "paper": ("audit.mode=paper", "audit.num_canaries=1", "audit.methods=[]"),
}

Copy = Callable[..., Path]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    for name, changes in CHANGES.items():
        text = digits_config(folder / name, seed=314159265358979, audit="num_canaries = 32")
        rehearse(parse_config(text, "small.toml", changes), keep=True)
    return {name: folder / name for name in CHANGES}


@pytest.fixture(scope="session")
def report(runs: dict[str, Path]) -> Report:
    """Of a correct run and a broken one."""
    return Report.read([runs["correct"], runs["broken"]])


@pytest.fixture
def copied(runs: dict[str, Path], tmp_path: Path) -> Copy:
    """A copy of a run, whose result was changed by a function, and sealed again."""

    def copy(change: Callable[[dict[str, Any]], object] | None = None, *, name: str = "correct") -> Path:
        folder = tmp_path / "copy" / name
        shutil.copytree(runs[name], folder)
        if change is not None:
            values = json.loads((folder / "result.json").read_text())
            change(values)
            (folder / "result.json").write_text(json.dumps(values))
        return forged(folder)

    return copy
