"""Limits against exact sums over all outcomes; a limit that shows nothing is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_coverage import Coverage
from statistical_limits import (
    LEVEL,
    count_range,
    covers,
    least_caught,
    most_flagged,
    room,
    share_room,
    size_variance_room,
    spread_range,
)

RATES = st.sampled_from([Fraction(1, 20), Fraction(1, 4), Fraction(1, 2), Fraction(4, 5), Fraction(1, 500)])
RUNS = st.integers(1, 100)


def exact_tail(above: int, runs: int, rate: Fraction) -> Fraction:
    """The probability of more than ``above`` of ``runs``, without rounding."""
    chosen = range(above + 1, runs + 1)
    return sum((math.comb(runs, k) * rate**k * (1 - rate) ** (runs - k) for k in chosen), Fraction(0))


def slow_limit(runs: int, rate: Fraction, level: Fraction) -> int:
    return next(count for count in range(runs + 1) if exact_tail(count, runs, rate) < level)


@given(RUNS, RATES, st.sampled_from([1, 17]))
def test_the_limit_is_the_smallest_count_that_is_exceeded_in_less_than_1_of_1000_cases(
    runs, rate, comparisons
):
    limit = slow_limit(runs, rate, Fraction(1, 1000) / comparisons)
    if limit == runs:
        with pytest.raises(ValueError, match="too few"):
            most_flagged(runs, float(rate), broken=1.0, comparisons=comparisons)
    else:
        assert most_flagged(runs, float(rate), broken=1.0, comparisons=comparisons) == limit


@given(RUNS, RATES)
def test_the_least_count_is_the_limit_of_the_runs_that_are_missed(runs, rate):
    missed = slow_limit(runs, 1 - rate, Fraction(1, 1000))
    if missed < runs:
        assert least_caught(runs, float(rate), broken=0.0) == runs - missed
    else:
        with pytest.raises(ValueError, match="too few"):
            least_caught(runs, float(rate), broken=0.0)


def test_few_runs_notice_only_a_fault_that_shows_in_nearly_all_of_them():
    with pytest.raises(ValueError, match="6 runs are too few: the limit is 3, which a fault"):
        most_flagged(6)
    assert most_flagged(6, broken=0.9) == 3
    with pytest.raises(ValueError, match="6 runs are too few"):
        least_caught(6, 0.9)
    assert most_flagged(40) == 7
    assert least_caught(40, 0.9) == 29


@pytest.mark.parametrize(
    ("runs", "rate"), [(200, Fraction(4, 5)), (40, Fraction(1, 2)), (400, Fraction(1, 20))]
)
def test_a_range_is_left_in_less_than_1_of_1000_cases_and_a_narrower_one_more_often_on_each_side(runs, rate):
    low, high = count_range(runs, float(rate))
    half = Fraction(1, 2000)
    below, above = (exact_tail(runs - low, runs, 1 - rate), exact_tail(high, runs, rate))
    assert below < half
    assert above < half
    assert exact_tail(runs - low - 1, runs, 1 - rate) >= half
    assert exact_tail(high - 1, runs, rate) >= half


def test_means_and_standard_deviations_leave_their_limits_in_1_of_1000_cases():
    draws = 100_000
    samples = np.random.default_rng(0).standard_normal((draws, 12))
    low, high = spread_range(12)
    spreads = samples.std(axis=1, ddof=1)
    fewest, most = count_range(draws, LEVEL)
    assert fewest <= ((spreads < low) | (spreads > high)).sum() <= most
    assert fewest <= (np.abs(samples.mean(axis=1)) > room(1 / math.sqrt(12))).sum() <= most
    assert share_room(0.2, 400) == pytest.approx(room(0.02))


def test_variances_of_batch_sizes_are_as_uncertain_as_simulated():
    sizes = np.random.default_rng(2).binomial(41, 0.1, (4000, 500))
    simulated = sizes.var(axis=1, ddof=1).std(ddof=1)
    low, high = spread_range(4000)
    assert low < simulated / (size_variance_room(41, 0.1, 500) / room(1.0)) < high


def test_coverage_is_limited_by_its_repetitions():
    for exceeded, is_right in ((0, True), (13, True), (14, False)):
        found = Coverage(repetitions=100, exceeded=exceeded / 100, mean_ratio=1.0)
        assert covers(found) is is_right
    with pytest.raises(ValueError, match="too few"):
        covers(Coverage(repetitions=20, exceeded=0.0, mean_ratio=1.0))


def test_comparisons_share_the_level():
    assert room(1.0, comparisons=10) > room(1.0)
    assert spread_range(50, comparisons=10)[0] < spread_range(50)[0]
    assert most_flagged(100, comparisons=10) > most_flagged(100)
    many = np.abs(np.random.default_rng(1).standard_normal((100_000, 10))).max(axis=1)
    fewest, most = count_range(100_000, LEVEL)
    assert fewest <= (many > room(1.0, comparisons=10)).sum() <= most
