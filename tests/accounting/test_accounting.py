"""Accounting is right, on the safe side, and quick because it remembers."""

import math
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

import dpaudit
from dpaudit.accounting import _pld, _subsampled
from dpaudit.accounting._pld import LossDistribution
from dpaudit.accounting._subsampled import _exact_curve

RATE, STEPS, DELTA = 4096 / 50000, 2500, 1e-5
FPR = np.asarray([0.01, 0.1, 0.5])
FLAGSHIP = np.asarray([0.7523, 0.3607, 0.0505])


def fine_epsilon(noise, rate, steps, delta, interval):
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    )
    return pld.self_compose(steps).get_epsilon_for_delta(delta)


PAPERS = [(15.372, 1.0), (4.513, 4.0), (2.577, 8.0), (1.576, 16.0)]  # noise and epsilon


@pytest.mark.parametrize(("noise", "epsilon"), PAPERS)
def test_the_papers_noise_multipliers_have_their_epsilons(noise, epsilon):
    claim = dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=RATE, num_steps=STEPS, delta=DELTA)
    assert claim.epsilon == pytest.approx(epsilon, rel=4e-3)
    assert dpaudit.training_epsilon(1 / noise, RATE, STEPS, DELTA) == pytest.approx(epsilon, rel=5e-3)


@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta"),
    [
        (2.577, RATE, STEPS, DELTA),
        (30.0, 0.05, 1000, 1e-5),
        pytest.param(1.0, 0.01, 200, 1e-6, marks=pytest.mark.long),
        pytest.param(0.6, 0.2, 20, 1e-3, marks=pytest.mark.long),
    ],
)
def test_epsilon_is_bracketed_by_a_value_above_and_one_below_the_truth(noise, rate, steps, delta):
    above = _pld.epsilon_above(noise, rate, steps, delta)
    below = _pld.epsilon_below(noise, rate, steps, delta)
    truth = fine_epsilon(noise, rate, steps, delta, _pld._interval(noise, rate, steps) / 16)
    assert below <= truth <= above + 1e-9
    assert above - below < 3e-3 * max(above, 1)


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    [
        (2.577, RATE, STEPS),
        (0.4, 0.3, 5),
        (0.8, 1.0, 4),
        (3.0, 0.999, 2),
        (0.1, 0.01, 100),
        (20.0, 1e-4, 1000),
    ],
)
def test_arrays_give_what_the_loops_of_dp_accounting_give(noise, rate, steps):
    made, interval = _pld.composed(noise, rate, steps), _pld._interval(noise, rate, steps)
    own = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=interval
    ).self_compose(steps)
    for delta in (1e-2, 1e-4, 1e-6):
        epsilon = max(one.epsilon(delta) for one in made)
        assert epsilon == pytest.approx(own.get_epsilon_for_delta(delta), rel=1e-5)
    epsilons = np.linspace(0.0, min(own.get_epsilon_for_delta(1e-9), 700.0), 50)
    deltas = np.max([one.deltas(epsilons) for one in made], axis=0)
    np.testing.assert_allclose(deltas, own.get_delta_for_epsilon(epsilons), rtol=1e-6, atol=1e-8)


def test_an_epsilon_has_its_delta_where_floats_cannot_exponentiate_it():
    for noise in (0.2, 0.05):
        losses = _pld.composed(noise, 0.1, 200)[0]
        epsilon = losses.epsilon(1e-5)
        assert (epsilon > 709) == (noise < 0.1)
        values = (losses.first + np.arange(losses.probs.size)) * losses.interval
        above = values > epsilon
        delta = losses.infinity - losses.probs[above] @ np.expm1(epsilon - values[above])
        assert delta == pytest.approx(1e-5, rel=1e-6)


def test_deltas_are_not_rounded_below_the_probability_of_an_infinite_loss():
    """Transforms leave masses of about 1e-17 of either sign, whose sum may be negative."""
    losses = LossDistribution(0.1, -10, np.concatenate([np.full(20, 0.05), np.full(300, -1e-15)]), 1e-15)
    deltas = losses.deltas(np.linspace(0.0, 25.0, 100))
    assert deltas.min() == 1e-15
    assert (np.diff(deltas) <= 0).all()
    assert losses.deltas(np.asarray([0.0]))[0] == pytest.approx(
        0.05 * -np.expm1(-0.1 * np.arange(10)).sum(), rel=1e-9
    )


