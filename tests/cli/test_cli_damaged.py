"""Files of scores of anybody: read, or refused in a sentence, and never with more memory than they need."""

from __future__ import annotations

import io
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import damaged, examples
from hypothesis import given
from hypothesis import strategies as st

from dpaudit.cli._score_files import Columns, ScoreFiles
from dpaudit.errors import InputError
from dpaudit.stats import Observations

SCORES = np.random.default_rng(1).normal(size=30)
PRESENT = np.arange(30) % 2 == 0


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def _npz(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, score=SCORES, present=PRESENT)
    return file.getvalue()


def _csv() -> bytes:
    rows = [f"{score!r},{int(present)}" for score, present in zip(SCORES.tolist(), PRESENT, strict=True)]
    return "\n".join(["score,present", *rows, ""]).encode()


def _parquet() -> bytes:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet  # noqa: PLC0415

    file = io.BytesIO()
    words = ["true" if present else "false" for present in PRESENT]
    parquet.write_table(arrow.table({"score": SCORES, "present": words}), file)
    return file.getvalue()


def _npy_that_claims(shape: str, kind: str = "<f8", content: bytes = b"") -> bytes:
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def _read_or_refuse(path: Path) -> None:
    """What must hold of any content."""
    source = ScoreFiles(path, None, None, Columns())
    if path.suffix == ".npy":
        other = Path(shutil.copy(path, path.with_name(f"other-{path.name}")))
        source = ScoreFiles(None, path, other, Columns())
    try:
        found: object = source.read(normalized=False)
    except InputError as error:
        found = str(error)
    if isinstance(found, str):
        assert found.endswith(".")
        assert len(found) < 1000
        assert "\n" not in found
    else:
        assert isinstance(found, Observations)


CONTENTS: dict[str, Callable[[], bytes]] = {
    "float64.npy": lambda: _npy(SCORES),
    "int32.npy": lambda: _npy(np.arange(20, dtype=np.int32).reshape(4, 5)),
    "stored.npz": lambda: _npz(np.savez),
    "packed.npz": lambda: _npz(np.savez_compressed),
    "table.csv": _csv,
    "table.parquet": _parquet,
}


@pytest.mark.parametrize("name", CONTENTS)
@examples(60)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")  # of numpy, about headers of Python 2
def test_a_damaged_file_is_read_or_refused(name: str, data: st.DataObject, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data.draw(damaged(CONTENTS[name]())))
    _read_or_refuse(path)


@examples(60)
@given(text=st.text(alphabet='0123456789.,-eE+"\n\r \tnaif_truesco\x00\ufeff', max_size=60))
def test_any_text_is_read_as_a_table_or_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, newline="")
    _read_or_refuse(path)


