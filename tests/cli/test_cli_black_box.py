"""``dpaudit run`` of many models as a program: killed, interrupted, called again; and what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from digits_config import models_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path, sizes = tmp_path / "config.toml", {"sample_rate": 0.5, "num_steps": 3, "num_models": 48}
    path.write_text(models_config(tmp_path / "run", audit="", **sizes))
    return path


def test_a_run_without_noise_shows_bound_and_maximum_and_ends_with_0(config: Path, run: Any) -> None:
    result = run("run", config)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("○ NO CLAIM TESTED   epsilon >= ")
    assert re.search(r"claim +clipping without noise", result.stdout)
    assert "Without noise nothing is claimed and nothing can be refuted" in result.stdout
    details = run("run", config, "-v").stdout
    assert re.search(r"at best +epsilon >= [\d.]+ by an attack without a single error", details)
    assert re.search(r"models +48 of 48\n", details)
    assert "test accuracy" in details
    lines = [line for line in result.stderr.splitlines() if " of 48 models" in line]
    assert lines[0] == "0 of 48 models"
    assert lines[-1].startswith("48 of 48 models, ")
    assert "models/s, 0 s left" in lines[-1]
    values = json.loads(run("run", config, "--json").stdout)
    assert values["verdict"] is None


def test_a_function_that_cannot_be_found_is_told_in_a_sentence(config: Path, run: Any) -> None:
    model = ["--set", 'model={name="function", function="no_such_module:train"}']
    result = run("run", config, *model)
    assert result.exit_code == 2
    assert "module no_such_module is neither in" in result.stderr
    assert "Traceback" not in result.stderr