def test_a_claim_of_dp_sgd_is_audited_without_dp_accounting(monkeypatch):
    """Its import takes longer than the audit."""
    for name in ("dp_accounting", "dp_accounting.pld"):
        monkeypatch.setitem(sys.modules, name, None)
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.125, sample_rate=0.03, num_steps=77, delta=DELTA)
    rng = np.random.default_rng(0)
    scores = dpaudit.Observations(
        with_canary=rng.standard_normal(50) + 1, without_canary=rng.standard_normal(50)
    )
    result = dpaudit.audit(scores, claim=claim, tradeoff=dpaudit.SubsampledGaussian(0.03, 77))
    assert result.verdict is dpaudit.Verdict.VIOLATION  # one score shows as much as 77 steps may
    with pytest.raises(ImportError):
        dpaudit.Claim.accounted(None, delta=DELTA)


@pytest.mark.parametrize(("noise", "truth"), [(3.0, 0.00107), (5.0, 0.0006)])
def test_rounding_errors_of_tiny_sample_rates_do_not_become_a_lower_bound(noise, truth):
    """The truth is near that of the central limit theorem, 0.001054 and 0.000591."""
    assert _pld.epsilon_below(noise, 1e-6, 10**6, 1e-7) <= truth
    assert _pld.epsilon_above(noise, 1e-6, 10**6, 1e-7) >= 0.98 * truth


def test_tiny_sample_rates_with_many_steps_are_composed_as_others():
    """dp-accounting raises a number of losses to the power of the steps, which takes half a minute."""
    above = _pld.epsilon_above(1.0, 1e-7, 10**7, 1e-7)
    assert 0.999 * above < _pld.epsilon_below(1.0, 1e-7, 10**7, 1e-7) <= above < 0.0014


SETTINGS = [
    (RATE, 300, 1e-5),
    pytest.param(3e-3, 300, 1e-5, marks=pytest.mark.long),
    pytest.param(0.01, 1000, 1e-5, marks=pytest.mark.long),
    pytest.param(0.01, 100, 1e-5, marks=pytest.mark.long),
    pytest.param(0.01, 1, 1e-3, marks=pytest.mark.long),
    (1.0, 50, 1e-10),
]


@pytest.mark.parametrize(("rate", "steps", "delta"), SETTINGS)
def test_interpolated_epsilons_are_never_above_the_truth(rate, steps, delta):
    for mu in np.geomspace(0.45, 2.6, 4):
        above = _pld.epsilon_above(1 / mu, rate, steps, delta)
        quick = dpaudit.training_epsilon(float(mu), rate, steps, delta)
        assert above * 0.94 - 1e-3 <= quick <= above


def test_between_earlier_questions_the_accountant_is_not_asked_again(monkeypatch):
    def composed_again(*setting):
        raise AssertionError(f"composed {setting}")

    for mu in (0.2, 0.24):
        dpaudit.training_epsilon(mu, 1.0, 99, DELTA)
    monkeypatch.setattr(_subsampled, "epsilon_below", composed_again)
    for mu in np.geomspace(0.2, 0.24, 50):
        assert dpaudit.training_epsilon(float(mu), 1.0, 99, DELTA) > 0


@settings(max_examples=15, deadline=None)
@given(st.floats(math.log(0.05), math.log(0.8)))
def test_interpolated_epsilons_are_close_where_trainings_are(log_mu):
    mu = math.exp(log_mu)
    exact = _pld.epsilon_below(1 / mu, RATE, 300, DELTA)
    quick = dpaudit.training_epsilon(mu, RATE, 300, DELTA)
    assert exact * (1 - 2e-3) - 1e-9 <= quick <= exact


def test_epsilon_is_infinite_at_delta_zero_and_finite_for_any_noise():
    assert dpaudit.training_epsilon(1.0, 0.1, 10, 0.0) == math.inf
    assert 1e4 < dpaudit.training_epsilon(1e9, 0.1, 10, 1e-5) < math.inf


