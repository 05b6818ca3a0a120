"""`dpaudit verify`: its statuses, sentences and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from digits_config import digits_config

from dpaudit.experiments import Progress, parse_config, run

VERSION_1 = Path(__file__).parent.parent / "fixtures" / "version_1"


class StoppedError(Exception):
    """Stands for a power failure."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and an unfinished one."""
    found = tmp_path_factory.mktemp("runs")

    def stop(progress: Progress) -> None:
        if progress.num_done == 2:
            raise StoppedError

    for name in ("finished", "unfinished"):
        text = digits_config(
            found / name,
            top="checkpoint_seconds = 0",
            hidden=4,
            num_examples=100,
            num_steps=3,
            audit="num_canaries = 4\nmethods = []",
        )
        if name == "finished":
            run(parse_config(text, "run.toml"))
        else:
            with pytest.raises(StoppedError):
                run(parse_config(text, "run.toml"), watch=stop)
    return found


def test_a_sealed_run_is_status_0_with_its_seal(folder: Path, run: Any) -> None:
    result = run("verify", folder / "finished")
    seal = json.loads((folder / "finished" / "manifest.json").read_text())["seal"]
    assert result.exit_code == 0
    assert result.stdout == f"{folder / 'finished'}: sealed, UNDERPOWERED, seal {seal}\n"


def test_an_unfinished_run_is_said_to_be_one(folder: Path, run: Any) -> None:
    result = run("verify", folder / "unfinished")
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{folder / 'unfinished'}: unfinished",
        "  Its checkpoint is intact.",
    ]


def test_a_checkpoint_that_lost_a_bit_is_refused(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "unfinished", tmp_path / "copy"))
    content = bytearray((copy / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "checkpoint.pt").write_bytes(content)
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"Expected an intact checkpoint in {copy / 'checkpoint.pt'}" in result.stdout


def test_a_run_without_its_private_files_is_still_sealed(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "finished", tmp_path / "copy"))
    for name in ("config.json", "checkpoint.pt"):
        (copy / name).unlink()
    result = run("verify", copy)
    assert result.exit_code == 0
    assert "  Removed since the run was sealed: config.json, checkpoint.pt." in result.stdout


def test_a_run_of_version_1_is_unsealed_and_accepted_only_on_request(run: Any) -> None:
    words = ("verify", VERSION_1 / "input")
    refused, accepted = run(*words), run(*words, "--allow-unsealed")
    assert (refused.exit_code, accepted.exit_code) == (2, 0)
    assert refused.stdout == accepted.stdout
    assert "input: unsealed, NO_VIOLATION" in refused.stdout
    assert "This run is not sealed" in refused.stdout
    assert "version 0.1.0 of dpaudit; this version derives bound.parameter" in refused.stdout


def test_counts_of_version_1_must_follow_from_its_scores(run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(VERSION_1 / "input", tmp_path / "copy"))
    values = json.loads((copy / "result.json").read_text())
    values["bound"]["counts"]["false_positives"] += 1
    (copy / "result.json").write_text(json.dumps(values))
    result = run("verify", copy, "--allow-unsealed")
    assert result.exit_code == 2
    assert "Expected bound.counts.false_positives = " in result.stdout


def test_all_runs_are_checked_and_json_has_them(folder: Path, run: Any, tmp_path: Path) -> None:
    result = run("verify", folder / "finished", tmp_path / "none", VERSION_1 / "input", "--json")
    values = json.loads(result.stdout)
    assert (result.exit_code, values["accepted"]) == (2, False)
    assert [one["status"] for one in values["runs"]] == ["sealed", "refused", "unsealed"]
    assert values["runs"][1]["error"].startswith(f"Expected {tmp_path / 'none'} to be the directory of a run")
    assert values["runs"][0]["verdict"] == "UNDERPOWERED"
    assert values["runs"][0]["remarks"] == []


def test_a_link_in_the_place_of_a_file_is_refused(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "finished", tmp_path / "copy"))
    (copy / "scores.npy").rename(tmp_path / "scores.npy")
    (copy / "scores.npy").symlink_to(tmp_path / "scores.npy")
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"Expected {copy / 'scores.npy'} to be a file of the run, but it is a link" in result.stdout
