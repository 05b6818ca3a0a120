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


def test_an_unknown_command_is_a_usage_error(run: Any) -> None:
    result = run("score")
    assert result.exit_code == 2
    assert "score" in result.stderr


def test_a_violation_is_status_1(program: Program, files: Any) -> None:
    result = program("scores", *files.sides(), "--noise-multiplier", "2", "--delta", "1e-5", "--json")
    assert result.returncode == 1
    assert result.stderr == ""
    assert json.loads(result.stdout)["verdict"] == "VIOLATION"


def test_a_mistake_has_no_traceback(program: Program) -> None:
    result = program("scores", "missing.csv", "--json")
    assert result.returncode == 2
    sentence = "Expected a .npy, .npz, .csv or .parquet file, but missing.csv does not exist."
    assert json.loads(result.stdout) == {"error": sentence, "exit_status": 2}
    assert result.stderr == f"dpaudit: {sentence}\n"


def test_a_reader_that_leaves_is_no_violation(tmp_path: Path, files: Any) -> None:
    words = map(str, files.sides())
    command = [sys.executable, "-m", "dpaudit", "scores", *words, "--threshold", "0.5"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_an_interrupt_is_quiet(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpaudit.cli._demo_command.demonstrate", interrupt)
    result = run("demo", "--output", tmp_path, "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["error"] in result.stderr
    assert "Traceback" not in result.stderr


def test_an_interrupt_while_starting_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpaudit.cli import main  # noqa: PLC0415

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpaudit.cli._app.app", interrupt)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130


def test_importing_dpaudit_loads_neither_typer_nor_an_accountant() -> None:
    code = "import dpaudit, sys; print([m for m in ('typer', 'rich', 'dp_accounting') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
