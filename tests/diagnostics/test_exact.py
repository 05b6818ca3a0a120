"""Each p-value against a slow computation that is obviously right."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from statistical_limits import LEVEL, most_flagged, share_room

from dpaudit.diagnostics import Diagnostics, NoiseCheck, ObservedStep
from dpaudit.diagnostics._data_tests import _MOST_WEIGHT, _RANK_VARIANCE, _amounts_follow
from dpaudit.diagnostics._dependence_tests import _log_evidence, _most_log_evidence, _products
from dpaudit.diagnostics._diagnosis import holm
from dpaudit.diagnostics._distribution_tests import _sorted, cross_ratio_cdf
from dpaudit.diagnostics._p_values import (
    RESOLUTION,
    chernoff_p_value,
    claim_p_value,
    hypergeometric,
    hypergeometric_tail,
    share_p_value,
    sign_p_value,
    sign_sum_p_value,
    sure_signs,
    uniform_p_value,
)

P_VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=8)


@given(P_VALUES, st.floats(0.001, 0.5))
def test_holm_rejects_what_the_step_down_procedure_rejects(p_values, level):
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    rejected = set()
    for rank, place in enumerate(order):
        if p_values[place] * (len(p_values) - rank) > level:
            break
        rejected.add(place)
    assert set(np.flatnonzero(holm(p_values) <= level)) == rejected


@pytest.mark.parametrize("energy", [0.0, 0.01, 1.0, 5.0])
def test_two_squares_are_below_the_claim_as_an_exponential_number_is(energy):
    blurred = (math.sqrt(energy) + RESOLUTION * math.sqrt(2)) ** 2
    assert claim_p_value(energy, 2) == pytest.approx(1 - math.exp(-blurred / 2))


def test_a_share_is_as_rare_as_simulated_whatever_the_scale():
    rng = np.random.default_rng(1)
    squares = rng.standard_normal((40_000, 9)) ** 2
    share = squares[:, :3].sum(axis=1) / squares.sum(axis=1)
    for limit in (0.05, 0.2, 0.4):
        for scale in (1.0, 100.0):
            found = share_p_value(np.array([limit * scale]), np.array([3.0]), scale, 9.0)
            allowed = share_room(found[0], 40_000, comparisons=3)
            assert (share < limit).mean() == pytest.approx(found[0], abs=allowed)


def test_a_part_without_noise_has_a_tiny_p_value_and_one_that_is_all_has_no_rest():
    assert share_p_value(np.array([0.0]), np.array([20.0]), 100.0, 120.0)[0] < 1e-40
    assert share_p_value(np.array([5.0]), np.array([20.0]), 5.0, 20.0)[0] == 1.0
    assert share_p_value(np.array([0.0]), np.array([20.0]), 0.0, 40.0)[0] == 1.0


@given(st.integers(1, 10), st.data())
def test_signs_that_agree_are_as_likely_as_counting_all_coins(count, data):
    agreeing = data.draw(st.integers(0, count))
    differing = data.draw(st.integers(0, count - agreeing))
    unsure = count - agreeing - differing
    heads = np.array([sum(coins) for coins in itertools.product([0, 1], repeat=count)])
    tails = [  # whatever the unsure ones are
        np.mean(np.maximum(heads, count - heads) >= max(now, count - now)) if 2 * now != count else 1.0
        for now in range(agreeing, agreeing + unsure + 1)
    ]
    assert sign_p_value(agreeing, differing, count) == pytest.approx(max(tails))


def test_numbers_that_rounding_can_turn_have_no_sign():
    assert sure_signs(np.array([-1.0, -1e-3, 0.0, 2e-3]), 1e-3).tolist() == [-1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("length", "count"), [(1, 5), (3, 4), (40, 1), (40, 30)])
def test_sums_of_signs_sway_less_often_than_the_bound_says(length, count):
    rng = np.random.default_rng(4)
    sums = 2.0 * rng.binomial(length, 0.5, size=(100_000, count)) - length
    energies = (sums**2 / length).sum(axis=1)
    for energy in np.quantile(energies, [0.5, 0.9, 0.99, 0.999]):
        assert np.mean(energies >= energy) <= sign_sum_p_value(energy, count) + 1e-9
    assert sign_sum_p_value(3.0 * count, count) < 0.7  # it is not just 1
    assert sign_sum_p_value(0.5 * count, count) == 1.0


def test_cross_ratios_of_normal_numbers_are_uniform_on_their_scale_whatever_the_scales_are():
    numbers = np.random.default_rng(5).standard_normal((40_000, 2, 2))
    numbers *= np.array([1.0, 7.0])[:, None] * np.array([0.1, 3.0])
    logs = np.log(np.abs(numbers))
    places = cross_ratio_cdf(np.abs(logs[:, 0, 0] + logs[:, 1, 1] - logs[:, 0, 1] - logs[:, 1, 0]))
    assert uniform_p_value(places) > LEVEL
    assert cross_ratio_cdf(np.array([0.0, np.inf])).tolist() == [0.0, 1.0]
    assert uniform_p_value(np.array([])) == 1.0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_unevenness_is_that_of_the_exact_test_of_scipy(values):
    found = uniform_p_value(np.array(values))
    assert found == pytest.approx(stats.kstest(values, "uniform", method="exact").pvalue, abs=1e-9)
    assert uniform_p_value(np.array(values), 0.01) >= found - 1e-12


@given(st.integers(1, 8), st.data())
def test_hypergeometric_probabilities_are_those_of_counting_all_draws(total, data):
    marked = data.draw(st.integers(0, total))
    drawn = data.draw(st.integers(0, total))
    draws = [sum(item < marked for item in chosen) for chosen in itertools.combinations(range(total), drawn)]
    values, probabilities = hypergeometric(total, marked, drawn)
    assert set(draws) == set(values)
    for value, probability in zip(values, probabilities, strict=True):
        assert probability == pytest.approx(draws.count(value) / len(draws))
        assert hypergeometric_tail(total, marked, drawn, int(value)) == pytest.approx(
            sum(seen >= value for seen in draws) / len(draws)
        )


def test_large_hypergeometric_probabilities_are_those_of_scipy():
    values, probabilities = hypergeometric(2_000_000, 150_000, 1_000_000)
    assert probabilities == pytest.approx(
        stats.hypergeom.pmf(values, 2_000_000, 150_000, 1_000_000), abs=1e-8
    )


@given(st.integers(1, 12), st.floats(0.05, 0.95), st.integers(0, 12))
def test_a_chernoff_bound_is_never_below_the_exact_two_sided_tail(trials, rate, seen):
    seen = min(seen, trials)
    tail = min(stats.binom.sf(seen - 1, trials, rate), stats.binom.cdf(seen, trials, rate))

    def log_mgf(slopes):
        return trials * np.log1p(rate * np.expm1(slopes))

    bound = chernoff_p_value(log_mgf, seen, trials * rate * (1 - rate))
    assert min(1.0, 2 * tail) <= bound + 1e-12
    assert bound <= 1.0


def test_a_chernoff_bound_is_of_the_right_order_far_out():
    def log_mgf(slopes):
        return 1000 * np.log1p(0.1 * np.expm1(slopes))

    for seen in (20, 200):
        tail = min(stats.binom.sf(seen - 1, 1000, 0.1), stats.binom.cdf(seen, 1000, 0.1))
        assert math.log(chernoff_p_value(log_mgf, seen, 90.0)) == pytest.approx(math.log(tail), rel=0.1)


# What is computed in a faster way is the same.


def recorded(noise):
    check = NoiseCheck()
    for row in noise:
        check.observe(ObservedStep(noise=row))
    return check.record()


@pytest.mark.parametrize("ends", [[7], [32], [53], [40, 21]])
def test_products_at_all_offsets_and_distances_are_those_of_all_pairs(ends):
    rng = np.random.default_rng(0)
    signs = rng.integers(-1, 2, (sum(ends), 9)).astype(np.float32)
    edges = np.cumsum([0, *ends]).tolist()
    parts = [slice(first, last) for first, last in itertools.pairwise(edges)]
    found = {lag: (sums, count) for lag, sums, count in _products(signs, parts)}
    assert list(found) == list(range(min(17, max(ends))))
    for lag, (sums, count) in found.items():
        pairs = [pair for part in parts for pair in zip(signs[part], signs[part][lag:], strict=False)]
        assert count == len(pairs)
        assert sums.tolist() == sum(np.correlate(later, one, "full") for one, later in pairs).tolist()


def test_the_evidence_of_low_rank_is_below_its_fast_bound():
    rng = np.random.default_rng(0)
    for rank in (2, 20, 60):
        signs = np.sign(rng.standard_normal((60, rank)) @ rng.standard_normal((rank, 60)))
        gram, slopes = signs @ signs.T / 60, [0.002, 0.01, 0.05]
        most = _most_log_evidence(gram, 1.0, slopes)
        assert all(
            _log_evidence(gram, 1.0, slope) <= bound for slope, bound in zip(slopes, most, strict=True)
        )


def test_numbers_are_sorted_with_their_errors():
    rng = np.random.default_rng(0)
    values = np.abs(np.concatenate([rng.standard_normal(3000), 100 * rng.standard_normal(50), np.zeros(9)]))
    errors = 2.0 ** rng.integers(-20, -10, values.size)
    ordered, order = _sorted(values, 0.9 * errors)
    assert np.allclose(ordered, np.sort(values), rtol=2.0**-45, atol=0)
    assert order[ordered > 0].tolist() == errors[np.argsort(values, kind="stable")][9:].tolist()


@pytest.mark.parametrize(("count", "width", "shape"), [(40, 1, 0.3), (90, 40, 0.3), (90, 400, 0.05)])
def test_amounts_are_compared_with_a_line_through_later_ones(count, width, shape):
    rng = np.random.default_rng(count + width)
    numbers = rng.integers(0, 9, count).astype(float)
    energies = rng.chisquare(width, count) * np.exp(shape * numbers)
    logs, weights, total, squares = np.log(energies), np.zeros(count), 0.0, 0.0
    for step in range(7, count - 12):
        rank = np.mean([np.sign(numbers[step] - one) for one in numbers[step - 7 : step]])
        later = np.arange(1, 13)
        line = np.array([np.polyval(np.polyfit(later, later == one, 1), 0) for one in later])
        weights[step] += rank
        weights[step + 1 : step + 13] -= rank * line
        term = rank * (logs[step] - line @ logs[step + 1 : step + 13])
        total, squares = total + term, squares + term**2
    assert total == pytest.approx(weights @ logs)
    assert [weights.sum(), weights @ np.arange(count)] == pytest.approx([0.0, 0.0], abs=1e-9)
    power = min(4.3 / math.sqrt(_RANK_VARIANCE * (count - 19) * 2 / width), width / 2 / _MOST_WEIGHT)
    powers, logs = math.copysign(power, total) * weights[weights != 0], np.linspace(-200, 8, 40_001)
    densities = np.exp(np.outer(powers + width / 2, logs) - np.exp(logs) - special.gammaln(width / 2))
    log_mean = np.log(np.trapezoid(densities, logs)).sum()  # of powers of energies, halved
    expected = 2 * math.exp(max(log_mean - power * abs(total), -(total**2) / squares / 2))
    p_value, correlation = _amounts_follow(energies, numbers, width)
    assert p_value == pytest.approx(min(1.0, expected), rel=1e-3)
    assert 0 < correlation < 1


def test_amounts_do_not_follow_numbers_that_always_grow():
    energies = np.random.default_rng(0).chisquare(8, 100)
    assert _amounts_follow(energies, np.arange(100.0), 8)[0] == 1.0


@pytest.mark.parametrize("factor", [1.0, 0.9])
def test_amounts_that_numbers_follow_are_no_dependence_of_the_amounts(factor):
    """The sum of a step depends on earlier noise, through the weights."""
    rng = np.random.default_rng(0)
    p_values = []
    for _ in range(200):
        energies = rng.chisquare(8, 1000)
        caused = np.concatenate([[0.0], energies[:-1]])
        p_values.append(_amounts_follow(energies * factor ** np.arange(1000), caused, 8)[0])
    assert sum(p_value <= 0.05 for p_value in p_values) <= most_flagged(200)


@pytest.mark.parametrize("is_stated", [True, False])
def test_a_stated_periodic_schedule_of_the_noise_is_no_finding(is_stated: bool) -> None:
    rng, tests = np.random.default_rng(3), Diagnostics()
    for step in range(400):
        scheduled = 1.5 + 0.5 * math.sin(2 * math.pi * step / 10)  # public, and never below the claim
        last = 1.5 + 0.5 * math.sin(2 * math.pi * (step - 1) / 10)  # the noise moves the next gradients
        tests.observe_noise(
            scheduled * rng.standard_normal(40),
            longest=last * rng.chisquare(40),
            noise_multiplier=scheduled if is_stated else None,
        )
    diagnosis = tests.diagnose(0.99)
    assert ("noise-by-batch" in [finding.name for finding in diagnosis.findings]) is not is_stated
    assert any("noise multiplier changed during" in gap for gap in diagnosis.not_covered) is is_stated


def test_noise_that_follows_the_batch_at_a_constant_multiplier_is_a_finding() -> None:
    rng, tests = np.random.default_rng(4), Diagnostics()
    for _ in range(300):
        longest = math.exp(0.3 * rng.standard_normal())
        tests.observe_noise(longest * rng.standard_normal(40), longest=longest, noise_multiplier=1.0)
    assert "noise-by-batch" in [finding.name for finding in tests.diagnose(0.99).findings]
