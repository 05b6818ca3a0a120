"""A small experiment that takes a second, as text and as a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dpaudit.experiments import Config, parse_config

SMALL = """
output = "{output}"
seed = 3

[model]
name = "mlp"
hidden = [16]

[data]
name = "digits"
num_examples = 400

[training]
noise_multiplier = 1.0
sample_rate = 0.1
num_steps = 20

[audit]
num_canaries = 32
methods = []
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    """The small config, with changes such as ``training.num_steps=5``."""

    def make(*changes: str) -> Config:
        return parse_config(SMALL.format(output=tmp_path / "run"), "small.toml", changes)

    return make


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """The same as a file."""
    path = tmp_path / "small.toml"
    path.write_text(SMALL.format(output=tmp_path / "run"))
    return path
