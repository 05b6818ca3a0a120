"""A report of a directory that anybody wrote: a page, or a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from damage import altered, damaged, examples, forged
from hypothesis import given
from hypothesis import strategies as st

from dpaudit.errors import InputError
from dpaudit.report import Format, Report


def _fresh(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a correct run, in the place of the last one."""
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    return Path(shutil.copytree(runs["correct"], tmp_path / "run"))


def _made(folder: Path) -> list[str]:
    """The texts of a report, or the one sentence that refuses it."""
    try:
        report = Report.read([folder])
        return [report.to_text(one) for one in Format]
    except InputError as error:
        return [str(error)]


@pytest.mark.parametrize("name", ["result.json", "config.json", "provenance.json"])
@examples(25)
@given(data=st.data())
def test_strange_values_become_a_page_or_a_sentence(
    name: str, data: st.DataObject, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = _fresh(runs, tmp_path)
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data.draw(altered(values))))
    made = _made(forged(folder))
    assert not any("\x1b" in text for text in made)
    assert len(made) == len(Format) or made[0].endswith(".")


@pytest.mark.parametrize("name", ["result.json", "scores.npy", "present.npy"])
@examples(25)
@given(data=st.data())
@pytest.mark.filterwarnings("ignore")  # of numpy, about headers of Python 2
def test_damaged_files_become_a_page_or_a_sentence(
    name: str, data: st.DataObject, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = _fresh(runs, tmp_path)
    (folder / name).write_bytes(data.draw(damaged((folder / name).read_bytes())))
    assert all(_made(forged(folder)))
