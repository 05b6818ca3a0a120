"""The numbers behind the pictures."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statistical_limits import most_flagged

import dpaudit
from dpaudit.recording import Trajectory
from dpaudit.report import Report, read_run
from dpaudit.report._plot_data import Histogram
from dpaudit.report._svg import AxisScale
from dpaudit.stats._roc_band import ErrorRatePlane
from dpaudit.stats.inference import BoundQuery

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def recorder(num_steps: int, noise: float, seed: int = 0) -> dpaudit.Recorder:
    made, rng = dpaudit.Recorder(claim=CLAIM, num_steps=num_steps), np.random.default_rng(seed)
    for _ in range(num_steps):
        present = rng.random(32) < 0.5
        made.record(present + noise * rng.standard_normal(32), present)
    return made


def test_every_score_is_in_a_bin() -> None:
    rng = np.random.default_rng(0)
    seen = dpaudit.Observations(with_canary=rng.standard_cauchy(5000), without_canary=rng.normal(size=300))
    found = Histogram.of(seen, 0.5)
    assert (found.with_canary.sum(), found.without_canary.sum()) == (5000, 300)
    assert (np.diff(found.edges) > 0).all()


@pytest.mark.parametrize("scores", [[1.0, 1.0], [0.0], [1e308, -1e308], [5e-324, 0.0]])
def test_odd_scores_have_bins_too(scores: list[float]) -> None:
    found = Histogram.of(dpaudit.Observations(with_canary=scores, without_canary=[0.0]), None)
    assert found.with_canary.sum() == len(scores)
    assert np.isfinite(found.edges).all()


def test_the_course_ends_at_the_verdicts_bound_and_passes_the_live_ones() -> None:
    made = recorder(120, noise=0.7)
    points = made.trajectory().points
    assert points[-1].epsilon == made.audit().bound.epsilon
    again = recorder(120, noise=0.7)
    early = dpaudit.Recorder(claim=CLAIM, num_steps=120)
    for scores, present in zip(
        *(again.state_dict()[side][: points[20].num_done] for side in ("scores", "present")), strict=True
    ):
        early.record(scores, present)
    assert points[20].epsilon == early.live().epsilon
    lower = [one.epsilon for one in points]
    assert (np.diff(lower) > -1e-6).all()
    assert all(one.epsilon <= one.upper for one in points)


def test_the_course_of_a_stored_run_is_that_of_its_verdict(report: Report, runs: dict[str, Path]) -> None:
    for run in report.runs:
        assert run.figures.course is not None
        assert run.figures.course.points[-1].epsilon == pytest.approx(run.bound.epsilon, rel=1e-3)
        assert run.figures.of_verdict
    assert read_run(runs["paper"]).figures.of_verdict


@pytest.mark.long
def test_either_end_of_the_band_misses_the_truth_as_seldom_as_it_says() -> None:
    rng, repetitions, error = np.random.default_rng(1), 300, 0.4
    hypothesis = CLAIM.hypothesis(None)
    truth = hypothesis.epsilon(hypothesis.tradeoff.from_balanced_error(error))
    missed = np.zeros(2)
    for _ in range(repetitions):
        last = _last(1 - 2 * rng.binomial(8, error, size=60) / 8)
        missed += [last.epsilon > truth, last.upper < truth]
    assert (missed <= most_flagged(repetitions, broken=0.15, comparisons=2)).all()


def _last(advantages: np.ndarray) -> dpaudit.recording.TrajectoryPoint:
    """Both ends only ever come nearer, so that the last moment is the one that may miss."""
    hypothesis = CLAIM.hypothesis(None)
    query = BoundQuery(hypothesis.tradeoff, CLAIM.delta, 0.05)
    bets = dpaudit.Betting(horizon=60).start(8, query, by_coin=True, with_tails=False)
    bets.extend(advantages)
    whole = Trajectory.of(bets, advantages, hypothesis=hypothesis, confidence=0.95, horizon=60, num_points=1)
    return whole.points[-1]


@pytest.mark.parametrize("rate", [0.01, 0.2, 0.5])
def test_the_region_holds_both_rates_as_often_as_it_says(rate: float) -> None:
    trials, held = 40, 0.0
    for errors in range(trials + 1):
        counts = dpaudit.ErrorCounts(
            false_positives=errors, num_absent=trials, false_negatives=0, num_present=5
        )
        plane = ErrorRatePlane.of(counts, tradeoff=dpaudit.Gaussian(), claimed=1.0, bound=0.5, confidence=0.9)
        low, high = plane.region[0]
        held += float(stats.binom.pmf(errors, trials, rate)) * (low <= rate <= high)
    assert held**2 >= 0.9


def test_curves_stay_in_the_plane_whatever_was_bound() -> None:
    counts = dpaudit.ErrorCounts(false_positives=0, num_absent=9, false_negatives=9, num_present=9)
    for tradeoff in (dpaudit.Gaussian(), dpaudit.ApproximateDP(1e-5), dpaudit.PureDP(), dpaudit.Laplace()):
        plane = ErrorRatePlane.of(counts, tradeoff=tradeoff, claimed=0.0, bound=math.inf, confidence=0.95)
        for curve in (plane.claimed, plane.bound):
            assert ((curve >= 0) & (curve <= 1)).all()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 8.9), (0.4, 0.40001), (0.0, 1e9)])
def test_ticks_are_round_few_and_inside(low: float, high: float) -> None:
    scale = AxisScale(low, high, 0.0, 100.0)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert len({scale.label(tick) for tick in ticks}) == len(ticks)
