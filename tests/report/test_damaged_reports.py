"""A report of a directory that anybody wrote: a page, or a sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from damage import altered, as_before_seals, damaged, examples
from hypothesis import given
from hypothesis import strategies as st

from dpaudit.errors import InputError
from dpaudit.report import Format, Report


def _without_accountant(values: dict[str, Any]) -> dict[str, Any]:
    """Without what the claim is accounted from again: that takes seconds for every other setting."""
    return {key: value for key, value in values.items() if key != "noise_multiplier"}


def _fresh(runs: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a correct run, in the place of the last one."""
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    folder = as_before_seals(Path(shutil.copytree(runs["correct"], tmp_path / "run")))
    (folder / "versions.json").write_text('{"dpaudit": "0.1.0", "python": "3.11.7"}')
    result = folder / "result.json"
    result.write_text(json.dumps(_without_accountant(json.loads(result.read_text()))))
    return folder


def _made(folder: Path) -> list[str]:
    """The texts of a report, or the one sentence that refuses it."""
    try:
        report = Report.read([folder])
        return [report.to_text(one) for one in Format]
    except InputError as error:
        return [str(error)]


@pytest.mark.parametrize("name", ["result.json", "config.json", "versions.json"])
@examples(25)
@given(data=st.data())
def test_strange_values_become_a_page_or_a_sentence(
    name: str, data: st.DataObject, runs: dict[str, Path], tmp_path: Path
) -> None:
    folder = _fresh(runs, tmp_path)
    values = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(data.draw(altered(values))))
    made = _made(folder)
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
    assert all(_made(folder))


def test_json_that_is_too_deep_is_refused(copied: Any) -> None:
    folder = copied()
    (folder / "result.json").write_text("[" * 100_000)
    assert _made(folder)[0].startswith(f"Expected JSON in {folder / 'result.json'}, but it cannot be read")
