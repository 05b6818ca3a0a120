"""Every mistake is one sentence on standard error, with exit status 2."""

from __future__ import annotations

import os
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Words = Callable[[Any], list[object]]

DPSGD = ["--noise-multiplier", "2", "--sample-rate", "0.1", "--num-steps", "10", "--delta", "1e-5"]


def _sides(files: Any, present: Any, absent: Any = (0.0, 0.1)) -> list[object]:
    return ["--with", files.npy("w.npy", present), "--without", files.npy("o.npy", absent)]


def _with(files: Any, path: Path) -> list[object]:
    return ["--with", path, "--without", files.npy("o.npy", [0.0, 0.1])]


def _cut(path: Path, size: int) -> Path:
    path.write_bytes(path.read_bytes()[:size])
    return path


def _bytes(files: Any, name: str, content: bytes) -> Path:
    (files.folder / name).write_bytes(content)
    return files.folder / name


def _twice(files: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # noqa: PLC0415

    columns = [arrow.array([1.0, 2.0]), arrow.array([True, False]), arrow.array([False, True])]
    path: Path = files.folder / "t.parquet"
    parquet.write_table(arrow.table(columns, names=["score", "present", "present"]), path)
    return path


def _two_members(files: Any) -> Path:
    path: Path = files.npz("t.npz", score=[1.0, 2.0], present=[0, 1])
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr("score.npy", archive.read("score.npy"))
    return path


FILES: dict[str, tuple[Words, str]] = {
    "nothing": (lambda _: [], "either a TABLE or both --with and --without, got neither"),
    "one side": (lambda f: _sides(f, [1.0])[:2], "both --with and --without, got --with"),
    "table and side": (lambda f: [f.text("t.csv", "1,1"), *_sides(f, [1.0])], "got TABLE and --with"),
    "missing": (lambda f: [f.folder / "no.csv"], "does not exist"),
    "directory": (lambda f: [f.folder], "is a directory"),
    "suffix": (lambda f: [f.text("t.txt", "1")], "has an unknown format; pass a .npy"),
    "npy table": (lambda f: [f.npy("t.npy", [1.0])], "a .csv, .parquet or .npz table"),
    "nan": (lambda f: _sides(f, [1.0, np.nan]), "Scores must be finite, got with_canary[1]=nan."),
    "inf": (lambda f: [*_sides(f, [1.0], [np.inf]), "--threshold", "0"], "got without_canary[0]=inf"),
    "empty array": (lambda f: _sides(f, []), "--with must have at least one score, got shape (0,)"),
    "scalar": (lambda f: _sides(f, 1.0), "one-dimensional or steps x canaries, got shape ()"),
    "three dimensions": (lambda f: _sides(f, np.ones((2, 2, 2))), "got shape (2, 2, 2)"),
    "shapes": (lambda f: _sides(f, np.ones((3, 2))), "got shapes (3, 2) and"),
    "words array": (lambda f: _sides(f, ["a", "b"]), "--with must be numbers, got an array of type <U1"),
    "pickle": (lambda f: _sides(f, np.array([None])), "pickled Python objects, which are not read"),
    "cut npy": (lambda f: _with(f, _cut(f.npy("w.npy", np.ones(99)), 300)), "is truncated"),
    "cut header": (lambda f: _with(f, _cut(f.npy("w.npy", [1.0]), 20)), "is truncated"),
    "no npy": (lambda f: _with(f, _bytes(f, "w.npy", b"1\n2\n")), "is not a .npy file, despite its name"),
    "nothing npy": (lambda f: _with(f, _bytes(f, "w.npy", b"")), "is not a .npy file"),
    "no npz": (lambda f: [_bytes(f, "t.npz", b"junk")], "is not an .npz file"),
    "cut npz": (lambda f: [_cut(f.npz("t.npz", score=np.ones(99)), 300)], "is truncated or damaged"),
    "npz names": (
        lambda f: [f.npz("t.npz", a=[1.0], b=[1])],
        "has no column 'score'",
    ),
    "npz side": (lambda f: _with(f, f.npz("w.npz", a=[1], b=[1])), "has no column 'score'"),
    "npz pickle": (
        lambda f: [f.npz("t.npz", with_canary=np.array([None]), without_canary=[1.0])],
        "pickled Python objects",
    ),
    "npz presence": (lambda f: [f.npz("t.npz", score=[1.0, 2.0], present=[0, 2])], "got '2' in row 2"),
    "npz shapes": (lambda f: [f.npz("t.npz", score=[1.0, 2.0], present=[0])], "scores, (2,), got (1,)"),
    "all present": (lambda f: [f.text("t.csv", "1,1", "2,1")], "No score has the canary absent"),
    "word": (lambda f: [f.text("t.csv", "score,present", "1.5,1", "abc,0")], "got 'abc'"),
    "word in a side": (
        lambda f: _with(f, f.text("w.csv", "1", "2", "x y")),
        "got 'x y'",
    ),
    "nan in csv": (lambda f: [f.text("t.csv", "1,1", "nan,0")], "must have a finite number"),
    "underscore": (lambda f: [f.text("t.csv", "1,1", "1.234_1,0")], "got '1.234_1'"),
    "underscore first": (lambda f: _with(f, f.text("w.csv", "1.234_1", "1.5")), "got '1.234_1'"),
    "other digits": (lambda f: [f.text("t.csv", "1,1", "\uff11.\uff15,0")], "must have a finite number"),
    "columns of one name": (
        lambda f: [f.text("t.csv", "score,present,score", "1,1,5", "2,0,6")],
        "has 2 columns 'score'",
    ),
    "parquet columns of one name": (lambda f: [_twice(f)], "has 2 columns 'present'"),
    "npz arrays of one name": (lambda f: [_two_members(f)], "has 2 columns 'score'"),
    "one column for both": (
        lambda f: [f.text("t.csv", "a", "1"), "--score-column", "a", "--presence-column", "a"],
        "must be different, got 'a', 'a'",
    ),
    "one file for both": (
        lambda f: [*_sides(f, [1.0])[:2], "--without", f.folder / ".." / f.folder.name / "w.npy"],
        "both --with and --without the canary",
    ),
    "presence word": (lambda f: [f.text("t.csv", "score,present", "1,maybe")], "got 'maybe'"),
    "short line": (lambda f: [f.text("t.csv", "1,1", "2")], "must have at least 2 columns, got 1"),
    "empty csv": (lambda f: [_bytes(f, "t.csv", b"")], "is empty"),
    "only header": (lambda f: [f.text("t.csv", "score,present")], "contains no scores"),
    "three columns": (lambda f: [f.text("t.csv", "1,1,1")], "(found: 3 columns without a header)"),
    "two columns a side": (
        lambda f: _with(f, f.text("w.csv", "1,1")),
        "(found: 2 columns without a header)",
    ),
    "semicolons": (
        lambda f: [f.text("t.csv", "score;present", "1.5;1", "0.5;0")],
        "got semicolons in 'score;present'.",
    ),
    "semicolons and decimal commas": (
        lambda f: [f.text("t.csv", "score;present", "1,5;1")],
        "got semicolons in 'score;present'.",
    ),
    "semicolons without a header": (lambda f: [f.text("t.csv", "1;1", "2;0")], "got semicolons in '1;1'."),
    "tabs": (lambda f: _with(f, f.text("w.csv", "score\tnote", "1\tx")), "must be separated by commas"),
    "no column": (lambda f: [f.text("t.csv", "a,b", "1,1")], "has no column 'score'"),
    "no presence": (lambda f: [f.text("t.csv", "score,b", "1,1")], "has no column 'present'"),
    "binary csv": (lambda f: [_bytes(f, "t.csv", b"\xff\xfe1,1")], "is not comma-separated text"),
    "no parquet": (lambda f: [_bytes(f, "t.parquet", b"junk")], "is not a .parquet file"),
    "parquet column": (lambda f: [f.parquet("t.parquet", a=[1.0])], "has no column 'score'"),
    "parquet null": (
        lambda f: [f.parquet("t.parquet", score=[1.0, None], present=[0, 1])],
        "1 rows of column 'score'",
    ),
}  # fmt: skip

OPTIONS: dict[str, tuple[list[str], str]] = {
    "confidence": (["--confidence", "1.2"], "--confidence must be at least 0.5 and below 1, got 1.2."),
    "delta": (["--delta", "-1"], "--delta must be at least 0 and below 1, got -1."),
    "threshold": (["--threshold", "nan"], "--threshold must be finite, got nan."),
    "epsilon with steps": (["--epsilon", "1", "--num-steps", "3"], "--num-steps needs --noise-multiplier"),
    "epsilon of noise": (
        ["--epsilon", "0", "--noise-multiplier", "1", "--delta", "0.1"],
        "--epsilon must be positive, got 0.",
    ),
    "no noise": (["--sample-rate", "0.1", "--delta", "0.1"], "--sample-rate needs --noise-multiplier"),
    "half": (["--noise-multiplier", "1", "--num-steps", "3"], "together, got only --num-steps"),
    "no delta": (["--noise-multiplier", "1"], "--delta is required with a claim"),
    "per step": (["--per-step"], "--per-step needs a DP-SGD claim"),
    "end to end": (["--end-to-end"], "--end-to-end needs a DP-SGD claim"),
    "epsilon": (["--epsilon", "-3", "--delta", "0.1"], "--epsilon must be at least 0, got -3."),
    "noise": (["--noise-multiplier", "0", "--delta", "0.1"], "--noise-multiplier must be positive, got 0."),
    "rate": ([*DPSGD[:3], "1.5", *DPSGD[4:]], "--sample-rate must be above 0 and at most 1, got 1.5."),
    "steps": ([*DPSGD[:5], "0", *DPSGD[6:]], "--num-steps must be at least 1, got 0."),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_file_that_cannot_be_used_is_named(mistake: str, files: Any, refused: Any) -> None:
    words, expected = FILES[mistake]
    assert expected in refused("scores", *words(files))


@pytest.mark.parametrize("mistake", OPTIONS)
def test_an_option_that_cannot_be_used_is_named(mistake: str, files: Any, refused: Any) -> None:
    words, expected = OPTIONS[mistake]
    assert expected in refused("scores", *files.sides(), *words)
    assert expected in refused("scores", *files.sides(), *words, "--json")


def test_an_unreadable_file_is_named(files: Any, refused: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    table = files.text("t.csv", "1,1", "2,0")

    opened = os.open

    def forbid(path: Any, *more: Any, **options: Any) -> int:
        if path == table:
            raise PermissionError(13, "Permission denied")
        return opened(path, *more, **options)

    monkeypatch.setattr(os, "open", forbid)
    assert refused("scores", table) == f"Cannot read {table}: Permission denied."
