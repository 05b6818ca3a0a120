"""One-run bounds against the formulas as they are printed, and against simulated channels."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from simulated_coverage import tally
from statistical_limits import count_range, covers

import dpaudit
from dpaudit.stats._one_run import _p_value, too_many_correct


@st.composite
def guesses(draw, most=60):
    m = draw(st.integers(1, most))
    r = draw(st.integers(0, m))
    return dpaudit.Guesses(num_canaries=m, num_guesses=r, num_correct=draw(st.integers(0, r)))


@given(guesses(), st.floats(0, 5), st.sampled_from([0.0, 1e-5, 1e-2]))
def test_the_p_value_is_steinkes_formula(g, epsilon, delta):
    r, v, m = g.num_guesses, g.num_correct, g.num_canaries
    s = math.exp(epsilon) / (1 + math.exp(epsilon))
    at_least = stats.binom.sf(v - 1, r, s)
    shares = [(stats.binom.sf(v - i - 1, r, s) - at_least) / i for i in range(1, v + 1)]
    slow = at_least + 2 * m * delta * max(shares, default=0.0)
    assert _p_value(g, epsilon, delta) == pytest.approx(slow, rel=1e-9, abs=1e-12)


def slow_recursion(g, mu, error):
    """Algorithm 3 with its arrays r and h, for mu-GDP."""
    c, total, m = g.num_correct, g.num_guesses, g.num_canaries
    r, h = np.zeros(c + 1), np.zeros(c + 1)
    r[c], h[c] = error * c / m, error * (total - c) / m
    for i in range(c - 1, -1, -1):
        h[i] = max(h[i + 1], stats.norm.cdf(stats.norm.ppf(min(r[i + 1], 1.0)) - mu))
        r[i] = r[i + 1] + i / (total - i) * (h[i] - h[i + 1])
    return r[0] + h[0] > total / m


@given(guesses(), st.floats(0.01, 4))
def test_the_f_dp_recursion_is_the_papers(g, mu):
    if g.num_correct:
        assert too_many_correct(g, dpaudit.Gaussian(), mu, 0.05) == slow_recursion(g, mu, 0.05)


@given(guesses())
def test_more_correct_guesses_never_lower_a_bound(g):
    if g.num_correct < g.num_guesses:
        better = dpaudit.Guesses(
            num_canaries=g.num_canaries, num_guesses=g.num_guesses, num_correct=g.num_correct + 1
        )
        for one in (
            lambda x: dpaudit.one_run_bound(x, delta=1e-5),
            lambda x: dpaudit.one_run_fdp_bound(x, tradeoff=dpaudit.Gaussian(), delta=1e-5),
        ):
            assert one(better).parameter >= one(g).parameter * (1 - 1e-5) - 1e-6


def one_run(epsilon, kind):
    """Randomised response on every canary: eps-DP, and the worst there is."""

    def once(rng):
        present = rng.random(400) < 0.5
        truth = rng.random(400) < math.exp(epsilon) / (1 + math.exp(epsilon))
        scores = (present == truth) + 0.1 * rng.random(400)
        g = dpaudit.Guesses.from_scores(scores, present, num_guesses=100)
        if kind == "steinke":
            return dpaudit.one_run_bound(g, delta=1e-5).parameter
        return dpaudit.one_run_fdp_bound(g, tradeoff=dpaudit.PureDP(), delta=0.0).parameter

    return once


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["steinke", "fdp"])
@pytest.mark.parametrize("epsilon", [0.0, pytest.param(1.0, marks=pytest.mark.long), 2.5])
def test_one_run_bounds_are_sound_for_randomised_response(kind, epsilon):
    found = tally(one_run(epsilon, kind), epsilon, repetitions=300, seed=3)
    assert covers(found)
    if epsilon > 0:
        assert found.mean_ratio > 0.5


def gaussian_run(mu):
    def once(rng):
        present = rng.random(600) < 0.5
        scores = rng.normal(size=600) + mu * present
        g = dpaudit.Guesses.from_scores(scores, present, num_guesses=150)
        return dpaudit.one_run_fdp_bound(g, tradeoff=dpaudit.Gaussian(), delta=1e-5).parameter

    return once


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_the_f_dp_bound_is_sound_for_gaussian_channels(mu):
    assert covers(tally(gaussian_run(mu), mu, repetitions=150, seed=4))


def test_the_f_dp_bound_beats_the_generic_one_on_a_gaussian():
    g = dpaudit.Guesses(num_canaries=1000, num_guesses=100, num_correct=95)
    generic = dpaudit.one_run_bound(g, delta=1e-5).epsilon
    assert dpaudit.one_run_fdp_bound(g, tradeoff=dpaudit.Gaussian(), delta=1e-5).epsilon > 1.4 * generic


def test_no_guesses_say_nothing():
    g = dpaudit.Guesses(num_canaries=10, num_guesses=0, num_correct=0)
    assert dpaudit.one_run_bound(g, delta=1e-5).epsilon == 0
    assert dpaudit.one_run_fdp_bound(g, tradeoff=dpaudit.Gaussian(), delta=1e-5).epsilon == 0


def test_guesses_from_scores_take_both_ends():
    scores = np.asarray([5.0, 4.0, 3.0, 2.0, 1.0])
    present = np.asarray([True, False, True, False, True])
    assert dpaudit.Guesses.from_scores(scores, present, num_guesses=4).num_correct == 2
    assert dpaudit.Guesses.from_scores(scores, present, num_guesses=0).num_correct == 0


@pytest.mark.parametrize("number", [100, 999, 1000])
def test_equal_scores_reveal_nothing_in_whatever_order_canaries_are_listed(number):
    for present in (np.arange(1000) >= 500, np.arange(1000) < 500, np.arange(1000) % 2 == 0):
        g = dpaudit.Guesses.from_scores(np.zeros(1000), present, num_guesses=number)
        low, high = count_range(number, 0.5, comparisons=9)
        assert low <= g.num_correct <= high
        assert dpaudit.one_run_bound(g, delta=1e-5).epsilon < 0.5


def test_only_ties_across_a_cut_are_broken():
    scores = np.repeat([0.0, 1.0, 2.0], [30, 40, 30])
    present = np.repeat([False, True, False, True], [30, 20, 20, 30])
    assert dpaudit.Guesses.from_scores(scores, present, num_guesses=60).num_correct == 60
    first = dpaudit.Guesses.from_scores(scores, present, num_guesses=80)
    assert 60 < first.num_correct < 80
    assert dpaudit.Guesses.from_scores(scores, present, num_guesses=80) == first


@pytest.mark.parametrize(
    ("scores", "present", "number", "sentence"),
    [
        ([1.0, 2.0], [True], 1, "one-dimensional and of the same length"),
        ([1.0, np.inf], [True, False], 1, r"scores\[1\]=inf"),
        ([1.0], [True], 2, "num_guesses must be at most 1, the number of scores, got 2"),
        ([1.0, 2.0], [0.3, 0.7], 1, "only 0 and 1"),
    ],
)
def test_bad_guesses_get_a_sentence(scores, present, number, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.Guesses.from_scores(scores, present, num_guesses=number)


def parity_run(knows_other_coins):
    """The release is the parity of all coins by randomized response, which is eps-DP (eps = 3) for each coin.

    Given the other coins, it reveals each one: all guesses are right together. Alone it reveals nothing.
    """

    def once(rng):
        present = rng.random(100) < 0.5
        is_odd = bool(present.sum() % 2) == (rng.random() < math.exp(3) / (1 + math.exp(3)))
        others = (present.sum() - present) % 2 == 1
        scores = np.where(knows_other_coins, is_odd ^ others, is_odd).astype(float)
        g = dpaudit.Guesses.at_threshold(scores, present, threshold=0.5)
        return dpaudit.one_run_bound(g, delta=0.0).parameter

    return once


def test_guesses_that_know_other_coins_exceed_the_truth():
    """Why the bounds state that a guess depends on the release alone."""
    assert tally(parity_run(True), 3.0, repetitions=100, seed=0).exceeded > 0.85
    assert tally(parity_run(False), 3.0, repetitions=100, seed=0).exceeded == 0
    bound = dpaudit.one_run_bound(dpaudit.Guesses(num_canaries=9, num_guesses=9, num_correct=9), delta=0.0)
    assert any("depend only on what the training run released" in text for text in bound.assumptions)


def threshold_run(mu):
    def once(rng):
        present = rng.random(600) < 0.5
        ratios = mu * (rng.normal(size=600) + mu * present - mu / 2)
        g = dpaudit.Guesses.at_threshold(ratios, present, threshold=0.0)
        return dpaudit.one_run_fdp_bound(g, tradeoff=dpaudit.Gaussian(), delta=1e-5).parameter

    return once


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_guesses_of_all_canaries_at_a_threshold_are_sound(mu):
    assert covers(tally(threshold_run(mu), mu, repetitions=150, seed=4))


def test_a_threshold_loses_no_guesses_to_forced_halves():
    """Where presence is certain, halves are wrong about every canary by which the coins were uneven."""
    present = np.arange(100) < 60
    ratios = np.where(present, 5.0, -5.0)
    assert dpaudit.Guesses.at_threshold(ratios, present, threshold=0.0).num_correct == 100
    assert dpaudit.Guesses.from_scores(ratios, present, num_guesses=100).num_correct == 90


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), min_size=1, max_size=25), st.floats(-9, 9))
def test_guesses_at_a_threshold_are_counted_one_by_one(pairs, threshold):
    scores, present = zip(*pairs, strict=True)
    found = dpaudit.Guesses.at_threshold(scores, present, threshold=threshold)
    assert found.num_guesses == found.num_canaries == len(pairs)
    assert found.num_correct == sum((score > threshold) == truth for score, truth in pairs)
