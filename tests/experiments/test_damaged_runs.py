"""The directory of a run, damaged: the run goes on, or says in a sentence what is wrong."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import altered, damaged, examples, forged
from digits_config import digits_config
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dpaudit.cli._app import app
from dpaudit.errors import InputError
from dpaudit.experiments import Config, load_config, run

AUDIT = 'num_canaries = 4\nmethods = ["f-DP(CP)"]'


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a config and its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "c.toml").write_text(
        digits_config(folder / "run", hidden=4, num_examples=100, num_steps=2, audit=AUDIT)
    )
    run(load_config(folder / "c.toml"))
    shutil.copytree(folder / "run", folder / "kept")
    return folder


@pytest.fixture
def again(finished: Path) -> Callable[[], Path]:
    """The directory as the run left it."""

    def put_back() -> Path:
        shutil.rmtree(finished / "run")
        return Path(shutil.copytree(finished / "kept", finished / "run"))

    return put_back


def _config(finished: Path) -> Config:
    return load_config(finished / "c.toml")


def _shown(finished: Path) -> Any:
    found = CliRunner().invoke(app, ["run", str(finished / "c.toml")], env={"DPAUDIT_ENVIRONMENT": "set"})
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert "\x1b" not in found.output
    return found


@pytest.mark.parametrize("name", ["result.json", "config.json"])
@examples(40)
@given(data=st.data())
def test_strange_values_are_shown_or_refused(
    name: str, data: st.DataObject, again: Callable[[], Path], finished: Path
) -> None:
    path = again() / name
    path.write_text(json.dumps(data.draw(altered(json.loads(path.read_text())))))
    forged(path.parent)
    found = _shown(finished)
    if found.exit_code == 2:
        assert found.stdout == ""
        said = found.stderr.splitlines()[-1]
        assert said.startswith(("dpaudit: Expected ", "dpaudit: The observations in "))


def test_a_result_that_was_changed_is_not_shown_in_part(again: Callable[[], Path], finished: Path) -> None:
    path = again() / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "timing": None}))
    forged(path.parent)
    found = _shown(finished)
    assert (found.exit_code, found.stdout) == (2, "")
    assert (
        "result.json, but it is damaged; delete it and run the same command again to recreate it."
        in found.stderr
    )
    path.unlink()
    assert _shown(finished).exit_code in (0, 1, 3)
    assert json.loads(path.read_text())["timing"] is not None


def _with_pickle(path: Path, content: bytes) -> None:
    """The same checkpoint with another list of what is in it, and right checksums."""
    with zipfile.ZipFile(path) as file:
        members = {one: file.read(one) for one in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, kept in members.items():
            file.writestr(name, content if name.endswith("data.pkl") else kept)
    forged(path.parent)


@examples(25)
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_goes_on(
    data: st.DataObject, again: Callable[[], Path], finished: Path
) -> None:
    folder = again()
    (folder / "result.json").unlink()
    path = folder / "checkpoint.pt"
    with zipfile.ZipFile(path) as file:
        [name] = [one for one in file.namelist() if one.endswith("data.pkl")]
        content = file.read(name)
    _with_pickle(path, data.draw(damaged(content)))
    try:
        found: object = run(_config(finished)).values["verdict"]
    except InputError as error:
        found = str(error)
    assert isinstance(found, str)


class _Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def _saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("dump", [pickle.dumps, _saved])
def test_a_pickled_checkpoint_is_refused_and_not_run(
    dump: Callable[[object], bytes], again: Callable[[], Path], finished: Path, tmp_path: Path
) -> None:
    folder = again()
    (folder / "result.json").unlink()
    (folder / "checkpoint.pt").write_bytes(dump({"training": _Harmful(tmp_path / "harm"), "seconds": 1.0}))
    forged(folder)
    with pytest.raises(InputError, match="Expected an intact checkpoint in"):
        run(_config(finished))
    assert not (tmp_path / "harm").exists()


def test_a_packed_checkpoint_is_refused_before_it_is_unpacked(
    again: Callable[[], Path], finished: Path
) -> None:
    folder = again()
    (folder / "result.json").unlink()
    with zipfile.ZipFile(folder / "checkpoint.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/0", b"\0" * 10_000_000)
    forged(folder)
    with pytest.raises(InputError, match="Expected an intact checkpoint in"):
        run(_config(finished))