def _zip(folder: Path, **arrays: bytes) -> Path:
    with zipfile.ZipFile(folder / "t.npz", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in arrays.items():
            file.writestr(f"{name}.npy", content)
    return folder / "t.npz"


def _file(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "t.csv")
    return folder / "t.csv"


THREE = _npy(np.array([0.1, 0.2, 0.3]))
HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "npy of a terabyte": (lambda f: _file(f, "t.npy", _npy_that_claims(f"({10**12},)")), "is truncated"),
    "npy beyond counting": (lambda f: _file(f, "t.npy", _npy_that_claims(f"({10**30},)")), "is truncated"),
    "npy of less than nothing": (
        lambda f: _file(f, "t.npy", _npy_that_claims("(-1,)", "<f8", b"\0" * 80)),
        "is truncated",
    ),
    "npy of nothings": (
        lambda f: _file(f, "t.npy", _npy_that_claims(f"({10**12},)", "|S0")),
        "--with must be numbers, got an array of type",
    ),
    "npy with a deep header": (lambda f: _file(f, "t.npy", _npy_that_claims("(" * 3000)), "is truncated"),
    "npy with an open header": (lambda f: _file(f, "t.npy", _npy_that_claims("((1,")), "is truncated"),
    "npz of nothings": (
        lambda f: _zip(f, score=THREE, present=_npy_that_claims("(9,)", "|S0")),
        "is an array of empty values",
    ),
    "npz of something else": (lambda f: _zip(f, score=THREE, present=b"1"), "'present' in"),
    "npz with a pickle": (
        lambda f: _zip(f, score=THREE, present=_npy_that_claims("(1,)", "|O")),
        "pickled Python",
    ),
    "csv of one line": (
        lambda f: _file(f, "t.csv", b"1" * 1_100_000),
        "has a line of more than 1,000,000 characters or a row of more than 1,000 lines",
    ),
    "csv of one row": (
        lambda f: _file(f, "t.csv", b"score,present\n" + b'"\n",' * 1_100),
        "has a line of more than 1,000,000 characters or a row of more than 1,000 lines",
    ),
    "csv of one cell": (
        lambda f: _file(f, "t.csv", b'score,present\n"' + b"a\n" * 90_000),
        "has a line of more than|larger than",
    ),
    "csv of a long word": (
        lambda f: _file(f, "t.csv", b"score,present\n" + b"x" * 9999 + b",1\n"),
        r"x\.\.\.'",
    ),
    "csv of many names": (lambda f: _file(f, "t.csv", b"a," * 9999 + b"\n"), "and 9,990 more"),
    "pipe": (_pipe, "is not a regular file"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_made_to_hurt_is_refused_and_takes_no_memory(
    name: str, refused: Any, tmp_path: Path
) -> None:
    make, sentence = HOSTILE[name]
    path = make(tmp_path)
    words = ["--with", path, "--without", path] if path.suffix == ".npy" else [path]
    tracemalloc.start()
    try:
        found = refused("scores", *words)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert any(part in found for part in sentence.replace("\\", "").split("|"))
    assert most < 50_000_000


def test_a_packed_array_that_is_too_large_is_not_unpacked(
    refused: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpaudit._io.LARGEST_ARRAY", 1_000)
    path = _zip(tmp_path, score=_npy(np.zeros(2_000)), present=_npy(np.zeros(2_000, dtype=np.bool_)))
    assert "contains arrays of 2,128 bytes in all; at most 1,000 are unpacked. A .npy" in refused(
        "scores", path
    )


FLIPS = """
import sys
from pathlib import Path
from dpaudit.cli._score_files import Columns, ScoreFiles
from dpaudit.errors import InputError
path, first, spacing = Path(sys.argv[1]), *map(int, sys.argv[2:])
content = path.read_bytes()
for bit in range(first, 8 * len(content), spacing):
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    path.write_bytes(flipped)
    try:
        ScoreFiles(path, None, None, Columns()).read(normalized=False)
    except InputError:
        pass
"""


@pytest.mark.parametrize("name", ["packed.npz", "table.parquet"])
def test_no_flipped_bit_ends_the_process(name: str, tmp_path: Path) -> None:
    """Three of these bits of the parquet file make pyarrow end a process that reads the sizes of columns."""
    path = tmp_path / name
    path.write_bytes(CONTENTS[name]())
    command = [sys.executable, "-c", FLIPS, str(path), "4", "23"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("column", [[[1.0], [2.0]], [{"a": 1.0}, {"a": 2.0}], ["a", "b"]])
def test_a_parquet_column_that_holds_no_numbers_is_refused(column: Any, files: Any, refused: Any) -> None:
    path = files.parquet("t.parquet", score=column, present=[True, False])
    assert "Column 'score' of" in refused("scores", path)


def test_a_sentence_that_quotes_a_file_cannot_move_the_cursor(files: Any, run: Any) -> None:
    odd = files.text("a\x1b[2Jb.csv", "score,present", "1,1", "\x1b[2J,0")
    result = run("scores", odd)
    assert result.exit_code == 2
    assert "\x1b" not in result.stderr
