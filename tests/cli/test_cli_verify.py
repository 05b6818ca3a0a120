"""`dpaudit verify`: its statuses, sentences and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from digits_config import digits_config, models_config

from dpaudit.errors import InputError
from dpaudit.experiments import Progress, Running, parse_config, run
from dpaudit.experiments._recompute import verify_against_scores


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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unfinished run with some of its trials in a store."""
    found = tmp_path_factory.mktemp("many") / "run"

    def stop(running: Running) -> None:
        if running.progress.num_done >= 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(parse_config(models_config(found, num_examples=100), "run.toml"), trials=stop)
    return found


def test_a_sealed_run_is_status_0_with_its_seal(folder: Path, run: Any) -> None:
    result = run("verify", folder / "finished")
    seal = json.loads((folder / "finished" / "manifest.json").read_text())["seal"]
    assert result.exit_code == 0
    assert result.stdout == f"{folder / 'finished'}: sealed, UNDERPOWERED, seal {seal}\n"


@pytest.mark.parametrize("command", ["verify", "report"])
@pytest.mark.parametrize("error", [KeyError("mu"), TypeError("wrong"), ValueError("wrong")])
def test_a_mistake_of_dpaudit_is_not_taken_for_damage(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch, command: str, error: Exception
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("dpaudit.experiments._analysis.compare", fail)
    result = run(command, folder / "finished")
    assert result.exit_code == 4
    assert f"dpaudit failed with {type(error).__name__}" in result.stderr
    assert "damaged" not in result.stderr


def test_an_unfinished_run_is_said_to_be_one(folder: Path, run: Any) -> None:
    result = run("verify", folder / "unfinished")
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{folder / 'unfinished'}: unfinished",
        "  Its checkpoint is intact.",
    ]


@pytest.mark.parametrize("lost", [0, 1, 80, 500])
def test_a_checkpoint_that_lost_its_end_is_damaged_and_not_old(
    lost: int, folder: Path, run: Any, tmp_path: Path
) -> None:
    """With the last 80 bytes, just the checksum is lost; without any, a bit is flipped."""
    copy = Path(shutil.copytree(folder / "unfinished", tmp_path / "copy"))
    content = bytearray((copy / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= lost == 0
    (copy / "checkpoint.pt").write_bytes(content[: len(content) - lost])
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"The checkpoint {copy / 'checkpoint.pt'} is damaged" in result.stdout


def test_a_store_of_a_killed_process_is_read_and_left_alone(many: Path, run: Any, tmp_path: Path) -> None:
    """The last line was not written completely."""
    killed = Path(shutil.copytree(many, tmp_path / "killed"))
    store = killed / "trials.jsonl"
    store.write_bytes(store.read_bytes()[:-30])
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    result = run("verify", killed)
    assert result.stdout.splitlines() == [
        f"{killed}: unfinished",
        f"  The {before[store.name].count(b'checksum') - 1} stored trials are intact.",
    ]
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before


@pytest.mark.parametrize(("line", "sentence"), [(0, "does not hold the trials of a run"), (1, "Line 2 of")])
def test_a_store_that_does_not_name_its_run_or_a_score_is_refused(
    line: int, sentence: str, many: Path, run: Any, tmp_path: Path
) -> None:
    store = Path(shutil.copytree(many, tmp_path / "copy")) / "trials.jsonl"
    lines = store.read_text().splitlines(keepends=True)
    store.write_text("".join([*lines[:line], "{}\n", *lines[line + 1 :]]))
    result = run("verify", store.parent)
    assert result.exit_code == 2
    assert sentence in result.stdout
    assert str(store) in result.stdout


def test_a_run_without_its_private_files_is_still_sealed(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "finished", tmp_path / "copy"))
    for name in ("config.json", "checkpoint.pt"):
        (copy / name).unlink()
    result = run("verify", copy)
    assert result.exit_code == 0
    assert "  Removed since the run was sealed: config.json, checkpoint.pt." in result.stdout


def unsealed(folder: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, as a kill between result and manifest leaves it."""
    copy = Path(shutil.copytree(folder / "finished", tmp_path / "copy"))
    (copy / "manifest.json").unlink()
    return copy


def test_a_result_without_a_manifest_is_unsealed_and_not_repeated(
    folder: Path, run: Any, tmp_path: Path
) -> None:
    copy = unsealed(folder, tmp_path)
    result = run("verify", copy)
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{copy}: unsealed",
        "  There is no manifest.json: the run was interrupted before it was sealed, or the manifest was "
        "removed. Its result.json was not checked; the same dpaudit run command computes it again from the "
        "checkpoint or the stored trials, and seals it.",
        "  Its checkpoint is intact.",
    ]


def test_whoever_removes_a_manifest_cannot_change_the_result(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = unsealed(folder, tmp_path)
    path = copy / "result.json"
    path.write_text(path.read_text().replace("UNDERPOWERED", "NO_VIOLATION"))
    checked, reported = run("verify", copy, "--json"), run("report", copy)
    assert json.loads(checked.stdout)["runs"][0]["verdict"] is None
    assert (checked.exit_code, reported.exit_code) == (2, 2)
    assert f"{copy} has no manifest.json" in reported.stderr
    assert not (copy / "report.html").exists()
    (copy / "config.json").write_text("{}")
    assert f"{copy}: refused" in run("verify", copy).stdout
    (copy / "config.json").unlink()
    assert "neither a manifest.json nor a config.json" in run("verify", copy).stdout


def test_all_runs_are_checked_and_json_has_them(folder: Path, run: Any, tmp_path: Path) -> None:
    result = run("verify", folder / "finished", tmp_path / "none", unsealed(folder, tmp_path), "--json")
    values = json.loads(result.stdout)
    assert (result.exit_code, values["accepted"]) == (2, False)
    assert [one["status"] for one in values["runs"]] == ["sealed", "refused", "unsealed"]
    assert values["runs"][1]["error"] == f"The directory {tmp_path / 'none'} does not exist."
    assert values["runs"][0]["verdict"] == "UNDERPOWERED"
    assert values["runs"][0]["remarks"] == []


def test_a_link_in_the_place_of_a_file_is_refused(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "finished", tmp_path / "copy"))
    (copy / "scores.npy").rename(tmp_path / "scores.npy")
    (copy / "scores.npy").symlink_to(tmp_path / "scores.npy")
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"{copy / 'scores.npy'} must be a file of the run, but it is a link" in result.stdout


def test_a_name_cannot_control_the_terminal(run: Any) -> None:
    result = run("verify", "\x1b[2Jruns")
    assert result.exit_code == 2
    assert result.stdout.startswith("\\x1b[2Jruns: refused\n  The directory \\x1b[2Jruns ")


def test_a_run_of_an_older_version_lacks_keys_but_not_others(folder: Path) -> None:
    values = json.loads((folder / "finished" / "result.json").read_text())
    changed = {**values, "size": {**values["size"], "num_present": 1}}
    with pytest.raises(InputError, match=r"size\.num_present is 1 in "):
        verify_against_scores(folder / "finished", changed)
    for key in ("condition", "size", "needed", "specific"):
        del values[key]
    del values["claim"]["description"]
    verify_against_scores(folder / "finished", values)
    del values["verdict"]
    with pytest.raises(InputError, match="verdict is None in "):
        verify_against_scores(folder / "finished", values)
