"""Swapped files are pointed out; the verdict is what the scores say."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest


@pytest.mark.parametrize("options", [(), ("--normalized",)])
def test_scores_that_point_the_wrong_way_get_a_note(
    run: Any, tmp_path: Path, options: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "high.npy", rng.normal(1, 1, 1000))
    np.save(tmp_path / "low.npy", rng.normal(0, 1, 1000))
    for first, second, notes in (("high", "low", 0), ("low", "high", 1)):
        files = ("--with", f"{tmp_path}/{first}.npy", "--without", f"{tmp_path}/{second}.npy")
        found = run("scores", *files, *options, "--json")
        assert len(json.loads(found.stdout)["notes"]) == notes
        printed = " ".join(run("scores", *files, *options).stdout.split())
        assert ("the files are swapped" in printed) == bool(notes)
