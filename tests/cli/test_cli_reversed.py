"""Scores that point the wrong way are an error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpaudit
from dpaudit.stats._observations import require_higher_is_present

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


@pytest.fixture
def sides(tmp_path: Path) -> Any:
    rng = np.random.default_rng(0)
    np.save(tmp_path / "high.npy", rng.normal(1, 1, 1000))
    np.save(tmp_path / "low.npy", rng.normal(0, 1, 1000))
    return lambda first, second: [
        "--with",
        tmp_path / f"{first}.npy",
        "--without",
        tmp_path / f"{second}.npy",
    ]


@pytest.mark.parametrize("options", [(), ("--normalized",), ("--noise-multiplier", "1", "--delta", "1e-5")])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_scores_that_point_the_wrong_way_are_an_error(
    options: tuple[str, ...], is_streamed: bool, refused: Any, sides: Any, monkeypatch: Any
) -> None:
    if is_streamed:
        for name in ("_STREAMED", "_LARGE"):
            monkeypatch.setattr(f"dpaudit.methods.{name}", 10)
        monkeypatch.setattr("dpaudit.stats._observations._SAMPLED", 300)
    sentence = refused("scores", *sides("low", "high"), *options)
    assert "is higher in only 2" in sentence
    assert "pass --lower-is-present" in sentence
    assert ("instead of --normalized" in sentence) == ("--normalized" in options)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_with_lower_is_present_negated_scores_are_audited(
    is_streamed: bool, run: Any, sides: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    if is_streamed:
        monkeypatch.setattr("dpaudit.methods._STREAMED", 10)
    for name in ("high", "low"):
        np.save(tmp_path / f"-{name}.npy", -np.load(tmp_path / f"{name}.npy"))
    claim = ["--noise-multiplier", "3", "--delta", "1e-5", "--json"]
    threshold = ["--threshold", "0.25"]
    plain = run("scores", *sides("high", "low"), *threshold, *claim)
    negated = run("scores", *sides("-high", "-low"), "--threshold", "-0.25", "--lower-is-present", *claim)
    assert plain.exit_code == 1
    assert json.loads(negated.stdout) == json.loads(plain.stdout)


def test_normalized_scores_cannot_be_lower_with_the_canary(refused: Any, sides: Any) -> None:
    sentence = refused("scores", *sides("low", "high"), "--normalized", "--lower-is-present")
    assert sentence.startswith("--normalized and --lower-is-present cannot be combined")


@pytest.mark.parametrize("shape", [1000, (50, 20)])
def test_the_library_refuses_them_too(shape: Any) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(dpaudit.InputError, match="negate them, as in Observations"):
        dpaudit.audit(
            dpaudit.Observations(with_canary=rng.normal(0, 1, shape), without_canary=rng.normal(1, 1, shape)),
            claim=CLAIM,
        )


def test_sorted_files_of_different_sizes_are_not_taken_for_reversed_ones(tmp_path: Path) -> None:
    """A sample of the beginning would be: it has the lowest scores of the larger side."""
    rng = np.random.default_rng(0)
    for name, size in (("with", 1_200_000), ("without", 300_000)):
        np.save(tmp_path / f"{name}.npy", np.sort(rng.normal(0, 1, size)))
    mapped = {f"{name}_canary": np.load(tmp_path / f"{name}.npy", "r") for name in ("with", "without")}
    require_higher_is_present(dpaudit.Observations(**mapped), "")


def test_scores_that_share_their_step_are_not_taken_for_independent() -> None:
    """An offset per step and side, with a mean of 0: its sign is the same for all scores of a step."""
    rng = np.random.default_rng(3)
    reversed_by_chance = 0
    for _ in range(200):
        present, absent = rng.normal(0, 1, (2, 12, 1)) + rng.normal(0, 0.1, (2, 12, 500))
        observations = dpaudit.Observations(with_canary=present, without_canary=absent)
        try:
            require_higher_is_present(observations, "")
        except dpaudit.InputError:
            reversed_by_chance += 1
    assert reversed_by_chance == 0
