"""The same scores in every format give the same numbers."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpaudit
from dpaudit.cli._score_files import Columns, ScoreFiles
from dpaudit.stats._observations import is_on_disk

Way = Callable[[Any], list[object]]


def _lines(values: Any) -> list[str]:
    return [repr(float(value)) for value in values]


def _rows(files: Any, words: tuple[str, str]) -> list[str]:
    return [
        f"{float(score)!r},{words[int(present)]}"
        for score, present in zip(files.scores, files.presence, strict=True)
    ]


WAYS: dict[str, Way] = {
    "npy": lambda f: f.sides(),
    "npz sides": lambda f: [
        "--with", f.npz("w.npz", anything=f.present), "--without", f.npz("o.npz", score=f.absent, x=[1])
    ],
    "npz both": lambda f: [f.npz("t.npz", with_canary=f.present, without_canary=f.absent)],
    "npz presence": lambda f: [f.npz("t.npz", score=f.scores, present=f.presence)],
    "npz presence of bytes": lambda f: [
        f.npz("t.npz", score=f.scores, present=np.where(f.presence, b"True", b"0"))
    ],
    "npz other names": lambda f: [
        f.npz("t.npz", s=f.scores, p=f.presence.astype(float)),
        "--score-column", "s", "--presence-column", "p",
    ],
    "csv sides without a header": lambda f: [
        "--with", f.text("w.csv", *_lines(f.present)), "--without", f.text("o.csv", *_lines(f.absent))
    ],
    "csv sides with a header": lambda f: [
        "--with", f.text("w.csv", "loss", *_lines(f.present)),
        "--without", f.text("o.csv", "id,score", *(f"a,{line}" for line in _lines(f.absent))),
    ],
    "csv table": lambda f: [f.text("t.csv", "score,present", *_rows(f, ("0", "1")))],
    "csv table of words": lambda f: [f.text("t.csv", "score, present", "", *_rows(f, ("False", "TRUE")))],
    "csv table without a header": lambda f: [f.text("t.csv", *_rows(f, ("false", "true")))],
    "csv of a spreadsheet": lambda f: [f.text("t.csv", "\ufeffscore,present\r", *_rows(f, ("0", "1")))],
    "parquet sides": lambda f: [
        "--with", f.parquet("w.parquet", score=f.present), "--without", f.parquet("o.parquet", x=f.absent)
    ],
    "parquet table": lambda f: [f.parquet("t.parquet", score=f.scores, present=f.presence)],
    "parquet table of words": lambda f: [
        f.parquet("t.parquet", score=f.scores, present=np.where(f.presence, "True", "0"))
    ],
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_format_gives_the_same_counts(way: str, files: Any, run: Any) -> None:
    result = run("scores", *WAYS[way](files), "--threshold", "0.5", "--json")
    assert result.exit_code == 0, result.stderr
    counts = json.loads(result.stdout)["methods"][0]["counts"]
    assert counts == {
        "false_positives": int((files.absent > 0.5).sum()),
        "num_absent": 250,
        "false_negatives": int((files.present <= 0.5).sum()),
        "num_present": 300,
    }


@pytest.mark.parametrize("way", ["npz both", "npz presence", "csv table", "parquet table", "parquet sides"])
def test_packed_files_stay_on_disk(way: str, files: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small files taken for large ones, their scores are never in memory as a whole."""
    words = [
        "scores",
        *WAYS[way](files),
        "--normalized",
        "--noise-multiplier",
        "0.5",
        "--delta",
        "1e-5",
        "--json",
    ]
    whole = json.loads(run(*words).stdout)
    monkeypatch.setattr("dpaudit.cli._formats.PIECE", 64)
    monkeypatch.setattr("dpaudit.cli._score_files.PIECE", 64)
    monkeypatch.setattr("dpaudit.cli._formats._PARQUET_ROWS", 64)
    monkeypatch.setattr("dpaudit.methods._STREAMED", 10)
    monkeypatch.setattr(dpaudit.Observations, "in_memory", lambda _: pytest.fail("read into memory"))
    streamed = json.loads(run(*words).stdout)
    assert streamed["bound"] == whole["bound"]
    assert len(streamed["methods"]) < len(whole["methods"])


