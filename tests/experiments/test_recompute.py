"""Runs of every mode are derived again by the methods that their config implies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from digits_config import digits_config

from dpaudit import InputError
from dpaudit.experiments import parse_config, run
from dpaudit.experiments._analysis import RunScores, compare, largest_epsilon, plain_values
from dpaudit.experiments._directory import seal
from dpaudit.experiments._recompute import Status, verify
from dpaudit.experiments.trials import TrialsRun

Change = Callable[[dict[str, Any]], object]
LONG = pytest.mark.long
FAULT = "training.fault.name=noise-too-small", "training.fault.factor=0.1"
BLACK_BOX = 'threat_model = "black-box"'


def _text(folder: Path, audit: str, *, top: str = "") -> str:
    return digits_config(folder, top=top, hidden=4, num_examples=100, audit=audit)


def _swapped(values: dict[str, Any]) -> None:
    """The bound of the other method, in the place of that of the verdict."""
    values["bound"] = {key: values["methods"][1][key] for key in values["bound"]}


# the top of the config, its audit table, changes, and a forgery that is consistent in itself
MODES: dict[str, tuple[str, str, tuple[str, ...], Change]] = {
    "paper": (
        "",
        'mode = "paper"\ncanary_rate = 0.5\nmethods = ["f-DP(CP)"]',
        (),
        lambda values: values["methods"].pop(),
    ),
    "first steps": (
        "",
        "num_canaries = 4\nfirst_steps = 3\nmethods = []",
        FAULT,
        lambda values: values["diagnosis"].update(findings=[]),
    ),
    "stopped": (
        "",
        "num_canaries = 32\nstop_on_violation = true",
        FAULT,
        lambda values: values.update(refuted=["mechanism"]),
    ),
    "mixture": (
        "",
        'num_canaries = 8\ncanary = {kind = "mixture"}\nmethods = []',
        (),
        lambda values: values["shapes"].update(with_canary=[100]),
    ),
    "input": (
        'threat_model = "input"',
        'num_canaries = 4\ncanary = {kind = "mislabelled"}',
        (),
        lambda values: values["bound"]["inference"].update(stop_loss=True),
    ),
    "end-to-end": (
        "",
        'mode = "end-to-end"\nnum_canaries = 32\nmethods = []',
        (),
        lambda values: values["one_run_bound"].update(confidence=0.99),
    ),
    "final model": (BLACK_BOX, 'mode = "one-run"\nnum_canaries = 16\nnum_guesses = 8', (), _swapped),
    "many runs": (
        BLACK_BOX,
        'num_models = 40\nheld_out = 64\nmethods = []\nthreshold = "held-out"',
        ("pool=serial",),
        lambda values: values.update(num_models=400),
    ),
}
SLOW = "paper", "input", "end-to-end", "final model", "many runs"  # curves take seconds


@pytest.mark.parametrize("name", [pytest.param(name, marks=[LONG] if name in SLOW else []) for name in MODES])
def test_a_run_of_this_mode_is_derived_and_a_forgery_of_it_is_refused(name: str, tmp_path: Path) -> None:
    top, audit, changes, forge = MODES[name]
    folder = tmp_path / "run"
    run(parse_config(_text(folder, audit, top=top), "run.toml", changes))
    assert verify(folder).status is Status.SEALED, verify(folder).error
    path = folder / "result.json"
    values = json.loads(path.read_text())
    forge(values)
    path.write_text(json.dumps(values))
    seal(folder)
    found = verify(folder)
    assert found.status is Status.REFUSED
    assert str(path) in str(found.error)


def _scores_of(num_failed: int, shift: float = 0.0) -> RunScores:
    """Scores of forty models, of which the first have failed."""
    normal = np.random.default_rng(1).standard_normal(40) + shift * (np.arange(40) % 2)
    scores = {number: float(normal[number]) for number in range(num_failed, 40)}
    failed = dict.fromkeys(range(num_failed), "out of memory")
    observations = TrialsRun(scores=scores, failures=failed).observations
    assert observations is not None
    about = {
        "mode": "many-runs",
        "threat_model": "black-box",
        "noise_multiplier": 1.0,
        "sample_rate": 1.0,
        "num_steps": 5,
        "delta": 1e-5,
        "num_failed": num_failed,
    }
    arrays = {"with_canary": observations.with_canary, "without_canary": observations.without_canary}
    return RunScores(arrays, about, {"confidence": 0.95, "methods": []})


@LONG
def test_failed_trials_are_found_in_the_scores_and_count_against_the_audit() -> None:
    """They make an audit underpowered, which does not follow from the bound alone."""
    whole, some, most = _scores_of(0), _scores_of(1), _scores_of(20)
    values = [plain_values(scores, compare(scores)) for scores in (whole, some, most)]
    assert [one["verdict"] for one in values] == ["UNDERPOWERED"] * 3
    assert [one["notes"][-1:] for one in values[:2]] == [
        [],
        ["The stated power assumes that no trial fails."],
    ]
    assert values[2]["notes"][0].startswith("Too many trials failed")
    assert values[2]["power"]["epsilon"] == "inf" != values[0]["power"]["epsilon"]
    assert largest_epsilon(most) <= values[0]["claim"]["epsilon"] < largest_epsilon(whole)
    assert largest_epsilon(some) < largest_epsilon(whole)
    apart = _scores_of(1, shift=100.0)
    assert plain_values(apart, compare(apart))["verdict"] == "VIOLATION"
    forged = RunScores(most.arrays, {**most.values, "num_failed": 19}, most.audit)
    with pytest.raises(InputError, match="num_failed must be 20, as the scores show, got 19"):
        compare(forged)
