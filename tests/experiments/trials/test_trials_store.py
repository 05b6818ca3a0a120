"""What a store keeps, notices and refuses."""

from __future__ import annotations

import sqlite3
import struct
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from trial_runs import finish, plan_of, undisturbed

from dpaudit import IncompleteError, InputError
from dpaudit.experiments.trials import Finished, Store, TrialPlan, open_store

PLAN = plan_of(num_trials=10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a finished store."""
    finish(PLAN, tmp_path / "run")
    return tmp_path / "run"


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "trials.sqlite3")) as connection, connection:
        assert connection.execute(statement).rowcount == 1


def numbers(folder: Path, condition: str = "1") -> list[int]:
    with closing(sqlite3.connect(folder / "trials.sqlite3")) as connection:
        found = connection.execute(f"SELECT number FROM trials WHERE {condition} ORDER BY number")
        return [number for (number,) in found]


def test_a_row_says_all_of_its_trial(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "trials.sqlite3")) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM trials ORDER BY number")]
    assert [row["number"] for row in rows] == list(range(10))
    assert [row["present"] for row in rows] == [0, 1] * 5
    assert [int(row["seed"], 16) for row in rows] == [trial.seed for trial in PLAN.trials]
    assert len({row["seed"] for row in rows}) == 10
    assert all(row["duration"] > 0 and row["host"] and row["error"] is None for row in rows)


def test_nobody_else_can_read_the_seeds_of_trials(folder: Path) -> None:
    assert (folder / "trials.sqlite3").stat().st_mode & 0o777 == 0o600


def test_nothing_is_computed_again(folder: Path) -> None:
    before = (folder / "trials.sqlite3").read_bytes()
    assert finish(PLAN, folder).remarks == ()
    assert (folder / "trials.sqlite3").read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        "score = score + 1e-9",
        "score = NULL",
        "score = 'high'",
        "score = 9e999",
        "host = 'elsewhere'",
        "error = 'boom'",
        "seed = '00'",
        "present = 1 - present",
        "number = 10",
    ],
)
def test_a_damaged_row_is_reported_dropped_and_computed_again(
    folder: Path, tmp_path: Path, damage: str
) -> None:
    change(folder, f"UPDATE trials SET {damage} WHERE number = 4")
    run = finish(PLAN, folder)
    number = 10 if damage == "number = 10" else 4
    assert run.remarks == (f"The row of trial {number} was damaged; the trial is repeated.",)
    assert dict(run.scores) == undisturbed(PLAN, tmp_path)
    assert numbers(folder) == list(range(10))
    assert finish(PLAN, folder).remarks == ()


def test_a_score_with_the_checksum_of_another_trial_is_not_taken(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "trials.sqlite3")) as connection, connection:
        stolen = connection.execute("SELECT score, checksum FROM trials WHERE number = 2").fetchone()
        connection.execute("UPDATE trials SET score = ?, checksum = ? WHERE number = 4", stolen)
    assert "trial 4" in finish(PLAN, folder).remarks[0]


def test_a_flipped_bit_of_a_score_in_the_file_is_seen(folder: Path, tmp_path: Path) -> None:
    path = folder / "trials.sqlite3"
    right = undisturbed(PLAN, tmp_path)
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack(">d", right[5]))
    data[place + 4] ^= 1
    path.write_bytes(data)
    run = finish(PLAN, folder)
    assert run.remarks == ("The row of trial 5 was damaged; the trial is repeated.",)
    assert dict(run.scores) == right


def test_a_file_whose_structure_is_damaged_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    plan, folder = plan_of(num_trials=200, group_size=20), tmp_path / "run"
    finish(plan, folder)
    path = folder / "trials.sqlite3"
    data = bytearray(path.read_bytes())
    assert len(data) >= 6 * 4096
    data[4 * 4096 : 4 * 4096 + 100] = b"\xff" * 100  # the head of a page of rows
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"Expected the trials of a run in .* move it away"):
        finish(plan, folder)
    assert path.read_bytes() == bytes(data)


@pytest.mark.parametrize("content", [b"number,score\n0,1.5\n" * 400, b"x"])
def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trials.sqlite3"
    path.write_bytes(content)
    with pytest.raises(
        InputError, match=r"Expected the trials of a run in .*, but it cannot be read: .*not a"
    ):
        finish(PLAN, tmp_path)
    assert path.read_bytes() == content


def test_a_database_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite3"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE cats (name TEXT)")
    before = path.read_bytes()
    with pytest.raises(InputError, match="Expected the trials of a run in"):
        finish(PLAN, tmp_path)
    assert path.read_bytes() == before


def test_a_file_cut_short_is_refused_if_it_no_longer_says_whose_it_is(folder: Path) -> None:
    path = folder / "trials.sqlite3"
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(half)
    with pytest.raises(InputError, match="move it away"):
        finish(PLAN, folder)
    assert path.read_bytes() == half


def test_a_store_with_a_write_ahead_log_gets_a_rollback_journal(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "trials.sqlite3")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    finish(PLAN, folder)
    with closing(sqlite3.connect(folder / "trials.sqlite3")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "trials.sqlite3").touch()
    assert dict(finish(PLAN, tmp_path).scores) == undisturbed(PLAN, tmp_path)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (TrialPlan(recipe=PLAN.recipe, num_trials=10, seed=2), "seed is 2 instead of the stored 1"),
        (plan_of(num_trials=12), "num_trials is 12 instead of the stored 10"),
        (plan_of(group_size=2), "group_size is 2 instead of the stored 1"),
        (plan_of("in_company"), 'target is "trial_functions:in_company" instead'),
        (plan_of("failing", numbers=[1]), r"arguments.numbers is \[1\] instead of the stored null"),
        (
            TrialPlan(recipe=PLAN.recipe, num_trials=10, seed=1, config={"steps": 3}),
            "arguments is null instead",
        ),
    ],
)
def test_trials_of_another_run_are_refused(folder: Path, other: TrialPlan, difference: str) -> None:
    with pytest.raises(InputError, match=f"got those of another: .*{difference}"):
        finish(other, folder)
    assert numbers(folder) == list(range(10))


def test_another_version_of_the_store_is_refused(folder: Path) -> None:
    change(folder, "UPDATE about SET schema_version = 99")
    with pytest.raises(InputError, match="Expected trials of this version of dpaudit"):
        finish(PLAN, folder)


def test_a_folder_is_for_one_run_at_a_time(folder: Path) -> None:
    with open_store(folder, PLAN), pytest.raises(InputError, match="another process is running in it"):
        finish(PLAN, folder)


def test_a_trial_that_has_a_score_keeps_it(folder: Path) -> None:
    group, other = PLAN.trials[:1], Finished((99.0,), (None,), 1.0, "host")
    with open_store(folder, PLAN) as store:
        before = store.scores[0]
        store.write(group, other)
        store.write(group, Finished.failed(group, "too late"))
        assert store.scores[0] == before
    # and one that was written by somebody else meanwhile, too
    with Store(folder, PLAN) as first:
        del first.scores[0]
        first.write(group, other)
    assert finish(PLAN, folder).scores[0] == before


def test_after_a_full_disk_a_run_goes_on_with_what_was_kept(
    small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, disk = plan_of(num_trials=600, group_size=20), small_disk("64k")
    with pytest.raises(IncompleteError, match=r"Cannot write .*disk is full.* are kept"):
        finish(plan, disk)
    kept = numbers(disk)
    assert 0 < len(kept) < 600
    assert len(kept) % 20 == 0  # a group is there or not
    small_disk("16m")
    assert dict(finish(plan, disk).scores) == undisturbed(plan, tmp_path)


def test_after_a_limit_of_the_file_size_a_run_goes_on_with_what_was_kept(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    plan, folder = plan_of(num_trials=600, group_size=20), tmp_path / "run"
    driver = start(plan, folder, file_size=48 * 1024)
    _, said = driver.communicate(timeout=60)
    assert driver.returncode == 1
    assert said.startswith("dpaudit: Cannot write ")
    assert said.count("\n") == 1
    assert 0 < len(numbers(folder)) < 600
    assert dict(finish(plan, folder).scores) == undisturbed(plan, tmp_path)
