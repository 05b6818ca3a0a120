"""A small experiment that takes a second, as text and as a value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from digits_config import digits_config

from dpaudit.experiments import Config, parse_config


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Config]:
    """The small config, with changes such as ``training.num_steps=5``."""

    def make(*changes: str) -> Config:
        return parse_config(digits_config(tmp_path / "run"), "small.toml", changes)

    return make


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    """The same as a file."""
    path = tmp_path / "small.toml"
    path.write_text(digits_config(tmp_path / "run"))
    return path
