"""What arrives of canaries: correct clipping is not flagged, each wrong clipping is, with its cause."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from dpaudit.canaries import CanaryPlan, Directions, Mixture, ParameterLayout
from dpaudit.diagnostics import Check, CheckResults, ClaimedStep, Diagnosis
from dpaudit.diagnostics._clipping_checks import CanaryScoreTable, arrival_cells
from dpaudit.diagnostics._data_tests import StepEnergies
from dpaudit.recording import ObservedCanaries
from dpaudit.recording._score_log import ScoreLog

NAMES = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
LAYOUT = ParameterLayout(NAMES, ((24, 20), (24,), (3, 24), (3,)))
OWNERS = np.repeat(np.arange(4), LAYOUT.sizes)
ROWS = np.concatenate([np.repeat(np.arange(24), 20), np.full(24, 24), np.repeat([25, 26, 27], 24), [28] * 3])
NUM_CANARIES = 64
Clip = Callable[[np.ndarray], np.ndarray]


def norms(rows: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
    return np.linalg.norm(rows if chosen is None else rows * chosen, axis=1, keepdims=True)


def by(norm: Clip) -> Clip:
    return lambda rows: rows / np.maximum(1.0, norm(rows))


def by_group(groups: np.ndarray) -> Clip:
    def clip(rows: np.ndarray) -> np.ndarray:
        squares = np.stack([norms(rows, groups == one)[:, 0] for one in range(groups.max() + 1)], axis=1)
        return rows / np.maximum(1.0, squares[:, groups])

    return clip


def overflowing(rows: np.ndarray) -> np.ndarray:
    found = norms(rows)
    return rows / np.maximum(1.0, np.where(found > 256, 0.0, found))


CORRECT = by(norms)
FAULTS = {
    "by value": (lambda rows: np.clip(rows, -1, 1), "clipped by value"),
    "L-infinity": (by(lambda rows: np.abs(rows).max(axis=1, keepdims=True)), "L-infinity"),
    "rows": (by_group(ROWS), "each row of a parameter is clipped separately"),
    "parameters": (by_group(OWNERS), "each parameter is clipped separately"),
    "capped at 20": (by(lambda rows: np.minimum(norms(rows), 20)), "the norm is capped at about 20"),
    "overflow": (overflowing, "gradients of 1,000 clipping norms are not clipped"),
    "forgotten bias": (by(lambda rows: norms(rows, OWNERS < 3)), "leaves out fc2.bias"),
    "short x 8": (
        lambda rows: rows * np.where(norms(rows) < 1, 8.0, 1 / np.maximum(1.0, norms(rows))),
        "shorter than the clipping norm are multiplied by about",
    ),
    "C^2 / norm": (lambda rows: rows / norms(rows) ** 2, "divided by their squared norm"),
    "at 1.5 C": (by(lambda rows: norms(rows) / 1.5), "gradients are clipped at about 1."),
    "not at all": (lambda rows: rows, "gradients are not clipped"),
    "every fourth": (
        lambda rows: np.where(np.arange(len(rows))[:, None] % 4 == 3, rows, CORRECT(rows)),
        "of the gradients is not clipped, the others are",
    ),
    "raw gradient": (lambda rows: CORRECT(rows) + 0.1 * rows, "the raw gradient times about 0."),
    "the sum": (lambda rows: 5e-5 * rows, "the sum of the batch clipped instead of each gradient?"),
}


class Run:
    """Simulated runs with the same canaries; everything but the noise and the coins is computed once."""

    def __init__(self, clip: Clip, *, reach: float = 1.0) -> None:
        self._draws = CanaryPlan(Mixture(), NUM_CANARIES, seed=0)
        self._plans = [self._draws.directions(index, LAYOUT) for index in range(12)]
        self._scored = [self._arriving(clip, made) for made in self._plans]
        self._observed = ObservedCanaries(
            self._draws.canary, lambda index: self._plans[index % 12], lambda: LAYOUT, reach=reach
        )

    @staticmethod
    def _arriving(clip: Clip, made: Directions) -> np.ndarray:
        dense = made.dense()
        found: np.ndarray = clip(made.lengths[:, None] * dense) @ dense.T
        return found

    def results(
        self, seed: int, *, steps: int = 300, noise: float = 1.0, mean: float = 0.0, scale: Clip | None = None
    ) -> CheckResults:
        rng, log = np.random.default_rng(seed), ScoreLog(self._observed)
        coins = rng.integers(0, 2, (steps, NUM_CANARIES), dtype=np.bool_)
        added = noise * rng.standard_normal((steps, NUM_CANARIES)) + mean
        for index in range(steps):
            may = self._draws.canary.eligible(index, NUM_CANARIES)
            present = coins[index] if may is None else coins[index] & may
            lengths = self._plans[index % 12].lengths
            factor = 1.0 if scale is None else scale(lengths[present])
            log.add(present @ self._scored[index % 12] + factor * added[index], present)
        return log.results(ClaimedStep(noise_multiplier=noise))


def check(results: CheckResults, name: str) -> Check:
    return next(one for one in results.checks if one.name == name)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_clip_is_found_with_its_cause(name: str) -> None:
    clip, cause = FAULTS[name]
    found = check(Run(clip).results(0), "clipping")
    assert found.p_value < 1e-6
    assert cause in found.cause


def test_correct_clipping_is_not_flagged() -> None:
    run = Run(CORRECT)
    found = [run.results(seed, steps=160) for seed in range(100)]
    for name in ("clipping", "noise-by-canaries"):
        p_values = np.array([check(one, name).p_value for one in found])
        assert p_values.min() > 1e-5  # once in a thousand times 100 runs
        assert stats.binomtest(int((p_values <= 0.05).sum()), 100, 0.05, "greater").pvalue > 1e-3
    assert not any(one.notes for one in found)


@pytest.mark.long
def test_p_values_hold_at_small_levels() -> None:
    run = Run(CORRECT)
    found = [run.results(seed, steps=160) for seed in range(4000)]
    for name in ("clipping", "noise-by-canaries"):
        p_values = np.array([check(one, name).p_value for one in found])
        for level in (5e-4, 1e-2):
            count = int((p_values <= level).sum())
            assert stats.binomtest(count, 4000, level, "greater").pvalue > 1e-3


def test_more_noise_than_claimed_is_no_arrival() -> None:
    run = Run(CORRECT)
    for seed in range(20):
        doubled = run.results(seed, steps=160, scale=lambda _: np.full(NUM_CANARIES, 2.0))
        assert check(doubled, "clipping").p_value > 1e-4
        assert check(doubled, "noise-by-canaries").p_value > 1e-4


def test_noise_by_the_largest_norm_is_found() -> None:
    def largest(lengths: np.ndarray) -> np.ndarray:
        return np.array(min(1.0, lengths.max(initial=0.0)))

    found = check(Run(CORRECT).results(0, scale=largest), "noise-by-canaries")
    assert found.p_value < 1e-6
    assert found.sentence == "the noise of steps without canaries is 0 of the noise of the other steps."


def test_noise_that_varies_over_time_has_fewer_degrees_of_freedom() -> None:
    rng = np.random.default_rng(0)
    kinds = np.zeros(320, dtype=np.int64)
    kinds[7::16] = 1
    p_values = []
    for _ in range(200):
        scales = rng.choice([1.0, 4.0], 320)  # of each step, independent of its kind
        scores = scales[:, None] * rng.standard_normal((320, 64))
        p_values += [
            one.p_value for one in StepEnergies.of(scores, np.zeros((320, 64), bool), kinds).checks()
        ]
    assert (np.array(p_values) <= 1e-3).sum() <= 4


@pytest.mark.parametrize("num_canaries", [1, 2])
def test_noise_of_very_few_canaries_is_not_flagged(num_canaries: int) -> None:
    rng, shape = np.random.default_rng(0), (1600, num_canaries)
    kinds = np.zeros(1600, dtype=np.int64)
    kinds[7::8] = 1
    p_values = []
    for _ in range(100):
        present = (rng.random(shape) < 0.5) & (kinds == 0)[:, None]
        energies = StepEnergies.of(30 * rng.standard_normal(shape), present, kinds)
        p_values += [one.p_value for one in energies.checks()]
    assert (np.array(p_values) <= 1e-3).sum() <= 2


def test_noise_in_a_single_step_has_a_spread() -> None:
    for seed in range(20):  # squares of numbers close to 1 have other rounding errors
        rng = np.random.default_rng(seed)
        present = rng.random((50, 16)) < 0.5
        present[0] = False
        scores = present * (1 + 1e-9 * rng.standard_normal((50, 16)))
        scores[0] = rng.standard_normal(16)
        found = CanaryScoreTable.of(
            scores,
            present,
            shapes=np.zeros(16, dtype=np.int64),
            lengths=np.full(16, 10.0),
            parameters=np.full(16, -1),
        )
        assert 0 <= found.present_std(np.ones(16, dtype=np.bool_)) < 1e-6


def test_a_slightly_larger_norm_is_most_certain_in_all_long_canaries_together() -> None:
    present = np.random.default_rng(0).random((40, 6)) < 0.5
    found = CanaryScoreTable.of(
        1.1 * present,
        present,
        shapes=np.array([0, 0, 0, 1, 1, 1]),
        lengths=np.array([1.5, 10.0, 1e3, 1.5, 10.0, 0.5]),
        parameters=np.full(6, -1),
    )
    best = max(arrival_cells(found, 1.0, ("single", "dense"), ()), key=lambda cell: cell.above(1.0))
    assert best.count == np.count_nonzero(present[:, :5])
    assert "canaries longer than the clipping norm reach" in best.sentence


def test_a_canary_that_does_not_arrive_is_a_note_and_no_finding() -> None:
    found = Run(lambda rows: np.where(norms(rows) > 100, 0.0, CORRECT(rows))).results(0)
    assert check(found, "clipping").p_value > 1e-3
    assert "Not all canaries arrive: canaries of 1,000 clipping norms" in found.notes[0]


@pytest.mark.parametrize("gamma", [0.0, 0.01])
def test_short_canaries_that_are_scaled_up_to_the_clipping_norm_are_a_note(gamma: float) -> None:
    run = Run(lambda rows: rows / (norms(rows) + gamma))
    for seed in range(5):
        found = run.results(seed)
        assert check(found, "clipping").p_value > 1e-3
        assert found.notes[0].startswith("Short gradients are scaled up: canaries of 0.5 clipping norms")
        assert "as with automatic clipping, this is not a leak" in found.notes[0]


@pytest.mark.parametrize("factor", [1.8, 3.0])
def test_short_canaries_that_are_scaled_up_beyond_the_clipping_norm_are_found(factor: float) -> None:
    run = Run(lambda rows: np.where(norms(rows) < 1, factor * rows, CORRECT(rows)))
    found = check(run.results(0), "clipping")
    assert found.p_value < 1e-4
    assert "more than the 1 that clipping allows" in found.sentence


def test_a_mean_of_the_noise_is_not_taken_for_wrong_clipping() -> None:
    found = check(Run(CORRECT).results(0, mean=0.5), "clipping")
    assert found.p_value < 1e-6
    assert "absent canaries score 0.5" in found.cause
    assert "is the mean of the noise not zero" in found.cause


def test_a_finding_brings_its_own_cause() -> None:
    results = Run(FAULTS["forgotten bias"][0]).results(0)
    found = Diagnosis.of([], confidence=0.99).joined(results)
    assert [one.name for one in found.findings] == ["clipping"]
    assert found.likely_causes() == (
        "the clipping norm leaves out fc2.bias: is it computed over all parameters?",
    )
    assert found.to_dict()["findings"][0]["cause"] == found.likely_causes()[0]


def test_a_clip_that_no_candidate_explains_is_described_by_what_arrived() -> None:
    def odd(rows: np.ndarray) -> np.ndarray:
        return CORRECT(rows) * np.where(np.round(norms(rows) * 2) % 2 == 1, 40.0, 1.0)

    found = check(Run(odd).results(0), "clipping")
    assert found.p_value < 1e-6
    assert "arrive" in found.cause or "reach the release" in found.cause or "clipping norm" in found.cause
