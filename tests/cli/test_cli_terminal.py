"""The same words wherever they go: a terminal, a pipe, a page without colours, a shell that completes."""

from __future__ import annotations

import io
import os
import pty
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpaudit.cli._console import print_table, slim_table

ENVIRONMENTS = {"plain": {}, "no colour": {"NO_COLOR": "1"}, "dumb": {"TERM": "dumb"}}
WIDTHS = (80, 120)
NARROW = (40, 50, 60, 100)


def _on_terminal(words: list[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run the program with its output on a terminal; gives its status and what the terminal got."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dpaudit", *words]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=os.environ | environment
    ) as process:
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except OSError:  # how Linux says that nobody writes any more
            pass
    os.close(ours)
    return process.returncode, shown.decode()


def test_help_groups_the_commands(run: Any) -> None:
    text = run("--help").stdout
    groups = (
        "Audit",
        "run",
        "scores",
        "check",
        "plan",
        "Results",
        "explain",
        "report",
        "verify",
        "Examples",
        "demo",
        "zoo",
        "Shell",
        "completion",
    )
    places = [text.index(f"─ {word} ─" if word[0].isupper() else f"│ {word} ") for word in groups]
    assert places == sorted(places)


@pytest.mark.parametrize("width", [WIDTHS[0], pytest.param(WIDTHS[1], marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["scores", "--help"],
        ["plan", "--noise-multiplier", "1", "--delta", "1e-5", "--noise-factor", "0.8"],
        ["scores"],
    ],
)
def test_lines_fit_and_have_no_colours_in_a_pipe(
    words: list[str], width: int, run: Any, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    sides = [*files.sides(), "--noise-multiplier", "2", "--delta", "1e-5"] if words == ["scores"] else []
    result = run(*words, *sides)
    assert result.exit_code in (0, 1), result.output
    assert "\x1b" not in result.output
    assert max(map(len, result.stdout.splitlines())) <= width


@pytest.mark.parametrize(
    ("noise_multiplier", "headline"),
    [("2", "▲ VIOLATION (privacy)   epsilon >= "), ("0.5", "○ NO VIOLATION FOUND   epsilon >= ")],
)
@pytest.mark.parametrize("width", [80, 200])
def test_a_verdict_is_on_the_first_of_a_few_lines(
    noise_multiplier: str, headline: str, width: int, files: Any, request: pytest.FixtureRequest
) -> None:
    run, monkeypatch = map(request.getfixturevalue, ("run", "monkeypatch"))
    monkeypatch.setenv("COLUMNS", str(width))
    words = ["scores", *files.sides(), "--noise-multiplier", noise_multiplier, "--delta", "1e-5"]
    lines = run(*words).stdout.splitlines()
    assert lines[0].startswith(headline)
    assert len(lines) <= 14
    assert max(map(len, lines)) <= min(width, 100)
    assert run(*words, "-q").stdout.splitlines() == lines[:1]
    details = run(*words, "-v").stdout.splitlines()
    assert details[0] == lines[0]
    assert len(details) > 30
    assert max(map(len, details)) <= min(width, 100)


def _numbers_and_kinds(text: str) -> Counter[str]:
    """The words of a page that must be whole."""
    return Counter(re.findall(r"\d[\d.,e+-]*\d|\d|confidence|credible|heuristic", text))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ["plan", "--noise-multiplier", "1", "--delta", "1e-5", "--noise-factor", "0.8"],
            marks=pytest.mark.long,
        ),
        ["plan", "--noise-multiplier", "1", "--delta", "1e-5", "--observations", "500"],
        ["scores"],
    ],
    ids=lambda words: words[0],
)
def test_a_narrow_page_cuts_no_number_and_no_kind(
    words: list[str], run: Any, files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = [*files.sides(), "--noise-multiplier", "2", "--delta", "1e-5"] if words == ["scores"] else []
    monkeypatch.chdir(files.folder)
    shown = {}
    for width in (200, *NARROW):
        monkeypatch.setenv("COLUMNS", str(width))
        shown[width] = run(*words, *more).stdout
    whole = _numbers_and_kinds(shown[200])
    for width in NARROW:
        assert "…" not in shown[width]
        assert whole <= _numbers_and_kinds(shown[width]), width


@pytest.mark.parametrize("width", [20, 30, 39, 40, 41])
def test_a_table_is_whole_or_becomes_a_block_for_each_row(width: int) -> None:
    table = slim_table("method", "threshold")
    for name in ("1,000", "10,000"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_row("f-DP(CP)", "best on the data", "0.31", "0.88")
    page = io.StringIO()
    print_table(Console(file=page, width=width), table)
    lines = page.getvalue().splitlines()
    if width < 8 + 16 + 5 + 6 + 3 * 2:
        assert lines[0] == "f-DP(CP)"
        assert lines[-1].split() == ["10,000", "0.88"]
    else:
        assert lines[-1].split() == ["f-DP(CP)", "best", "on", "the", "data", "0.31", "0.88"]
    assert max(map(len, lines)) <= width


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_verdict_has_colours_only_where_they_are_wanted(name: str, files: Any) -> None:
    claim = ["--noise-multiplier", "2", "--delta", "1e-5"]
    words = ["scores", *map(str, files.sides()), *claim]
    environment = {"TERM": "xterm-256color", "COLUMNS": "100", **ENVIRONMENTS[name]}
    status, shown = _on_terminal(words, files.folder, environment)
    assert status == 1
    assert "VIOLATION" in shown
    colours = [code for code in ("\x1b[31m", "\x1b[1;31m") if code in shown]
    assert bool(colours) == (name == "plain")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "No such command 'nothing'."),
        (["scores", "--nothing"], "There is no option --nothing."),
        (["scores", "--confidence", "high"], "--confidence must be a number, got high."),
        (["scores", "--confidence"], "--confidence"),
        (["report"], "Missing argument 'RUN'."),
        (["plan", "1"], "There are too many arguments: (1)."),
        (["zoo", "--seed", "-1"], "--seed must be at least 0, got -1."),
        (["completion", "tcsh"], "'tcsh' is not one of 'bash', 'zsh', 'fish'."),
        (["--nothing"], "There is no option --nothing."),
        (["report", "."], ". is not a finished run: it has no result.json."),
        (["run", "none.toml"], "none.toml does not exist."),
        (
            ["report", "~nobody-of-this-name/x"],
            "~nobody-of-this-name/x names a home directory that does not exist.",
        ),
        (
            ["plan", "--epsilon", "1", "--delta", "1e-5", "--observations", "1" + "0" * 30],
            "num_steps must be at most 250,000,000, got 1000000000000000000000000000000",
        ),
        (["scores", "."], "is a directory"),
        (["demo", "--output", "/dev/null"], "Cannot write /dev/null"),
    ],
)
def test_wrong_usage_is_one_sentence(words: list[str], sentence: str, run: Any) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    line = result.stderr.splitlines()[-1]
    assert line.startswith("dpaudit: ")
    assert sentence in line
    assert [one for one in result.stderr.splitlines() if one.startswith("dpaudit: ")] == [line]


