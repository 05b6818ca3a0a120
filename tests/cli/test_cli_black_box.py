"""``dpaudit run`` of many models as a program: killed, interrupted, called again; and what it says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Without noise there is no curve of the accountant to wait for.
TINY = """
output = "{output}"
seed = 3
threat_model = "black-box"
pool = {{kind = "processes", num_workers = 1}}

[model]
name = "logistic-regression"

[data]
name = "digits"
num_examples = 300

[training]
noise_multiplier = 0
sample_rate = 0.5
num_steps = 100

[audit]
num_models = 240
methods = []
"""
SHORT = ["--set", "audit.num_models=48", "--set", "training.num_steps=3", "--set", "pool=serial"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(TINY.format(output=tmp_path / "run"))
    return path


@contextmanager
def started(config: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has kept some of its models and not all."""
    command = [sys.executable, "-m", "dpaudit", "run", str(config)]
    environment = {**os.environ, "DPAUDIT_ENVIRONMENT": "as-is"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            # it says a line after every few models
            assert any(num_kept(config) >= 16 for _ in process.stderr), "The run ended too early."
            yield process
        finally:
            process.kill()


def num_kept(config: Path) -> int:
    path = config.parent / "run" / "trials.jsonl"
    return path.read_text().count("checksum") if path.exists() else 0


@pytest.mark.long  # tests/experiments/trials kill drivers and workers too
def test_a_run_that_was_killed_ends_with_the_scores_of_one_that_was_not(
    config: Path, tmp_path: Path, run: Any
) -> None:
    with started(config) as process:
        process.kill()
        assert process.wait() == -signal.SIGKILL
    kept = num_kept(config)
    assert 16 <= kept < 240
    resumed = run("run", config, "--set", "pool=serial", "--json")
    assert f"{kept} of 240 models" in resumed.stderr
    assert "0 of 240 models" not in resumed.stderr.splitlines()
    straight = run("run", config, "--set", "pool=serial", "--set", f"output={tmp_path / 'whole'}", "--json")
    for name in ("with_canary.npy", "without_canary.npy"):
        found = [np.load(tmp_path / folder / name).tobytes() for folder in ("run", "whole")]
        assert found[0] == found[1]
    clock = dict.fromkeys(("timing", "provenance", "seal"))
    both = [json.loads(done.stdout) | clock for done in (resumed, straight)]
    assert both[0] == both[1]
    assert resumed.exit_code == straight.exit_code == 0


@pytest.mark.long
def test_an_interrupted_run_keeps_its_models_and_says_how_to_go_on(config: Path) -> None:
    with started(config) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait() == 130
    assert 16 <= num_kept(config) < 240
    last = said.splitlines()[-1]
    assert last.startswith("dpaudit: Interrupted by SIGINT at ")
    assert f" of 240 models; finished work is kept in {config.parent / 'run'}: run the same " in last
    assert "Traceback" not in said


def test_a_run_without_noise_shows_bound_and_maximum_and_ends_with_0(config: Path, run: Any) -> None:
    result = run("run", config, *SHORT)
    assert result.exit_code == 0, result.stderr
    assert "verdict" not in result.stdout
    assert re.search(r"claim +clipping without noise", result.stdout)
    assert "by an attack without a single error" in result.stdout
    assert re.search(r"models +48 of 48, ", result.stdout)
    assert "test accuracy" in result.stdout
    lines = [line for line in result.stderr.splitlines() if " of 48 models" in line]
    assert lines[0] == "0 of 48 models"
    assert lines[-1].startswith("48 of 48 models, ")
    assert "models/s, 0 s left" in lines[-1]
    values = json.loads(run("run", config, *SHORT, "--json").stdout)
    assert values["verdict"] is None


def test_a_terminal_gets_a_bar(config: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take standard error for a terminal
    monkeypatch.setenv("COLUMNS", "120")
    result = run("run", config, *SHORT, "--json")
    assert "━" in result.stderr
    assert "48 of 48 models, " in result.stderr
    assert json.loads(result.stdout)["num_models"] == 48


def test_a_function_that_cannot_be_found_is_told_in_a_sentence(config: Path, run: Any) -> None:
    model = ["--set", 'model={name="function", function="no_such_module:train"}']
    result = run("run", config, *SHORT, *model)
    assert result.exit_code == 2
    assert "module no_such_module is neither in" in result.stderr
    assert "Traceback" not in result.stderr
