"""Typical mistakes, each with its whole sentence: what is wrong, what is allowed, what to do."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import dpaudit
from dpaudit.errors import MissingExtraError

SOURCE = Path(dpaudit.__file__).parent
SCORES = [0.0, 0.1]


def _claim(**other: float) -> dpaudit.Claim:
    numbers = {"noise_multiplier": 1.0, "sample_rate": 0.1, "num_steps": 10, "delta": 1e-5, **other}
    return dpaudit.Claim.dpsgd(**numbers)  # type: ignore[arg-type]


def _observations(**other: object) -> dpaudit.Observations:
    return dpaudit.Observations(**{"with_canary": [1.0, 1.1], "without_canary": SCORES, **other})  # type: ignore[arg-type]


API: dict[str, tuple[Callable[[], object], str]] = {
    "noise": (lambda: _claim(noise_multiplier=-1), "noise_multiplier must be positive, got -1."),
    "rate": (lambda: _claim(sample_rate=64), "sample_rate must be above 0 and at most 1, got 64."),
    "steps": (lambda: _claim(num_steps=2.5), "num_steps must be a whole number, got 2.5."),
    "no steps": (lambda: _claim(num_steps=0), "num_steps must be at least 1, got 0."),
    "delta": (lambda: _claim(delta=1), "delta must be at least 0 and below 1, got 1."),
    "percentage": (
        lambda: dpaudit.audit(_observations(scores_of="step"), claim=_claim(), confidence=95),
        "confidence must be at least 0.5 and below 1, got 95. Did you mean 0.95?",
    ),
    "number as a claim": (
        lambda: dpaudit.audit(_observations(), claim=8.0),  # type: ignore[arg-type]
        "claim must be a Claim such as Claim.gaussian(...), got 8.0.",
    ),
    "misspelled": (
        lambda: _observations(scores_of="stpe"),
        "scores_of must be 'step', 'run' or 'one-run', got 'stpe'. Did you mean 'step'?",
    ),
    "not a number": (
        lambda: _observations(with_canary=[1.0, np.nan]),
        "Scores must be finite, got with_canary[1]=nan.",
    ),
    "nothing": (
        lambda: _observations(with_canary=[]),
        "with_canary must have at least one score, got shape (0,).",
    ),
}

COMMANDS: dict[str, tuple[list[str], str]] = {
    "noise": (
        ["--noise-multiplier", "-1", "--delta", "1e-5"],
        "--noise-multiplier must be positive, got -1.",
    ),
    "equals sign": (["--epsilon=-3", "--delta=1e-5"], "--epsilon must be at least 0, got -3."),
    "delta": (["--delta", "2"], "--delta must be at least 0 and below 1, got 2."),
    "percentage": (
        ["--confidence", "95"],
        "--confidence must be at least 0.5 and below 1, got 95. Did you mean 0.95?",
    ),
    "no delta": (
        ["--epsilon", "1"],
        "--delta is required with a claim: an epsilon is meaningless without it.",
    ),
    "half": (
        ["--noise-multiplier", "1", "--num-steps", "3"],
        "--sample-rate and --num-steps must be passed together, got only --num-steps.",
    ),
    "threshold": (["--threshold", "nan"], "--threshold must be finite, got nan."),
}


@pytest.mark.parametrize("mistake", API)
def test_a_mistake_in_python_has_this_sentence(mistake: str) -> None:
    call, sentence = API[mistake]
    with pytest.raises(dpaudit.InputError) as caught:
        call()
    assert str(caught.value) == sentence


def _told(folder: Path, *words: str) -> str:
    command = [sys.executable, "-c", "from dpaudit.cli import main; main()", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr.removeprefix("dpaudit: ").rstrip("\n")


@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_mistake_on_the_command_line_names_the_option(mistake: str, tmp_path: Path) -> None:
    options, sentence = COMMANDS[mistake]
    for name, scores in (("w.npy", [1.0, 1.1]), ("o.npy", SCORES)):
        np.save(tmp_path / name, scores)
    assert _told(tmp_path, "scores", "--with", "w.npy", "--without", "o.npy", *options) == sentence


def test_a_file_or_function_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def private_training(): ...\ndef broken(): ...\n")
    assert _told(tmp_path, "run", "nofile.toml") == "nofile.toml does not exist."
    assert _told(tmp_path, "check", "nofile.py:prepare") == "nofile.py does not exist."
    sentence = "mine.py has no function 'nofunc' (found: private_training, broken)."
    assert _told(tmp_path, "check", "mine.py:nofunc") == sentence


def test_no_message_begins_with_what_was_expected() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith("Expected "), f"{path}, line {node.lineno}"


def test_an_install_line_names_packages_that_an_index_has() -> None:
    assert "dpaudit" not in str(MissingExtraError("Training", "torch pydantic")).partition("pip install")[2]
    for path in sorted(SOURCE.rglob("*.py")):
        assert "pip install 'dpaudit" not in path.read_text(), path
