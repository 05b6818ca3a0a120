"""The command line as a program."""

from __future__ import annotations

import json
import os
import re
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


SLOW = ("numpy", "scipy", "torch", "dp_accounting")


def test_the_version_is_printed_without_loading_a_library() -> None:
    names = (*SLOW, "typer", "rich")
    code = f"import sys; from dpaudit.cli import main; main(); print({{*{names!r}}} & {{*sys.modules}})"
    command = [sys.executable, "-c", code, "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == (f"dpaudit {dpaudit.__version__}\nset()\n", "")


@pytest.mark.parametrize(
    ("words", "completed"), [("dpaudit sc", "scores"), ("dpaudit plan --noi", "--noise")]
)
def test_completion_loads_no_library_for_numbers(words: str, completed: str) -> None:
    code = (
        "import atexit, sys; from dpaudit.cli import main; "
        f"atexit.register(lambda: print({{*{SLOW!r}}} & {{*sys.modules}})); main()"
    )
    asked = {"_DPAUDIT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(completed)
    assert done.stdout.endswith("set()\n")


def test_the_version_is_an_option_like_others(run: Any) -> None:
    assert run("--version").stdout == f"dpaudit {dpaudit.__version__}\n"


def test_without_arguments_it_shows_help(run: Any) -> None:
    result = run()
    assert result.exit_code == 0
    lines = [line.strip("│ ").split(maxsplit=1) for line in result.stdout.splitlines() if "│" in line]
    named = {words[0]: words[1] for words in lines if not words[0].startswith("-")}
    assert {"run", "scores", "check", "plan", "explain", "report", "verify", "demo", "zoo"} <= set(named)
    for command, sentence in named.items():
        assert sentence.endswith(".")  # in one line
        shown = run(command, "--help")
        assert shown.exit_code == 0
        assert not re.search(r"<\w+|\[x[<>]", shown.stdout)  # types as Python has them


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