def test_a_bound_of_nothing_composes_to_nothing():
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=1.0, num_steps=2500, delta=0.01)
    nothing = dpaudit.Observations(with_canary=np.zeros(100), without_canary=np.zeros(100), scores_of="step")
    for tradeoff in (None, dpaudit.ApproximateDP(), dpaudit.PureDP(), dpaudit.Laplace()):
        assert dpaudit.audit(nothing, claim=claim, tradeoff=tradeoff).bound.epsilon == 0


@pytest.mark.parametrize(
    "mu", [1e-6, pytest.param(1e-3, marks=pytest.mark.long), pytest.param(3.0, marks=pytest.mark.long), 9.0]
)
def test_extreme_steps_compose_to_something_finite(mu):
    assert 0 <= dpaudit.training_epsilon(mu, 0.01, 100, DELTA) < math.inf


def test_epsilons_around_those_that_floats_cannot_exponentiate_are_finite_and_grow():
    noises = np.geomspace(0.3, 0.2, 13)  # epsilon from 510 to 1,440; e^709 is the largest double
    for side in (_pld.epsilon_above, _pld.epsilon_below):
        found = [side(float(noise), 0.1, 1000, DELTA) for noise in noises]
        assert (np.diff(found) > 0).all()
        assert found[-1] < 1500
    assert dpaudit.training_epsilon(4.0, 0.1, 1000, DELTA) == pytest.approx(820.5, rel=2e-3)


def test_no_leak_and_no_noise_compose_to_nothing_and_everything():
    assert dpaudit.training_epsilon(0.0, RATE, STEPS, DELTA) == 0
    assert dpaudit.training_epsilon(math.inf, RATE, STEPS, DELTA) == math.inf


def test_full_batches_compose_as_gaussians_do():
    composed = dpaudit.training_epsilon(0.1, 1.0, 100, DELTA)
    assert composed == pytest.approx(dpaudit.Gaussian().epsilon(1.0, DELTA), rel=2e-3)


def test_the_curve_of_the_flagship_training_is_the_known_one():
    family = dpaudit.SubsampledGaussian(RATE, STEPS)
    np.testing.assert_allclose(family.fnr(1 / 2.577, FPR), FLAGSHIP, atol=1e-3)
    np.testing.assert_allclose(_exact_curve(2.577, RATE, STEPS).fnr(FPR), FLAGSHIP, atol=2e-4)


