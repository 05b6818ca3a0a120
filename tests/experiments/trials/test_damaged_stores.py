"""Stores of trials that were damaged, or are of somebody else: the same scores again, or refused."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from damage import damaged, examples
from hypothesis import given
from hypothesis import strategies as st
from test_trials_store import PLAN, finish

from dpaudit.errors import InputError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[float]]:
    """The bytes of a store, and the scores that are in it."""
    folder = tmp_path_factory.mktemp("whole")
    found = finish(PLAN, folder)
    return (folder / "trials.sqlite3").read_bytes(), found.observations.with_canary.tolist()


@examples(40)
@given(data=st.data())
def test_a_damaged_store_gives_the_same_scores_or_is_refused(
    whole: tuple[bytes, list[float]], data: st.DataObject, tmp_path: Path
) -> None:
    content, scores = whole
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "trials.sqlite3").write_bytes(data.draw(damaged(content)))
    try:
        found = finish(PLAN, tmp_path).observations.with_canary.tolist()
    except InputError:
        found = scores
    assert found == scores
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def _schema(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(";".join(statements))


def test_a_view_without_an_end_is_not_asked(whole: tuple[bytes, list[float]], tmp_path: Path) -> None:
    path = tmp_path / "trials.sqlite3"
    path.write_bytes(whole[0])
    columns = "n AS number, '' AS seed, 0 AS present, 0.5 AS score, 1.0 AS duration, '' AS host"
    endless = "WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c)"
    _schema(
        path,
        "DROP TABLE trials",
        f"CREATE VIEW trials AS {endless} SELECT {columns}, NULL AS error, '' AS checksum FROM c",
    )
    before = path.read_bytes()
    with pytest.raises(InputError, match="it has other tables"):
        finish(PLAN, tmp_path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "identity", ["NULL", "1", "x'ff'", "'" + "[" * 100_000 + "'", '\'{"a": 1' + "0" * 5000 + "}'"]
)
def test_words_about_a_run_that_are_none_are_refused(
    whole: tuple[bytes, list[float]], identity: str, tmp_path: Path
) -> None:
    path = tmp_path / "trials.sqlite3"
    path.write_bytes(whole[0])
    _schema(path, f"UPDATE OR IGNORE about SET identity = {identity}")
    if identity == "NULL":  # which the table itself refuses
        assert finish(PLAN, tmp_path).observations.with_canary.tolist() == whole[1]
        return
    with pytest.raises(InputError, match="Expected the trials of this run in"):
        finish(PLAN, tmp_path)
