"""Every family obeys the laws of trade-off curves; closed forms agree with the curve itself."""

import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpaudit

FAMILIES = [
    dpaudit.Gaussian(),
    dpaudit.ApproximateDP(1e-5),
    dpaudit.ApproximateDP(0.1),
    dpaudit.PureDP(),
    dpaudit.Laplace(),
    dpaudit.RandomizedResponse(),
    dpaudit.RandomizedResponse(5),
    dpaudit.PiecewiseLinear((0.0, 0.5, 2.0), (0.3, 0.1, 1e-5)),
    dpaudit.PiecewiseLinear((1.0,), (1e-5,)),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=repr)
parameters = st.floats(1e-3, 8.0)
rates = st.floats(1e-6, 1 - 1e-6)
GRID = np.linspace(0.0, 1.0, 2001)


def same_delta(family: dpaudit.TradeOff) -> float:
    return getattr(family, "delta", 1e-3) if isinstance(family, dpaudit.ApproximateDP) else 1e-3


@families
@given(parameter=parameters)
def test_a_curve_is_decreasing_convex_and_below_the_diagonal(family, parameter):
    curve = family.fnr(parameter, GRID)
    assert (curve >= 0).all()
    assert (curve <= 1 - GRID + 1e-12).all()
    assert (np.diff(curve) <= 1e-12).all()
    assert (np.diff(curve, 2) >= -1e-9).all()


@families
@given(parameter=parameters, fpr=rates)
def test_a_curve_is_its_own_inverse(family, parameter, fpr):
    fnr = float(family.fnr(parameter, np.asarray(fpr)))
    if 1e-9 < fnr < 1 - 1e-9:
        assert float(family.fnr(parameter, np.asarray(fnr))) == pytest.approx(fpr, rel=1e-6, abs=1e-9)


@families
@given(parameter=parameters, fpr=rates, factor=st.floats(1.0, 3.0))
def test_a_larger_parameter_is_leakier(family, parameter, fpr, factor):
    smaller = family.fnr(parameter, np.asarray(fpr))
    assert family.fnr(parameter * factor, np.asarray(fpr)) <= smaller + 1e-12
    assert family.balanced_error(parameter * factor) <= family.balanced_error(parameter) + 1e-12


@families
@given(fpr=rates, fnr=rates)
def test_the_parameter_is_where_refutation_ends(family, fpr, fnr):
    bound = float(family.parameter(np.asarray(fpr), np.asarray(fnr)))
    assert bound >= 0
    assert math.isfinite(bound)
    if bound > 1e-6:
        assert family.fnr(bound * (1 - 1e-6), np.asarray(fpr)) >= fnr - 1e-9
    assert family.fnr(bound * (1 + 1e-6) + 1e-9, np.asarray(fpr)) <= fnr + 1e-7


@families
@given(fpr=rates, fnr=rates, fewer=st.floats(0.1, 1.0))
def test_fewer_errors_never_lower_the_parameter_and_the_sides_are_symmetric(family, fpr, fnr, fewer):
    here = family.parameter(np.asarray(fpr), np.asarray(fnr))
    assert family.parameter(np.asarray(fpr * fewer), np.asarray(fnr)) >= here - 1e-9
    assert family.parameter(np.asarray(fnr), np.asarray(fpr)) == pytest.approx(float(here), abs=1e-9)


@families
@pytest.mark.parametrize("parameter", [0.05, 0.4, 1.0, 3.0])
def test_balanced_error_is_the_minimum_over_the_curve(family, parameter):
    slow = ((GRID + family.fnr(parameter, GRID)) / 2).min()
    assert family.balanced_error(parameter) == pytest.approx(slow, abs=1e-3)
    assert family.balanced_error(parameter) <= slow + 1e-12


@families
@pytest.mark.parametrize("parameter", [0.5, 1.0, 2.5])
def test_epsilon_is_the_conjugate_of_the_curve(family, parameter):
    delta = same_delta(family)
    epsilon = family.epsilon(parameter, delta)
    fpr = np.unique(np.concatenate([np.logspace(-12, 0, 20001), GRID]))
    slow = (1 - family.fnr(parameter, fpr) - math.exp(epsilon) * fpr).max()
    if epsilon > 0:
        assert slow == pytest.approx(delta, rel=2e-2, abs=1e-9)
    else:
        assert slow <= delta + 1e-9


@families
@given(epsilon=st.floats(0.05, 20.0))
def test_with_epsilon_inverts_epsilon(family, epsilon):
    delta = same_delta(family)
    parameter = family.with_epsilon(epsilon, delta)
    assert family.epsilon(parameter, delta) == pytest.approx(epsilon, rel=1e-5)


