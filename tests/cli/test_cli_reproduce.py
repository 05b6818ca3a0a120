"""``dpaudit reproduce`` writes data, pictures and a page, and goes on where it was interrupted."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dpaudit.experiments import reproduction
from dpaudit.experiments.reproduction import FIGURES
from dpaudit.stats import Kind


def test_four_files_are_written_and_the_second_call_measures_nothing(run: Any, tmp_path: Path) -> None:
    words = "reproduce", "threshold-observations", "--scale", "tiny", "--output", tmp_path
    first = run(*words)
    assert first.exit_code == 0, first.output
    assert "Comparison with the paper" in first.stdout
    for suffix in ("csv", "md", "png", "svg"):
        path = tmp_path / f"threshold-observations.{suffix}"
        assert f"Written: {path}" in first.stdout
        assert path.stat().st_size > 500
    with (tmp_path / "threshold-observations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["kind"] for row in rows} == {"confidence"}
    assert {"run", "observations", "method", "rule", "epsilon"} <= set(rows[0])
    again = run(*words)
    assert again.stdout == first.stdout
    assert again.stderr.splitlines() == ["2 of 2: done"]


def test_the_page_says_which_numbers_are_sound(run: Any, tmp_path: Path) -> None:
    run("reproduce", "observations", "--scale", "tiny", "--output", tmp_path)
    page = (tmp_path / "observations.md").read_text()
    assert f"| f-DP(CP) | best on the same data | heuristic | {Kind.HEURISTIC.meaning} |" in page
    assert f"| f-DP(joint) | threshold 1/2 | confidence | {Kind.CONFIDENCE.meaning} |" in page
    assert "Scale tiny, seed 0" in page


def test_json_is_one_object_with_rows_tables_and_files(run: Any, tmp_path: Path) -> None:
    result = run("reproduce", "regions", "--scale", "tiny", "--output", tmp_path, "--json", "--seed", 3)
    values = json.loads(result.stdout)
    assert (values["name"], values["scale"], values["seed"]) == ("regions", "tiny", 3)
    assert len(values["files"]) == 4
    assert values["rows"]
    assert values["tables"][0]["header"] == ["", "paper", "here"]


def test_the_list_has_every_figure(run: Any) -> None:
    result = run("reproduce", "--list")
    assert all(any(line.startswith(figure.name) for line in result.stdout.splitlines()) for figure in FIGURES)
    values = json.loads(run("reproduce", "--list", "--json").stdout)
    assert [one["name"] for one in values["figures"]] == [figure.name for figure in FIGURES]


def test_mistakes_are_one_sentence(refused: Any, tmp_path: Path) -> None:
    assert refused("reproduce").startswith("The name of a figure is missing; list all with")
    assert refused("reproduce", "pdl") == "There is no figure or table 'pdl'. Did you mean 'pld'?"
    assert refused("reproduce", "pld", "--scale", "huge") == (
        "--scale must be 'tiny', 'cpu' or 'paper', got 'huge'."
    )
    assert refused("reproduce", "table1", "--embedded", "--data-dir", "here") == (
        "Pass either --data-dir or --embedded, which ignores here, not both."
    )
    negative = refused("reproduce", "regions", "--seed", "-1", "--output", tmp_path)
    assert negative.startswith("--seed must be at least 0, got -1.")
    for words in (("regions", "--output"), ("table1", "--data-dir")):
        assert refused("reproduce", *words, "~nobody-of-this-name/x") == (
            "~nobody-of-this-name/x names a home directory that does not exist."
        )


def test_missing_files_are_named_with_where_they_come_from(refused: Any, tmp_path: Path) -> None:
    for words, got in (((), ""), (("--data-dir", tmp_path), f", which are not in {tmp_path}")):
        text = refused("reproduce", "clipping-only", *words)
        assert text.startswith(
            f"clipping-only needs --data-dir with its official files{got}: cifar-10-batches-bin"
        )
        assert "https://www.cs.toronto.edu/~kriz/cifar.html" in text
        assert "--embedded" in text


def test_without_matplotlib_the_line_that_installs_it_comes_before_the_work(
    refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sentence = refused("reproduce", "regions", "--scale", "tiny", "--output", tmp_path / "out")
    assert sentence == "Plotting needs packages that are not installed: pip install matplotlib"
    assert not (tmp_path / "out").exists()


def test_all_goes_on_after_a_figure_that_cannot_be_made_and_names_it_at_the_end(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(reproduction.figure_named(name) for name in ("flagship", "regions", "thresholds"))
    monkeypatch.setattr(reproduction, "FIGURES", few)
    result = run("reproduce", "all", "--scale", "tiny", "--output", tmp_path, "--json")
    assert result.exit_code == 2
    assert [one["name"] for one in json.loads(result.stdout)["figures"]] == ["regions", "thresholds"]
    assert {path.stem for path in tmp_path.glob("*.csv")} == {"regions", "thresholds"}
    assert "flagship: flagship needs --data-dir with its official files" in result.stderr
    assert result.stderr.endswith("1 of 3 figures failed: flagship.\n")


@pytest.mark.long
def test_more_workers_write_the_same_data(run: Any, tmp_path: Path) -> None:
    for workers in (1, 2):
        words = "--scale", "tiny", "--output", tmp_path / str(workers), "--workers", workers
        result = run("reproduce", "thresholds", *words)
        assert result.exit_code == 0, result.output
    one, two = ((tmp_path / workers / "thresholds.csv").read_text() for workers in ("1", "2"))
    assert one == two
