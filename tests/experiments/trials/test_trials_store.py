"""What a store keeps, notices and refuses."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import damaged, examples
from hypothesis import given
from hypothesis import strategies as st
from trial_runs import finish, plan_of, undisturbed

from dpaudit import IncompleteError, InputError
from dpaudit.experiments.trials import Finished, Store, TrialPlan, open_store

PLAN = plan_of(num_trials=10)
STORE = "trials.jsonl"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a finished store."""
    finish(PLAN, tmp_path / "run")
    return tmp_path / "run"


def lines(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / STORE).read_text().splitlines()]


def change(folder: Path, line: int, **values: Any) -> None:
    """Edit a line; that of trial 4 is line 5, because the first one is about the run."""
    content = lines(folder)
    content[line] |= values
    (folder / STORE).write_text("".join(json.dumps(one) + "\n" for one in content))


def numbers(folder: Path) -> list[int]:
    return sorted(row["number"] for row in lines(folder)[1:])


def test_a_row_says_all_of_its_trial(folder: Path) -> None:
    rows = lines(folder)[1:]
    assert [row["number"] for row in rows] == list(range(10))
    assert [row["present"] for row in rows] == [False, True] * 5
    assert [int(row["seed"], 16) for row in rows] == [trial.seed for trial in PLAN.trials]
    assert all(row["duration"] > 0 and row["host"] and row["error"] is None for row in rows)


def test_nobody_else_can_read_the_seeds_of_trials(folder: Path) -> None:
    assert (folder / STORE).stat().st_mode & 0o777 == 0o600


def test_nothing_is_computed_again(folder: Path) -> None:
    before = (folder / STORE).read_bytes()
    assert finish(PLAN, folder).remarks == ()
    assert (folder / STORE).read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        {"score": 1e-9},
        {"score": None},
        {"score": "high"},
        {"host": "elsewhere"},
        {"error": "boom"},
        {"seed": "00"},
        {"present": True},
        {"number": 10},
        {"more": 1},
    ],
)
def test_a_damaged_row_is_reported_dropped_and_computed_again(
    folder: Path, tmp_path: Path, damage: dict[str, Any]
) -> None:
    change(folder, 5, **damage)
    run = finish(PLAN, folder)
    assert run.remarks == ("Line 6 of the stored trials was damaged; its trial is repeated.",)
    assert dict(run.scores) == undisturbed(PLAN, tmp_path)
    assert numbers(folder) == list(range(10))
    assert finish(PLAN, folder).remarks == ()


def test_a_first_line_without_its_end_is_not_joined_with_the_next(folder: Path) -> None:
    header = (folder / STORE).read_bytes().splitlines()[0]
    (folder / STORE).write_bytes(header)
    finish(PLAN, folder)
    assert numbers(folder) == list(range(10))


def test_a_score_with_the_checksum_of_another_trial_is_not_taken(folder: Path) -> None:
    row = lines(folder)[3]
    change(folder, 5, score=row["score"], checksum=row["checksum"])
    assert "Line 6" in finish(PLAN, folder).remarks[0]


def test_a_line_that_a_killed_process_has_not_finished_is_no_damage(folder: Path, tmp_path: Path) -> None:
    (folder / STORE).write_bytes((folder / STORE).read_bytes()[:-20])
    run = finish(PLAN, folder)
    assert run.remarks == ()
    assert dict(run.scores) == undisturbed(PLAN, tmp_path)
    assert numbers(folder) == list(range(10))


@pytest.mark.parametrize(
    "content",
    [
        b"number,score\n0,1.5\n" * 400,
        b"x",
        b"[]\n",
        b"[" * 100_000,
        b'{"schema_version": 99}\n',
        b'{"schema_version": 3, "identity": {"num_trials": "x"}}\n',
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / STORE).write_bytes(content)
    with pytest.raises(InputError, match=r"does not hold the trials of a run.* move"):
        finish(PLAN, tmp_path)
    assert (tmp_path / STORE).read_bytes() == content


def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / STORE).touch()
    assert dict(finish(PLAN, tmp_path).scores) == undisturbed(PLAN, tmp_path)


@examples(40)
@given(data=st.data())
def test_a_damaged_store_gives_the_same_scores_or_is_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    scores = dict(finish(PLAN, folder).scores)
    path = folder / STORE
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    with contextlib.suppress(InputError):
        assert dict(finish(PLAN, folder).scores) == scores
    assert [one.name for one in folder.iterdir() if "unfinished" in one.name] == []


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
            "config is {.*} instead of the stored null",
        ),
    ],
)
def test_trials_of_another_run_are_refused(folder: Path, other: TrialPlan, difference: str) -> None:
    with pytest.raises(InputError, match=f"holds the trials of another run: .*{difference}"):
        finish(other, folder)
    assert numbers(folder) == list(range(10))


def test_a_folder_is_for_one_run_at_a_time(folder: Path) -> None:
    with open_store(folder, PLAN), pytest.raises(InputError, match="is in use by another process"):
        finish(PLAN, folder)


def test_a_trial_that_has_a_score_keeps_it(folder: Path) -> None:
    group, other = PLAN.trials[:1], Finished((99.0,), (None,), 1.0, "host")
    with open_store(folder, PLAN) as store:
        before = store.scores[0]
        store.write(group, other)
        store.write(group, Finished.failed(group, "too late"))
        assert store.scores[0] == before
    # and one that was written by somebody else meanwhile, too
    first = Store(folder, PLAN)
    del first.scores[0]
    first.write(group, other)
    assert finish(PLAN, folder).scores[0] == before


def test_after_a_full_disk_a_run_goes_on_with_what_was_kept(
    small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    plan, disk = plan_of(num_trials=600, group_size=20), small_disk("64k")
    with pytest.raises(IncompleteError, match=r"Cannot write .*No space left on device"):
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