def test_an_option_without_its_value_is_told_with_the_help_of_its_command(run: Any) -> None:
    line = run("run", "--example").stderr
    assert "--example needs a value. Print an example config: digits, " in line
    assert line.endswith("black-box-function. See: root run --help\n")  # so is it called in a test
    assert run("scores", "--confidence").stderr.endswith(" See: root scores --help\n")


def test_a_full_disk_behind_standard_output_is_no_verdict(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dpaudit", "--version"],
            stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    assert "Cannot read or write standard output: No space left on device; " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, run: Any) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_DPAUDIT_COMPLETE" in result.stdout


BASH = """
source <(dpaudit completion bash)
complete -p dpaudit
ask() { COMP_WORDS=(dpaudit "$@"); COMP_CWORD=$#; _dpaudit_completion dpaudit; echo "${COMPREPLY[*]}"; }
ask sc
ask scores --noi
ask completion z
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completes_commands_options_and_values(tmp_path: Path) -> None:
    program = tmp_path / "dpaudit"
    program.write_text(f"#!{sys.executable}\nfrom dpaudit.cli import main\n\nmain()\n")
    program.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", BASH],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "complete -o default -F _dpaudit_completion dpaudit",
        "scores",
        "--noise-multiplier",
        "zsh",
    ]


def _in_pipe(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dpaudit", *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )


def test_every_character_can_be_printed_in_ascii(tmp_path: Path) -> None:
    (tmp_path / "\u00e9").mkdir()
    done = _in_pipe(["verify", "\u00e9"], tmp_path, PYTHONIOENCODING="ascii:strict")
    assert done.returncode == 2, done.stderr
    assert r"\xe9: " in done.stdout


def test_a_terminal_of_no_columns_shows_the_help(tmp_path: Path) -> None:
    done = _in_pipe(["--help"], tmp_path, COLUMNS="0")
    assert done.returncode == 0
    assert "Examples" in done.stdout
