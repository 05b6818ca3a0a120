"""The command line as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dpaudit

Program = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Run ``python -m dpaudit`` in an empty folder."""

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dpaudit", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)

    return call


def test_the_version_is_printed_without_loading_scipy() -> None:
    code = "import sys; from dpaudit.cli import main; main(); print('scipy' in sys.modules)"
    command = [sys.executable, "-c", code, "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"dpaudit {dpaudit.__version__}\nFalse\n", "")


def test_the_version_is_an_option_like_others(run: Any) -> None:
    assert run("--version").stdout == f"dpaudit {dpaudit.__version__}\n"


def test_without_arguments_it_shows_help(run: Any) -> None:
    result = run()
    assert result.exit_code == 0
    for command in ("run", "scores", "plan", "zoo", "demo"):
        assert command in result.stdout
        assert run(command, "--help").exit_code == 0


def test_a_violation_is_status_1(program: Program, files: Any) -> None:
    result = program("scores", *files.sides(), "--noise-multiplier", "2", "--delta", "1e-5", "--json")
    assert result.returncode == 1
    assert result.stderr == ""
    assert json.loads(result.stdout)["verdict"] == "VIOLATION"


def test_an_interrupt_while_starting_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpaudit.cli import main  # noqa: PLC0415

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpaudit.cli._app.app", interrupt)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