@pytest.mark.long
def test_the_papers_algorithm_4_approaches_the_curve_from_below():
    exact = _exact_curve(2.577, RATE, STEPS).fnr(FPR)
    gaps = []
    for lines in (5, 20, 100):
        paper = dpaudit.SubsampledGaussian(RATE, STEPS, num_lines=lines).fnr(1 / 2.577, FPR)
        assert (paper <= exact + 1e-12).all()
        gaps.append(float((exact - paper).max()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 3e-3


@settings(max_examples=6, deadline=None)
@given(log_parameter=st.floats(math.log(0.15), math.log(0.9)))
def test_interpolated_curves_are_close_to_the_exact_and_never_above(log_parameter):
    parameter = math.exp(log_parameter)
    fpr = np.asarray([1e-5, 0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
    exact = _exact_curve(1 / parameter, RATE, 300).fnr(fpr)
    quick = dpaudit.SubsampledGaussian(RATE, 300).fnr(parameter, fpr)
    assert (quick <= exact).all()
    np.testing.assert_allclose(quick, exact, atol=5e-4)


def test_a_point_on_a_curve_gives_back_its_parameter():
    family = dpaudit.SubsampledGaussian(RATE, 300)
    fnr = family.fnr(0.4, FPR)
    np.testing.assert_allclose(family.parameter(FPR, fnr), 0.4, rtol=1e-6)
    assert float(family.parameter(np.asarray(0.5), np.asarray(0.6))) == 0
    assert family.balanced_error(0.4) < 0.5
    assert family.with_epsilon(family.epsilon(0.4, DELTA), DELTA) == pytest.approx(0.4, rel=1e-5)


@pytest.mark.parametrize(
    "inference",
    [
        dpaudit.JointExact(),
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (dpaudit.ClopperPearson(), dpaudit.Betting(), dpaudit.Posterior())
        ),
    ],
)
def test_whole_runs_are_tested_against_the_composed_curve(inference):
    rng = np.random.default_rng(0)
    family = dpaudit.SubsampledGaussian(0.1, 50)
    present = family.fnr(1.0, rng.random(1500))
    observations = dpaudit.Observations(with_canary=-present, without_canary=-rng.random(1500))
    rule = dpaudit.Fixed(-family.balanced_error(1.0))
    found = dpaudit.lower_bound(
        observations, delta=DELTA, tradeoff=family, inference=inference, threshold=rule
    )
    assert 0.6 < found.parameter < 1.05
    assert 0 < found.epsilon < dpaudit.training_epsilon(1.05, 0.1, 50, DELTA)


@pytest.mark.long
def test_a_whole_run_claim_is_refuted_by_a_leakier_training():
    rng = np.random.default_rng(1)
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.5, sample_rate=0.1, num_steps=50, delta=DELTA)
    family = dpaudit.SubsampledGaussian(0.1, 50)
    for noise, verdict in [(1.5, dpaudit.Verdict.NO_VIOLATION), (0.8, dpaudit.Verdict.VIOLATION)]:
        present = family.fnr(1 / noise, rng.random(3000))
        observations = dpaudit.Observations(with_canary=-present, without_canary=-rng.random(3000))
        assert dpaudit.audit(observations, claim=claim, tradeoff=family).verdict is verdict
    with pytest.raises(dpaudit.InputError, match=r"num_steps=50, got sample_rate=0\.1 and num_steps=60"):
        dpaudit.audit(observations, claim=claim, tradeoff=dpaudit.SubsampledGaussian(0.1, 60))


def test_calibrated_noise_keeps_epsilon_and_wastes_little():
    noise = dpaudit.noise_for_epsilon(8.0, sample_rate=RATE, num_steps=STEPS, delta=DELTA)
    assert _pld.epsilon_above(noise, RATE, STEPS, DELTA) <= 8.0
    assert noise == pytest.approx(2.577, rel=1e-3)


@pytest.mark.parametrize(("noise", "epsilon"), PAPERS)
def test_the_search_for_the_noise_starts_near_it(noise, epsilon):
    assert 1 / _subsampled._limit_guess(epsilon, RATE, STEPS) == pytest.approx(noise, rel=0.1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.GaussianDpEvent(1.0),
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(1.0)), 20
        ),
    ],
    ids=lambda e: type(e).__name__,
)
def test_any_event_is_a_claim(event):
    accountant = dp_accounting.pld.PLDAccountant().compose(event)
    claim = dpaudit.Claim.accounted(event, delta=DELTA)
    assert claim.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=2e-3)
    rng = np.random.default_rng(0)
    leak = dpaudit.Observations(
        with_canary=rng.normal(1, 0.2, 500), without_canary=rng.normal(0, 0.2, 500), normalized=True
    )
    assert dpaudit.audit(leak, claim=claim).verdict is dpaudit.Verdict.VIOLATION


@pytest.mark.parametrize(
    ("event", "delta", "epsilon"),
    [(dp_accounting.LaplaceDpEvent(1.0), 1e-9, 1.0), (dp_accounting.GaussianDpEvent(1.0), 1e-13, 7.56)],
    ids=repr,
)
def test_an_event_has_its_epsilon_at_small_deltas(event, delta, epsilon):
    assert dpaudit.Claim.accounted(event, delta=delta).epsilon == pytest.approx(epsilon, rel=2e-3)


def test_an_event_that_is_the_gaussian_has_the_gaussians_curve():
    claim = dpaudit.Claim.accounted(dp_accounting.GaussianDpEvent(1.0), delta=DELTA)
    curve = claim.hypothesis(None).tradeoff.fnr(1.0, FPR)
    np.testing.assert_allclose(curve, dpaudit.Gaussian().fnr(1.0, FPR), atol=1e-3)


def dpsgd(**wrong):
    settings = {"noise_multiplier": 1.0, "sample_rate": 0.5, "num_steps": 1, "delta": 0.1, **wrong}
    return dpaudit.Claim.dpsgd(**settings)


def noise(epsilon, delta):
    return dpaudit.noise_for_epsilon(epsilon, sample_rate=0.1, num_steps=5, delta=delta)


