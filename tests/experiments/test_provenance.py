"""Where the numbers of a run come from, as its result, its report and `--json` say it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_config import digits_config

import dpaudit
from dpaudit import _provenance
from dpaudit.experiments import Progress, parse_config, run
from dpaudit.experiments._build import load_data, resolve
from dpaudit.experiments._recompute import verify
from dpaudit.report import Format, Report

SEED = 271828182845904523536


class StoppedError(Exception):
    """Stands for a power failure."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was stopped once."""
    folder = tmp_path_factory.mktemp("origin") / "run"
    text = digits_config(
        folder, seed=SEED, hidden=4, num_examples=100, num_steps=2, audit="num_canaries = 4\nmethods = []"
    )

    def stop(progress: Progress) -> None:
        if progress.num_done == 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(parse_config(text, "run.toml"), watch=stop)
    run(parse_config(text, "run.toml"))
    return folder


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())["provenance"]
    return found


def test_a_result_names_the_packages_that_took_part(finished: Path) -> None:
    packages = read(finished)["packages"]
    assert packages["dpaudit"] == dpaudit.__version__
    assert packages["numpy"] == np.__version__
    assert {"torch", "scipy"} <= set(packages)
    assert ("ray" in packages) == ("ray" in sys.modules)


def test_a_result_has_digests_of_seeds_and_no_seeds(finished: Path) -> None:
    seeds = read(finished)["seeds"]
    assert set(seeds) == {"run", "initialization", "sampling", "noise", "augmentation", "audit"}
    assert all(len(one) == 64 for one in seeds.values())
    config = json.loads((finished / "config.json").read_text())["resolved"]
    public = "".join(path.read_text() for path in finished.glob("*.json") if path.name != "config.json")
    assert not [seed for seed in (SEED, *config["seeds"].values()) if str(seed) in public]


def test_digests_depend_on_data_configuration_and_seed() -> None:
    def digests(**changes: Any) -> dict[str, Any]:
        config = parse_config(digits_config("run", **changes), "run.toml")
        return resolve(config, load_data(config.data)[0]).digests(config)

    first, again = digests(seed=1), digests(seed=1)
    assert first == again
    other = digests(seed=2)
    assert other["seeds"]["noise"] != first["seeds"]["noise"]
    assert (other["data"], other["configuration"]) == (first["data"], first["configuration"])
    assert digests(seed=1, num_examples=401)["data"] != first["data"]
    assert digests(seed=1, hidden=17)["configuration"] != first["configuration"]


def test_a_run_that_was_resumed_says_so(finished: Path) -> None:
    found = read(finished)
    assert len(found["resumed"]) == 1
    assert found["started"] <= found["resumed"][0]["at"]
    assert found["seconds"] >= 0
    assert "packages" not in found["resumed"][0]  # nothing was updated in between


def test_a_start_that_was_lost_is_not_replaced_by_a_later_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    text = digits_config(
        folder, hidden=4, num_examples=100, num_steps=2, audit="num_canaries = 4\nmethods = []"
    )

    def stop(_: Progress) -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        run(parse_config(text, "run.toml"), watch=stop)
    (folder / "provenance.json").unlink()
    assert verify(folder).remarks[0].startswith("provenance.json is missing")
    run(parse_config(text, "run.toml"))
    found = read(folder)
    assert (found["started"], found["seconds"], len(found["resumed"])) == (None, None, 1)
    assert found["packages"]["numpy"] == np.__version__
    assert verify(folder).status == "sealed"
    assert found["resumed"][0]["at"] in Report.read([folder]).to_text()


def test_an_update_between_two_starts_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _provenance.with_start([])
    monkeypatch.setattr(np, "__version__", "99.0")
    second = _provenance.with_start(first)
    assert second[0] == first[0]
    assert second[1]["packages"]["numpy"] == "99.0"
    assert "python" not in second[1]
    assert _provenance.of_run(second, {})["packages"]["numpy"] != "99.0"


def test_a_report_has_it_folded_and_json_has_it_too(finished: Path) -> None:
    report = Report.read([finished])
    page = report.to_text()
    assert "<summary><h3>Provenance</h3></summary>" in page or "<summary>Provenance</summary>" in page
    assert read(finished)["data"] in page
    values = report.to_dict()["runs"][0]
    assert values["provenance"]["packages.dpaudit"] == dpaudit.__version__
    assert values["seal"] == json.loads((finished / "manifest.json").read_text())["seal"]
    assert "### Provenance" in report.to_text(Format.MARKDOWN)
    assert str(SEED) not in page


def test_a_project_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert _provenance.git_state(tmp_path) is None
    assert _provenance.git_state(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _provenance.git_state(tmp_path) is None


def test_a_git_that_hangs_is_the_same_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "git"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(_provenance, "_GIT_SECONDS", 0.05)
    monkeypatch.setattr(shutil, "which", lambda _: str(program))
    assert _provenance.git_state(tmp_path) is None


def test_the_commit_and_changed_files_of_a_project_are_found(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b.example", "-c", "commit.gpgsign=false")
        return subprocess.run(
            ["git", *settings, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout.strip()

    git("init", "--quiet")
    assert _provenance.git_state(tmp_path) is None  # there is no commit yet
    (tmp_path / "train.py").write_text("a = 1\n")
    git("add", "train.py")
    git("commit", "--quiet", "--message", "Begin")
    assert _provenance.git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "result.json").write_text("{}")
    assert _provenance.git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "train.py").write_text("a = 2\n")
    assert _provenance.git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}
