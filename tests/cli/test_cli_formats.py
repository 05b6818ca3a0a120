"""The same scores in every format give the same numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

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


def test_parquet_without_pyarrow_gives_the_line_that_installs_it(
    files: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = files.parquet("t.parquet", score=files.scores, present=files.presence)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    sentence = refused("scores", table)
    assert (
        sentence == "Reading .parquet files requires an optional dependency: pip install 'dpaudit[parquet]'"
    )
