"""Audits of final models: what is kept of them, what does not matter, and what is said of failures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpaudit.experiments import Config, Running, parse_config, run

TINY = """
output = "{output}"
seed = 3
threat_model = "black-box"
pool = "serial"

[model]
name = "logistic-regression"

[data]
name = "digits"
num_examples = 300

[training]
noise_multiplier = 1.0
sample_rate = 0.1
num_steps = 5

[audit]
num_models = 40
held_out = 64
methods = []
"""

Make = Callable[..., Config]


@pytest.fixture
def tiny(tmp_path: Path) -> Make:
    """A black-box audit of a second, with changes."""

    def make(*changes: str, output: str = "run") -> Config:
        return parse_config(TINY.format(output=tmp_path / output), "tiny.toml", changes)

    return make


def scores(config: Config) -> dict[str, bytes]:
    folder = Path(config.output)
    return {name: np.load(folder / f"{name}.npy").tobytes() for name in ("with_canary", "without_canary")}


def test_a_run_keeps_its_scores_and_its_result(tiny: Make) -> None:
    config, seen = tiny(), list[Running]()
    found = run(config, trials=seen.append)
    folder = Path(config.output)
    assert {path.name for path in folder.iterdir()} >= {"config.json", "versions.json", "trials.sqlite3"}
    assert found.values == json.loads((folder / "result.json").read_text())
    assert found.values["verdict"] in {"NO_VIOLATION", "UNDERPOWERED"}
    assert found.values["threat_model"] == "black-box"
    assert [found.values[key] for key in ("num_models", "num_failed", "num_parameters")] == [40, 0, 650]
    assert found.values["shapes"] == {"with_canary": [20], "without_canary": [20]}
    assert [np.load(folder / f"{name}_canary.npy").shape for name in ("with", "without")] == [(20,)] * 2
    assert seen[0].progress.num_done == 0
    assert seen[-1].progress.num_done == 40
    again = run(config)
    assert again.was_finished
    assert again.values == found.values


@pytest.mark.parametrize("pool", ["pool.kind=processes", "pool.kind=ray"])
def test_scores_do_not_depend_on_who_trains(pool: str, tiny: Make) -> None:
    if pool.endswith("ray"):
        pytest.importorskip("ray")
    alone, other = tiny(), tiny("pool={}", pool, output="other")
    run(alone)
    run(other)
    assert scores(alone) == scores(other)


def test_without_noise_there_is_a_bound_and_no_verdict(tiny: Make) -> None:
    values = run(tiny("training.noise_multiplier=0", "training.optimizer.name=sgd")).values
    assert values["verdict"] is None
    assert values["claim"]["epsilon"] == "inf"
    assert 0 <= values["bound"]["epsilon"] <= values["largest_epsilon"] < math.inf
    assert "nothing is claimed" in values["notes"][0]