@families
@given(parameter=parameters, delta=st.floats(0, 1 - 1e-6), factor=st.floats(1.0, 3.0))
def test_epsilon_grows_with_the_parameter_and_falls_with_delta(family, parameter, delta, factor):
    here = family.epsilon(parameter, delta)
    assert here >= 0
    assert family.epsilon(parameter * factor, delta) >= here * (1 - 1e-9) - 1e-12
    assert family.epsilon(parameter, delta + (1 - delta) / 2) <= here + 1e-9


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.39, 1.0, 6.0, 30.0, 100.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1, 1 - 1e-6])
def test_gaussian_epsilon_is_finite_at_the_ends_and_agrees_with_dp_accounting(mu, delta):
    epsilon = dpaudit.Gaussian().epsilon(mu, delta)
    assert math.isfinite(epsilon)
    if 1e-3 <= mu <= 6:
        slow = dp_accounting.get_epsilon_gaussian(1 / mu, delta, tol=1e-12)
        assert epsilon == pytest.approx(slow, rel=1e-6, abs=1e-9)


def test_gaussian_epsilon_has_no_cap():
    assert dpaudit.Gaussian().epsilon(1e5, 1e-5) == pytest.approx(5e9, rel=1e-3)


def test_gaussian_epsilon_at_delta_zero_is_infinite_because_it_is():
    assert dpaudit.Gaussian().epsilon(0.1, 0.0) == math.inf
    assert dpaudit.Gaussian().epsilon(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    "family",
    [
        dpaudit.ApproximateDP(1e-5),
        dpaudit.PureDP(),
        dpaudit.Laplace(),
        dpaudit.PiecewiseLinear((1.0, 2.0), (0.1, 0.0)),
    ],
)
def test_epsilon_of_ten_thousand_neither_overflows_nor_warns(family):
    curve = family.fnr(1e4, np.asarray([0.0, 1e-300, 0.5, 1.0]))
    assert np.isfinite(curve).all()
    assert math.isfinite(family.epsilon(1e4, 0.0))


@families
def test_hopeless_rates_refute_nothing(family):
    for fpr, fnr in [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.9, 0.8)]:
        assert float(family.parameter(np.asarray(fpr), np.asarray(fnr))) == 0


def test_piecewise_linear_lines_of_a_gaussian_give_back_the_gaussian():
    gaussian = dpaudit.Gaussian()
    epsilons = np.linspace(0, 12, 600)
    lines = dpaudit.PiecewiseLinear(epsilons, [gaussian.delta(1.0, e) for e in epsilons])
    fpr = np.asarray([1e-4, 0.01, 0.1, 0.5, 0.9])
    np.testing.assert_allclose(lines.fnr(1.0, fpr), gaussian.fnr(1.0, fpr), rtol=1e-3)
    assert lines.epsilon(1.0, 1e-5) == pytest.approx(gaussian.epsilon(1.0, 1e-5), rel=1e-3)


@pytest.mark.parametrize(
    ("epsilons", "deltas"),
    [((1.0, 2.0), (0.1,)), ((), ()), ((-1.0,), (0.1,)), ((1.0,), (1.5,)), ((math.nan,), (0.1,))],
)
def test_lines_that_are_no_guarantees_are_refused(epsilons, deltas):
    with pytest.raises(dpaudit.InputError):
        dpaudit.PiecewiseLinear(epsilons, deltas)


@pytest.mark.parametrize(
    ("family", "words"),
    [
        (dpaudit.Gaussian(), "trade-off curve is Gaussian"),
        (dpaudit.Laplace(), "trade-off curve is that of the Laplace mechanism"),
        (dpaudit.PureDP(), "trade-off curve is that of pure epsilon-DP"),
        (dpaudit.PiecewiseLinear((1.0, 2.0), (0.1, 0.0)), "trade-off curve is the given one"),
        (dpaudit.RandomizedResponse(5), "mechanism is randomized response over 5 values"),
    ],
)
def test_a_bound_states_the_curve_that_it_assumes(family, words):
    scores = dpaudit.Observations(with_canary=[1.0, 2.0, 3.0], without_canary=[0.0, 1.0, 2.0])
    rule, inference = dpaudit.Fixed(0.5), dpaudit.ClopperPearson()
    found = dpaudit.lower_bound(scores, delta=1e-3, tradeoff=family, inference=inference, threshold=rule)
    assert words in found.assumptions[0]


def test_randomised_response_over_two_values_is_pure_dp():
    fpr = np.linspace(0.001, 0.999, 50)
    np.testing.assert_allclose(
        dpaudit.RandomizedResponse().fnr(1.3, fpr), dpaudit.PureDP().fnr(1.3, fpr), atol=1e-12
    )
