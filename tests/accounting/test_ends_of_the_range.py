"""Epsilons at the ends of the range are bracketed closely, and the brackets hold the truth."""

import json
import math
import warnings
from dataclasses import replace

import ends_of_the_range
import numpy as np
import pytest

import dpaudit
from dpaudit.accounting import _pld, _subsampled
from dpaudit.accounting._tilted import TiltedLosses

ROWS = json.loads(ends_of_the_range.PATH.read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ",".join(f"{one:g}" for one in row["setting"]))
def test_claim_and_bound_bracket_the_truth_within_two_percent(row):
    noise, rate, steps, delta = row["setting"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        above = _pld.epsilon_above(noise, rate, steps, delta)
        below = _pld.epsilon_below(noise, rate, steps, delta)
    assert below <= row["high"] * (1 + 1e-12)
    assert above >= row["low"] * (1 - 1e-12)
    assert above - below <= 0.02 * above


def test_the_table_has_forty_settings_over_the_whole_range():
    noises, rates, steps, deltas = np.transpose([row["setting"] for row in ROWS])
    assert len(ROWS) == 40
    for values, low, high in ((noises, 0.3, 50), (rates, 1e-6, 1), (steps, 1, 10**6), (deltas, 1e-12, 0.1)):
        assert (values.min(), values.max()) == (low, high)


def test_the_table_holds_what_the_closed_forms_say():
    for row in ROWS:
        if row["oracle"] in ("one_step", "full_batches"):
            low, high = getattr(ends_of_the_range, row["oracle"])(*row["setting"])
            assert (low, high) == (row["low"], row["high"])


@pytest.mark.long
def test_the_table_holds_what_the_slow_integral_says():
    for setting in ((0.3, 1e-3, 10**5, 1e-5), (50.0, 0.5, 10**6, 1e-12)):
        [row] = [row for row in ROWS if tuple(row["setting"]) == setting]
        found = ends_of_the_range.inverted(*setting, ends_of_the_range.INVERTED[setting])
        assert found == pytest.approx((row["low"], row["high"]), rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100))
def test_contours_and_bounds_agree_with_a_grid_in_random_settings(seed):
    noise, rate, steps, delta = setting = ends_of_the_range.random_setting(seed)
    interval = max(min(1e-3, rate * (1 / noise + 0.5 / noise**2) / 20), 3e-6)
    low, high = ends_of_the_range.on_a_grid(*setting, interval)
    removed, added = (TiltedLosses(noise, rate, steps, is_removed) for is_removed in (True, False))
    room = 1e-5 * high + 1e-9  # the grid truncates tails too
    for below, above in (
        (removed.epsilon_below(delta), max(removed.epsilon(delta), added.epsilon(delta))),
        (_pld.epsilon_below(*setting), _pld.epsilon_above(*setting)),
    ):
        assert below <= high + room
        assert above >= low - room
        assert above - below <= 0.02 * above + 1e-9


def test_a_bound_without_an_epsilon_is_refused_in_a_sentence(monkeypatch):
    """It was silently 0."""
    missing = _pld.epsilon_below(1.0, 1e-5, 1, 1e-28)
    assert math.isnan(missing)
    monkeypatch.setattr(_subsampled, "epsilon_below", lambda *_: missing)  # for all nodes that are computed
    with pytest.raises(dpaudit.InputError, match=r"delta=1e-28 is too small .* sample_rate=1e-05"):
        dpaudit.training_epsilon(1.0, 1e-5, 1, 1e-28)


def test_a_path_with_wrong_terms_is_noticed():
    """Half of the points of the same path have the same error."""
    losses = TiltedLosses(0.6, 1e-4, 10**5, is_removed=True)
    contour, epsilon = losses._contour(1e-5)
    assert contour.error(epsilon) < 1e-5 * 1e-5
    wrong = replace(contour, log_terms=contour.log_terms + 0.01)
    assert wrong.error(epsilon) > 0.009 * 1e-5


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "mu"),
    [(0.6, 1e-4, 10**5, 1.7), (1.0, 1e-3, 10**6, 0.95), (0.3, 1e-3, 10**5, 3.4)],
)
def test_the_bound_of_an_extreme_training_has_an_epsilon_near_the_claimed_one(noise, rate, steps, mu):
    """It was 0, NaN, or a sentence about a noise multiplier of the table between nodes."""
    claim = dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=rate, num_steps=steps, delta=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epsilon = dpaudit.training_epsilon(mu, rate, steps, 1e-5)
    assert 0.8 < epsilon / claim.epsilon < 1.3


@pytest.mark.parametrize("is_removed", [True, False])
def test_tilted_deltas_are_those_of_the_masses_where_both_work(is_removed):
    losses = _pld._composed(1.0, 0.05, 200, 2, is_removed=is_removed)
    epsilons = np.linspace(0.0, losses.epsilon(1e-9), 20)
    tilted = TiltedLosses(1.0, 0.05, 200, is_removed).deltas(epsilons)
    np.testing.assert_allclose(tilted, losses.deltas(epsilons), rtol=1e-3)


def test_whole_runs_at_the_ends_have_a_curve():
    """The curve of a smaller noise than the claimed one was refused."""
    curve = dpaudit.SubsampledGaussian(1e-3, 10**6)
    fnr = curve.fnr(1.0, np.asarray([0.01, 0.1, 0.5]))
    total = 1e-3 * math.sqrt(10**6 * math.expm1(1.0))  # by the central limit theorem
    np.testing.assert_allclose(fnr, dpaudit.Gaussian().fnr(total, np.asarray([0.01, 0.1, 0.5])), atol=5e-3)
