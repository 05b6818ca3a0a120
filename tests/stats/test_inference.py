"""Each fast formula against a slow, obvious one."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from score_samples import counts
from statistical_limits import share_room

import dpaudit
from dpaudit.stats.inference import BoundQuery

FAMILIES = [
    dpaudit.Gaussian(),
    dpaudit.ApproximateDP(1e-5),
    dpaudit.PureDP(),
    dpaudit.Laplace(),
    dpaudit.RandomizedResponse(3),
    dpaudit.PiecewiseLinear((0.1, 1.0), (0.05, 1e-4)),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=repr)


def parameter(inference, family, errors, error=0.05):
    return inference.parameter(errors, BoundQuery(family, 0.0, error))


@st.composite
def error_counts(draw, most=60):
    n0, n1 = draw(st.integers(1, most)), draw(st.integers(1, most))
    return counts(draw(st.integers(0, n0)), n0, draw(st.integers(0, n1)), n1)


@families
@given(errors=error_counts(500))
def test_clopper_pearson_plugs_exact_binomial_ends_into_the_family(family, errors):
    ends = [
        stats.binomtest(k, n).proportion_ci(confidence_level=0.95, method="exact").high
        for k, n in (
            (errors.false_positives, errors.num_absent),
            (errors.false_negatives, errors.num_present),
        )
    ]
    slow = float(family.parameter(np.asarray(ends[0]), np.asarray(ends[1])))
    assert parameter(dpaudit.ClopperPearson(), family, errors) == pytest.approx(slow, rel=1e-9, abs=1e-9)


@pytest.mark.few(8)
@families
@pytest.mark.parametrize(
    "errors",
    [counts(160, 1000, 150, 1000), counts(0, 50, 30, 70), counts(5, 20, 100, 2000), counts(0, 9, 0, 9)],
)
def test_posterior_agrees_with_a_million_draws(family, errors):
    rng = np.random.default_rng(0)
    fpr, fnr = (
        rng.beta(0.5 + k, 0.5 + n - k, 1_000_000)
        for k, n in (
            (errors.false_positives, errors.num_absent),
            (errors.false_negatives, errors.num_present),
        )
    )
    # the smallest parameter whose region holds the point, on either side of the region
    least = np.maximum(family.parameter(fpr, fnr), family.parameter(1 - fpr, 1 - fnr))
    bound = parameter(dpaudit.Posterior(), family, errors)
    assert (least <= bound).mean() == pytest.approx(0.025, abs=share_room(0.025, 1_000_000))


def slow_joint_exact(family, errors, error=0.05):
    """All outcomes, a dense grid of rates below both upper limits, bisection on the parameter."""
    n0, n1 = errors.num_absent, errors.num_present

    def order(fp, fn):
        return -stats.norm.ppf((fp + 0.5) / (n0 + 1)) - stats.norm.ppf((fn + 0.5) / (n1 + 1))

    fp, fn = np.meshgrid(np.arange(n0 + 1), np.arange(n1 + 1), indexing="ij")
    region = order(fp, fn) >= order(errors.false_positives, errors.false_negatives) - 1e-12
    spent = min(1e-3, error / 50)
    highest = [
        stats.binomtest(wrong, trials).proportion_ci(1 - spent, "exact").high
        for wrong, trials in ((errors.false_positives, n0), (errors.false_negatives, n1))
    ]

    def refuted(theta):
        # half of the points by each rate, so that both ends of the curve are covered
        halves = np.linspace(0, highest[0], 800), family.fnr(theta, np.linspace(0, highest[1], 800))
        grid = np.concatenate(halves)
        fnr = family.fnr(theta, grid)
        plausible = (grid <= highest[0]) & (fnr <= highest[1])
        if not plausible.any():
            return True
        grid, fnr = grid[plausible], fnr[plausible]
        first = stats.binom.pmf(np.arange(n0 + 1), n0, grid[:, None])
        second = stats.binom.pmf(np.arange(n1 + 1), n1, fnr[:, None])
        return (np.einsum("gi,gj,ij->g", first, second, region)).max() <= error - spent

    low, high = 0.0, 50.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@pytest.mark.few(10)
@families
@pytest.mark.parametrize(
    "errors",
    [
        counts(2, 12, 3, 15),
        counts(0, 20, 4, 9),
        counts(0, 15, 0, 15),
        counts(7, 30, 1, 25),
        counts(9, 12, 9, 15),
    ],
)
def test_joint_exact_agrees_with_the_sum_over_all_outcomes(family, errors):
    slow = slow_joint_exact(family, errors)
    fast = parameter(dpaudit.JointExact(), family, errors)
    assert fast == pytest.approx(slow, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize("error", [0.2, 0.01, 0.002])
def test_joint_exact_agrees_with_the_sum_over_all_outcomes_at_other_confidences(error):
    family, errors = dpaudit.Gaussian(), counts(1, 14, 1, 13)
    slow = slow_joint_exact(family, errors, error)
    fast = parameter(dpaudit.JointExact(), family, errors, error)
    assert slow > 0.1
    assert fast == pytest.approx(slow, rel=2e-3)


@pytest.mark.parametrize("inference", [dpaudit.ClopperPearson(), dpaudit.JointExact()], ids=str)
@given(errors=error_counts(), more=st.integers(1, 5))
def test_more_errors_never_raise_an_exact_bound(inference, errors, more):
    worse = counts(
        min(errors.false_positives + more, errors.num_absent),
        errors.num_absent,
        errors.false_negatives,
        errors.num_present,
    )
    gaussian = dpaudit.Gaussian()
    before = parameter(inference, gaussian, errors)
    assert parameter(inference, gaussian, worse) <= before * (1 + 1e-4) + 1e-9


@given(errors=error_counts())
def test_joint_exact_is_monotone_in_the_confidence(errors):
    gaussian = dpaudit.Gaussian()
    values = [parameter(dpaudit.JointExact(), gaussian, errors, error) for error in (0.2, 0.05, 0.001)]
    assert values[0] >= values[1] - 1e-4
    assert values[1] >= values[2] - 1e-4


def test_katz_is_the_normal_interval_of_both_log_ratios():
    errors = counts(30, 200, 50, 300)
    z = stats.norm.ppf(0.975)
    tpr, fpr, fnr = 250 / 300, 30 / 200, 50 / 300
    one = math.log(tpr / fpr) - z * math.sqrt((1 - tpr) / 250 + (1 - fpr) / 30)
    other = math.log((1 - fpr) / fnr) - z * math.sqrt(fpr / 170 + (1 - fnr) / 50)
    assert parameter(dpaudit.KatzLog(), dpaudit.PureDP(), errors) == pytest.approx(max(one, other))


@given(errors=error_counts())
def test_katz_is_finite_for_any_counts(errors):
    assert math.isfinite(parameter(dpaudit.KatzLog(), dpaudit.PureDP(), errors))


@pytest.mark.parametrize(
    ("tradeoff", "delta", "sentence"),
    [
        (dpaudit.PureDP(), 1e-5, r"delta must be 0 with KatzLog\(\), got 1e-05"),
        (dpaudit.Gaussian(), 0.0, r"KatzLog\(\) needs tradeoff=PureDP\(\), got Gaussian\(\)"),
        (dpaudit.ApproximateDP(), 0.0, r"needs tradeoff=PureDP\(\)"),
    ],
)
def test_katz_refuses_what_it_has_no_meaning_for(tradeoff, delta, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.lower_bound(counts(3, 10, 3, 10), delta=delta, tradeoff=tradeoff, inference=dpaudit.KatzLog())