@pytest.mark.parametrize("way", ["npz presence", "csv table", "parquet table"])
def test_no_temporary_file_is_left(
    way: str, files: Any, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    assert run("scores", *WAYS[way](files), "--threshold", "0.5").exit_code == 0
    assert run("scores", *WAYS[way](files), "--threshold", "0.5", "--score-column", "no").exit_code == 2
    gc.collect()
    assert not list((tmp_path / "scratch").iterdir())


def test_whole_numbers_of_a_large_file_stay_on_disk(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpaudit.cli._formats.PIECE", 10)
    sides = [files.npy(name, np.arange(40).reshape(10, 4)) for name in ("w.npy", "o.npy")]
    observations = ScoreFiles(None, *map(Path, sides), Columns()).read(normalized=False)
    assert is_on_disk(observations.with_canary)
    assert observations.with_canary.tolist() == np.arange(40.0).reshape(10, 4).tolist()


def test_two_dimensional_arrays_are_steps_by_canaries(files: Any, run: Any) -> None:
    present, absent = files.present.reshape(50, 6), files.absent.reshape(50, 5)
    sides = ["--with", files.npy("w.npy", present), "--without", files.npy("o.npy", absent)]
    values = json.loads(run("scores", *sides, "--normalized", "--json").stdout)
    assert values["shapes"] == {"with_canary": [50, 6], "without_canary": [50, 5]}
    assert any("canaries in the same step" in text for text in values["methods"][0]["assumptions"])


def test_presence_of_steps_by_canaries_is_by_coins(files: Any, run: Any) -> None:
    rng = np.random.default_rng(3)
    present = rng.random((40, 20)) < 0.5
    table = files.npz("t.npz", score=present + 0.5 * rng.standard_normal((40, 20)), present=present)
    values = json.loads(run("scores", table, "--normalized", "--json").stdout)
    betting = next(row for row in values["methods"] if row["name"] == "f-DP(betting)")
    assert betting["counts"]["num_present"] == int(present.sum())


def written(files: Any, name: str, **columns: Any) -> Any:
    """A table in the format that its name says."""
    if name.endswith(".npz"):
        return files.npz(name, **columns)
    if name.endswith(".parquet"):
        return files.parquet(name, **columns)
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    return files.text(name, ",".join(columns), *(",".join(map(str, row)) for row in rows))


@pytest.mark.parametrize("kind", ["csv", "npz", "parquet"])
def test_a_table_of_presence_is_joined_by_identifiers(kind: str, files: Any, run: Any, refused: Any) -> None:
    ids, order = np.arange(550), np.random.default_rng(0).permutation(550)
    table = written(files, f"s.{kind}", id=ids, score=files.scores)
    presence = written(files, f"p.{kind}", id=ids[order], present=files.presence[order])
    options = ["--threshold", "0.5", "--json"]
    result = run("scores", table, "--presence", presence, "--id-column", "id", *options)
    assert result.exit_code == 0, result.output
    counts = json.loads(result.stdout)["methods"][0]["counts"]
    assert counts["false_positives"] == int((files.absent > 0.5).sum())
    assert counts["false_negatives"] == int((files.present <= 0.5).sum())
    fewer = written(files, f"f.{kind}", id=ids[1:], present=files.presence[1:])
    assert "Every canary with a score needs a presence flag; there is none for" in refused(
        "scores", table, "--presence", fewer, "--id-column", "id"
    )
    assert "--presence needs --id-column" in refused("scores", table, "--presence", presence)
    assert "has no column" in refused("scores", table, "--presence", presence, "--id-column", "name")


def test_an_identifier_that_occurs_twice_is_named(files: Any, refused: Any) -> None:
    table = files.text("t.csv", "id,score,present", "a,1.0,1", "b,0.5,0", "a,0.3,0")
    assert "ids must have each identifier once, got 'a' again" in refused(
        "scores", table, "--id-column", "id"
    )
    assert "need a TABLE" in refused("scores", *files.sides(), "--id-column", "id")
    both = ["--presence", files.npy("p.npy", [0, 1, 1]), "--id-column", "id"]
    assert ".npz table, or --with" in refused("scores", table, *both)


def test_a_constant_mask_is_refused_unless_it_is_declared_as_pairs(
    files: Any, run: Any, refused: Any
) -> None:
    present = np.tile([False, True], (100, 1))
    table = files.npz("t.npz", score=np.random.default_rng(0).normal(present), present=present)
    assert "the same canaries in every one of 100 steps" in refused("scores", table, "--normalized")
    values = json.loads(run("scores", table, "--normalized", "--paired", "--json").stdout)
    assert any("scored with and without it" in text for text in values["methods"][0]["assumptions"])


def test_parquet_without_pyarrow_gives_the_line_that_installs_it(
    files: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = files.parquet("t.parquet", score=files.scores, present=files.presence)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    sentence = refused("scores", table)
    assert sentence == "Reading .parquet files needs packages that are not installed: pip install pyarrow"