def accounted(event):
    return dpaudit.Claim.accounted(event, delta=DELTA)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: accounted("gaussian"), "event must be a dp_accounting.DpEvent"),
        (
            lambda: accounted(dp_accounting.UnsupportedDpEvent()),
            "event must be supported by dp-accounting's PLD accountant, got",
        ),
        (lambda: accounted(dp_accounting.NonPrivateDpEvent()), "finite epsilon at some delta"),
        (
            lambda: dpaudit.Claim.accounted(dp_accounting.LaplaceDpEvent(1.0), delta=0),
            "a finite epsilon at delta=0",
        ),
        (
            lambda: dpaudit.Claim.gaussian(noise_multiplier=0, delta=DELTA),
            "noise_multiplier must be positive, got 0",
        ),
        (
            lambda: dpaudit.Claim.gaussian(noise_multiplier=1, delta=-1),
            "delta must be at least 0 and below 1, got -1",
        ),
        (lambda: dpaudit.Claim.approximate_dp(epsilon=-1, delta=DELTA), "epsilon must be at least 0, got -1"),
        (lambda: dpsgd(sample_rate=1.5), r"sample_rate must be above 0 and at most 1, got 1\.5"),
        (lambda: dpsgd(num_steps=0), "num_steps must be at least 1, got 0"),
        (lambda: dpsgd(delta=0), "delta must be positive, got 0"),
        (lambda: dpaudit.Claim.gaussian(noise_multiplier=1, delta=0), "delta must be positive"),
        (lambda: dpsgd(num_steps=1.5), "whole number"),
        (lambda: dpaudit.SubsampledGaussian(0.1, 5, num_lines=1), "num_lines must be at least 2, got 1"),
        (lambda: dpaudit.training_epsilon(-1.0, 0.1, 10, DELTA), "mu must be at least 0, got -1"),
        (lambda: dpaudit.training_epsilon(math.nan, 0.1, 10, DELTA), "mu must be at least 0, got nan"),
        (
            lambda: dpaudit.training_epsilon(1.0, 2.0, 10, DELTA),
            "sample_rate must be above 0 and at most 1, got 2",
        ),
        (lambda: noise(8.0, 0), "delta must be positive, got 0: Gaussian noise has no finite epsilon at"),
        (lambda: noise(-8.0, 0.1), "epsilon must be positive, got -8"),
    ],
)
def test_impossible_claims_get_a_sentence(make, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        make()


def test_claims_say_what_they_are():
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.1, num_steps=50, delta=DELTA)
    assert "DP-SGD, noise multiplier 1, sample rate 0.1, 50 steps: epsilon = " in str(claim)
    assert "rate 0.5, 1 step: epsilon = " in str(dpsgd(num_steps=1))
    assert "one Gaussian step" in repr(dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=DELTA))
    curve = dpaudit.Claim.curve(dpaudit.Laplace(), parameter=2.0, delta=0.0)
    assert curve.epsilon == 2.0


def test_a_generic_bound_on_a_step_composes_as_the_gaussian_step_with_that_epsilon():
    claim = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.1, num_steps=50, delta=DELTA)
    step = claim.hypothesis(dpaudit.ApproximateDP())
    gaussian = claim.hypothesis(None)
    assert step.parameter == pytest.approx(dpaudit.Gaussian().epsilon(1.0, DELTA))
    assert step.epsilon(step.parameter) == pytest.approx(gaussian.epsilon(1.0), rel=1e-6)


@pytest.mark.parametrize(
    ("noise", "num_steps", "delta"),
    [
        (1.0, 10, 1e-12),
        (300.0, 100_000, 1e-10),
        (100.0, 10_000, 1e-14),
        (1000.0, 10**6, 1e-13),
        (30.0, 1000, 1e-5),
    ],
)
def test_bounds_of_epsilon_hold_where_rounding_errors_are_as_large_as_delta(noise, num_steps, delta):
    mu = math.sqrt(num_steps) / noise
    exact = dpaudit.Gaussian().epsilon(mu, delta)
    assert _pld.epsilon_below(noise, 1.0, num_steps, delta) <= exact
    assert _pld.epsilon_above(noise, 1.0, num_steps, delta) >= exact
