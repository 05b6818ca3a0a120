"""``dpaudit zoo`` prints what catches each fault, and ends with whether all is as it should be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpaudit import zoo
from dpaudit.zoo import ENTRIES, chosen

QUICK = "microbatch", "per-layer-clip"
ONLY = [word for name in QUICK for word in ("--only", name)]


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put other entries into the zoo."""

    def change(**changes: Any) -> None:
        monkeypatch.setattr(
            zoo, "ENTRIES", [replace(one, **changes) for one in chosen(ENTRIES, ["microbatch"])]
        )

    return change


def test_both_tables_fit_a_page_and_the_second_call_prints_the_same(run: Any, tmp_path: Path) -> None:
    first = run("zoo", *ONLY, "--output", tmp_path / "zoo")
    assert first.exit_code == 0, first.output
    assert first.stderr.splitlines() == ["0 of 2: microbatch", "1 of 2: per-layer-clip", "2 of 2: done"]
    lines = first.stdout.splitlines()
    assert max(len(line) for line in lines if "Written" not in line) <= 80
    assert [line.split()[0] for line in lines if line.startswith(QUICK)] == [*QUICK, "per-layer-clip"]
    assert "All 2 faults and their twins are as expected." in first.stdout
    again = run("zoo", *ONLY, "--output", tmp_path / "zoo")
    assert again.stdout == first.stdout
    assert again.stderr.splitlines() == ["2 of 2: done"]


def test_json_has_every_method_with_its_verdict_and_the_steps_it_needs(run: Any, tmp_path: Path) -> None:
    result = run("zoo", "--only", "per-layer-clip", "--output", tmp_path, "--json", "--seed", 1)
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["seed"] == 1
    (entry,) = values["entries"]
    assert entry["broken"]["bound"]["verdict"] == "VIOLATION"
    assert entry["correct"]["bound"]["verdict"] == "NO_VIOLATION"
    assert {method["name"] for method in entry["broken"]["methods"]} == {
        "f-DP(CP)",
        "f-DP(ZB)",
        "(eps,delta)(CP)",
        "(eps,delta)(ZB)",
        "eps-DP(Katz)",
        "f-DP(joint)",
        "(eps,delta)(joint)",
        "f-DP(betting)",
    }
    for method in entry["broken"]["methods"]:
        assert method["is_violation"] == (method["epsilon"] > entry["broken"]["claimed_epsilon"])
        assert (method["steps_needed"] is not None) == method["is_violation"]


def test_a_fault_that_is_not_caught_ends_with_status_1(run: Any, altered: Any, tmp_path: Path) -> None:
    (entry,) = chosen(ENTRIES, ["microbatch"])
    altered(scenario=lambda _, seed: entry.scenario(False, seed))
    result = run("zoo", "--output", tmp_path)
    assert result.exit_code == 1
    assert "NOT CAUGHT" in result.stdout
    assert "Not as expected: microbatch." in result.stdout


def test_a_fault_that_is_known_not_to_be_caught_is_listed_with_its_reason(
    run: Any, altered: Any, tmp_path: Path
) -> None:
    (entry,) = chosen(ENTRIES, ["microbatch"])
    altered(scenario=lambda _, seed: entry.scenario(False, seed), not_caught="It leaks nothing.")
    result = run("zoo", "--output", tmp_path)
    assert result.exit_code == 0
    assert "not caught. It leaks nothing." in result.stdout


def test_mistakes_are_told_in_a_sentence(refused: Any, run: Any, tmp_path: Path) -> None:
    assert refused("zoo", "--only", "nosie").startswith("The zoo has no entry 'nosie'")
    run("zoo", "--only", "microbatch", "--output", tmp_path)
    sentence = refused("zoo", "--only", "microbatch", "--output", tmp_path, "--seed", 1)
    assert (
        sentence == f"{tmp_path / 'microbatch.json'} was made otherwise: seed is 1 instead of the stored 0; "
        "choose another --output."
    )
    (tmp_path / "microbatch.json").write_text("{")
    assert refused("zoo", "--only", "microbatch", "--output", tmp_path) == (
        f"{tmp_path / 'microbatch.json'} is damaged: it does not contain an entry of the zoo. Delete it."
    )


def test_names_are_listed_and_nothing_is_run(run: Any, tmp_path: Path) -> None:
    result = run("zoo", "--list", "--output", tmp_path / "zoo")
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.stdout.splitlines() if not line.startswith(" ")]
    assert names == [entry.name for entry in ENTRIES]
    assert not (tmp_path / "zoo").exists()
    listed = json.loads(run("zoo", "--list", "--only", "microbatch", "--json").stdout)
    assert [entry["name"] for entry in listed["entries"]] == ["microbatch"]


def test_an_interrupted_zoo_says_what_is_kept(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    (entry,) = chosen(ENTRIES, ["microbatch"])
    monkeypatch.setattr(zoo, "ENTRIES", [entry, replace(entry, name="slow", scenario=interrupted)])
    result = run("zoo", "--output", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == (
        f"dpaudit: Interrupted by SIGINT after 1 of 2 entries; finished work is kept in {tmp_path}: "
        "run the same command again to resume."
    )
