"""`dpaudit verify`: its statuses, sentences and JSON."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
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


@pytest.mark.parametrize("command", ["verify", "report"])
@pytest.mark.parametrize("error", [KeyError("mu"), TypeError("wrong"), ValueError("wrong")])
def test_a_mistake_of_dpaudit_is_not_taken_for_damage(
    folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch, command: str, error: Exception
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("dpaudit.experiments._derivation.analyze", fail)
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


def test_a_checkpoint_that_lost_a_bit_is_refused(folder: Path, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder / "unfinished", tmp_path / "copy"))
    content = bytearray((copy / "checkpoint.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (copy / "checkpoint.pt").write_bytes(content)
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"Expected an intact checkpoint in {copy / 'checkpoint.pt'}" in result.stdout


@pytest.mark.parametrize("lost", [1, 40, 80, 500])
def test_a_checkpoint_that_lost_its_end_is_damaged_and_not_old(
    lost: int, folder: Path, run: Any, tmp_path: Path
) -> None:
    """With the last 80 bytes, all of the checksum is lost, and nothing else."""
    copy = Path(shutil.copytree(folder / "unfinished", tmp_path / "copy"))
    content = (copy / "checkpoint.pt").read_bytes()
    (copy / "checkpoint.pt").write_bytes(content[:-lost])
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"Expected an intact checkpoint in {copy / 'checkpoint.pt'}, but it is damaged" in result.stdout


def test_a_checkpoint_of_version_1_has_no_checksum_but_is_checked(run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(VERSION_1 / "one-run-interrupted", tmp_path / "copy"))
    assert run("verify", copy).stdout.splitlines() == [
        f"{copy}: unfinished",
        "  Its checkpoint has no checksum, because a version before 0.2 wrote it.",
    ]
    path = copy / "checkpoint.pt"
    content = path.read_bytes()
    for damage in (content[:-100], content.replace(b"scores", b"sc0res", 1)):
        path.write_bytes(damage)
        assert f"Expected an intact checkpoint in {path}, but it is damaged" in run("verify", copy).stdout


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_store_of_a_killed_process_is_read_and_left_alone(mode: str, run: Any, tmp_path: Path) -> None:
    """What was not committed is in the journal, or in the log, and still has to be undone or applied."""
    started = Path(shutil.copytree(VERSION_1 / "many-runs-interrupted", tmp_path / "started"))
    with closing(sqlite3.connect(started / "trials.sqlite3", isolation_level=None)) as store:
        [count] = store.execute("SELECT count(*) FROM trials").fetchone()
        store.execute(f"PRAGMA journal_mode = {mode}")
        store.execute("PRAGMA cache_size = 1")  # so that pages are written before the end
        store.execute("BEGIN")
        store.execute("DELETE FROM trials WHERE number = 1")
        if mode == "wal":
            store.execute("COMMIT")
        else:
            store.execute("CREATE TABLE more (text TEXT)")
            store.executemany("INSERT INTO more VALUES (?)", [("x" * 5000,)] * 20)
        killed = Path(shutil.copytree(started, tmp_path / "killed"))  # as kill -9 leaves it
    (killed / "trials.sqlite3-shm").unlink(missing_ok=True)
    before = {path.name: path.read_bytes() for path in killed.iterdir()}
    assert f"trials.sqlite3-{'wal' if mode == 'wal' else 'journal'}" in before
    result = run("verify", killed)
    kept = count - (mode == "wal")
    assert result.stdout.splitlines() == [
        f"{killed}: unfinished",
        f"  The {kept} stored trials are intact.",
    ]
    assert {path.name: path.read_bytes() for path in killed.iterdir()} == before


def test_a_store_that_does_not_name_its_run_is_refused(run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(VERSION_1 / "many-runs-interrupted", tmp_path / "copy"))
    with closing(sqlite3.connect(copy / "trials.sqlite3")) as store, store:
        store.execute("DELETE FROM about")
    result = run("verify", copy)
    assert result.exit_code == 2
    assert f"Expected the trials of a run in {copy / 'trials.sqlite3'}" in result.stdout


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


OLD_FORGERIES: dict[str, Any] = {
    "verdict": lambda values: values.update(verdict="VIOLATION"),
    "bound.parameter": lambda values: values["bound"].update(parameter=9.0),
    "bound.kind": lambda values: values["bound"].update(kind="heuristic"),
    "bound.statement": lambda values: values["bound"].update(statement="epsilon >= 9"),
    "bound.confidence": lambda values: values["bound"].update(confidence=0.99),
    "bound.inference": lambda values: values["bound"].update(inference="Unknown()"),
    "diagnosis.confidence": lambda values: values["diagnosis"].update(confidence=0.9),
    "methods": lambda values: values["methods"][0].update(threshold=0.75),
}


@pytest.mark.parametrize("key", OLD_FORGERIES)
def test_what_version_1_says_must_be_consistent(key: str, run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(VERSION_1 / "input", tmp_path / "copy"))
    values = json.loads((copy / "result.json").read_text())
    OLD_FORGERIES[key](values)
    (copy / "result.json").write_text(json.dumps(values))
    result = run("verify", copy, "--allow-unsealed")
    assert result.exit_code == 2
    assert str(copy / "result.json") in result.stdout


def test_only_a_run_of_version_1_may_lack_its_scores(run: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(VERSION_1 / "input", tmp_path / "copy"))
    (copy / "scores.npy").unlink()
    result = run("verify", copy, "--allow-unsealed")
    assert result.exit_code == 0
    assert "Its numbers could not be derived again: its scores are missing." in result.stdout


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


def test_a_name_cannot_control_the_terminal(run: Any) -> None:
    result = run("verify", "\x1b[2Jruns")
    assert result.exit_code == 2
    assert result.stdout.startswith("\\x1b[2Jruns: refused\n  Expected \\x1b[2Jruns ")
