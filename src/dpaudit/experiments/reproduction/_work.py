"""What a cell is given to work with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpaudit.experiments.reproduction._data import Data
from dpaudit.experiments.reproduction._values import Key, Settings

__all__ = ["Work", "cell_seed"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """One cell's settings, chance and place."""

    settings: Settings
    seed: int
    folder: Path
    """For what a training keeps, so that it goes on where it was interrupted."""
    data: Data
    device: str = "cpu"
    num_workers: int | None = None
    """Processes of a cell that has some: by default one for each core."""
    within: Callable[[str], None] = lambda _: None
    """Told how far the cell is."""

    def generator(self) -> np.random.Generator:
        """The cell's own chance, whichever cells were measured before it."""
        return np.random.default_rng(self.seed)


def cell_seed(seed: int, name: str, key: Key) -> int:
    """64 bits of a cell's own."""
    text = json.dumps([seed, name, key], sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
