"""Presence that fair coins cannot have decided is refused, and that of fair ones is not."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats
from score_samples import bound
from statistical_limits import most_flagged

import dpaudit
from dpaudit.stats._presence import CoinCheck

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=5.0, delta=1e-5)


def noise(present, seed=0):
    scores = np.random.default_rng(seed).standard_normal(present.shape)
    return dpaudit.Observations.from_presence(scores, present, normalized=True)


def checked(present):
    check = CoinCheck()
    check.add(present)
    return check


def is_refused(present):
    try:
        checked(present).require_fair()
    except dpaudit.InputError:
        return True
    return False


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.45, 0.55, 0.99])
def test_coins_that_are_not_fair_are_refused(rate):
    """Guessing what is likelier would be right more often than a fair coin lets anybody be."""
    present = np.random.default_rng(0).random((500, 64)) < rate
    with pytest.raises(dpaudit.InputError, match=r"fair coin .* of 32,000 present overall"):
        noise(present)


def test_a_canary_that_is_always_there_is_named():
    one = np.random.default_rng(1).random((500, 64)) < 0.5
    one[:, 7] = True
    with pytest.raises(dpaudit.InputError, match="here: 500 of 500 present for one canary"):
        noise(one)


# Masks that no independent fair coins decided, each with an offset of the scores that follows it.
def constant(steps, size, rng):
    return np.tile(rng.permuted(np.arange(size) % 2 == 0), (steps, 1))


def alternating(steps, size, rng):
    return constant(steps, size, rng) ^ (np.arange(steps)[:, None] % 2 == 0)


def by_epoch(steps, size, rng):
    return np.repeat(rng.random((4, size)) < 0.5, -(-steps // 4), axis=0)[:steps]


def one_coin(steps, size, rng):
    return np.repeat(rng.random((steps, 1)) < 0.5, size, axis=1)


def opposites(steps, size, rng):
    own = rng.random((steps, size // 2)) < 0.5
    return np.concatenate([own, ~own], axis=1)


def exactly_half(steps, size, rng):
    return rng.permuted(np.tile(np.arange(size) % 2 == 0, (steps, 1)), axis=1)


@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize("steps", [5, 6, 8, 12, 40, 300])
@pytest.mark.parametrize("mask", [constant, alternating])
def test_a_regular_mask_without_a_leak_is_refused(mask, steps, size):
    """Before, exactly half of each step was taken for sound, and refuted whatever the mechanism."""
    present = mask(steps, size, np.random.default_rng(0))
    with pytest.raises(dpaudit.InputError, match=r"in every one of|in every other step"):
        noise(present)


@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize("steps", [20, 60, 300])
@pytest.mark.parametrize("mask", [by_epoch, one_coin, opposites, exactly_half])
def test_coins_that_depend_on_each_other_are_refused(mask, steps, size):
    rng = np.random.default_rng(0)
    assert all(is_refused(mask(steps, size, rng)) for _ in range(10))


@pytest.mark.parametrize(
    ("steps", "size"), [(2, 2), (5, 2), (9, 2), (3, 4), (7, 4), (2, 16), (6, 16), (5, 64)]
)
def test_half_of_each_step_at_random_is_refused_or_seldom_refuted(steps, size, is_long):
    """Offsets of the coordinates alone, and no leak: too few steps to tell the mask from fair coins."""
    runs, rng = 1000 if is_long else 150, np.random.default_rng(7)
    flagged = 0
    for _ in range(runs):
        present = exactly_half(steps, size, rng)
        scores = np.tile(np.arange(size) < size // 2, (steps, 1)) + 1e-9 * rng.standard_normal(present.shape)
        if is_refused(present):
            continue
        observations = dpaudit.Observations.from_presence(scores, present, normalized=True)
        refuted = bound(observations, dpaudit.Betting(), dpaudit.Fixed(0.5))
        flagged += refuted.parameter > 0.01
    assert flagged <= most_flagged(runs, broken=0.25)


@pytest.mark.parametrize("size", [2, 4, 16, 64])
@pytest.mark.parametrize("steps", [20, 30, 40, 100, 300])
def test_a_constant_canary_is_refused(steps, size):
    """Bets on far scores can rest on one canary alone, if its scores have an offset of their own."""
    present = np.random.default_rng(3).random((steps, size)) < 0.5
    present[:, 0] = True
    assert is_refused(present)


def test_many_constant_canaries_are_refused_in_few_steps():
    """No single one of them is unusual in 8 steps, but 8 of 64 are."""
    present = np.random.default_rng(3).random((8, 64)) < 0.5
    present[:, :8] = np.arange(8) % 2 == 0
    assert is_refused(present)


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("steps", [12, 14])
def test_a_constant_canary_is_refused_or_seldom_leads_to_a_violation(steps, size, is_long):
    runs, rng = 1000 if is_long else 60, np.random.default_rng(3)
    flagged = 0
    for _ in range(runs):
        present = rng.random((steps, size)) < 0.5
        present[:, 0] = True
        if is_refused(present):
            continue
        scores = rng.standard_normal(present.shape) + 100 * (np.arange(size) == 0)
        observations = dpaudit.Observations.from_presence(scores, present, normalized=True)
        flagged += dpaudit.audit(observations, claim=CLAIM).verdict is dpaudit.Verdict.VIOLATION
    assert flagged <= most_flagged(runs, broken=0.35)


@pytest.mark.parametrize("shape", [(1, 1), (2, 64), (500, 1), (500, 64), (3, 4000)])
def test_fair_coins_are_hardly_ever_refused(shape):
    for seed in range(100):
        assert not is_refused(np.random.default_rng(seed).random(shape) < 0.5)


def all_masks(steps, size):
    for coins in itertools.product([False, True], repeat=steps * size):
        yield np.asarray(coins).reshape(steps, size)


@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (8, 1), (5, 2), (2, 5), (3, 3), (4, 2)])
def test_the_wealth_of_the_predictors_is_1_on_average_under_fair_coins(shape):
    """By Markov's inequality, coins are then refused as seldom as stated; here over all masks."""
    masks = list(all_masks(*shape))
    wealth = [checked(mask).wealth() for mask in masks]
    assert np.mean(np.exp2(wealth)) == pytest.approx(1, rel=1e-9)
    assert np.mean([is_refused(mask) for mask in masks]) <= 2**-6


@given(present=hnp.arrays(np.bool_, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6)), data=st.data())
def test_the_next_step_does_not_change_the_wealth_on_average(present, data):
    """So the probability that fair coins are ever refused does not grow with the number of looks."""
    wealth = []
    for coins in itertools.product([False, True], repeat=present.shape[1]):
        check = CoinCheck()
        cut = data.draw(st.integers(0, len(present))) if not wealth else 0
        check.add(present[:cut])
        check.add(present[cut:])
        before = check.wealth()
        check.add(np.asarray([coins]))
        wealth.append(check.wealth())
    assert np.logaddexp2.reduce(wealth) - present.shape[1] == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize("mask", [constant, alternating, exactly_half])
def test_a_live_bound_checks_its_coins_as_the_audit_does(mask):
    recorder = dpaudit.Recorder(claim=CLAIM, num_steps=100)
    present = mask(100, 8, np.random.default_rng(0))
    for row in present:
        recorder.record(row, row)
    for look in (recorder.live, recorder.curve, recorder.trajectory, recorder.audit):
        with pytest.raises(dpaudit.InputError, match="fair coin"):
            look()


def test_live_bounds_of_fair_coins_are_shown_at_any_time():
    recorder, rng = dpaudit.Recorder(claim=CLAIM, num_steps=60), np.random.default_rng(0)
    for _ in range(60):
        recorder.record(rng.standard_normal(8), rng.random(8) < 0.5)
        recorder.live()
    resumed = dpaudit.Recorder(claim=CLAIM, num_steps=60)
    resumed.load_state_dict(recorder.state_dict())
    assert resumed.live() == recorder.live()


def test_pairs_need_no_coin_and_say_so():
    rng = np.random.default_rng(0)
    scores, present = rng.standard_normal((300, 2)), np.tile([False, True], (300, 1))
    observations = dpaudit.Observations.from_presence(scores, present, paired=True, normalized=True)
    np.testing.assert_array_equal(observations.with_canary, scores[:, 1:])
    np.testing.assert_array_equal(observations.without_canary, scores[:, :1])
    assumed = dpaudit.audit(observations, claim=CLAIM).bound.assumptions
    assert any("scored with and without it" in text for text in assumed)
    assert not any("coin" in text for text in assumed)


@pytest.mark.parametrize(
    ("shape", "present", "ids", "sentence"),
    [
        ((2, 2), [[True, False], [True, True]], None, "got 2 of 2 scores with it in step 1"),
        ((2, 4), np.tile([True, True, False, False], (2, 1)), list("aabb"), "one canary twice on a side"),
        ((2, 4), np.tile([True, False, True, False], (2, 1)), list("aabc"), "'b', 'c' has another number"),
        ((4,), [True, False, True, False], None, "got one dimension"),
    ],
)
def test_what_is_not_a_pair_is_refused(shape, present, ids, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.Observations.from_presence(np.zeros(shape), present, paired=True, ids=ids)


def test_a_share_of_present_canaries_that_is_not_a_half_is_refused_for_guesses():
    """Who knows that 90 % are present is right in 90 % of all guesses, without any leak."""
    with pytest.raises(dpaudit.InputError, match="900 of 1,000 are present"):
        dpaudit.Guesses.from_scores(np.arange(1000), np.arange(1000) < 900, num_guesses=1000)
    dpaudit.Guesses.from_scores(np.arange(1000), np.arange(1000) < 520, num_guesses=1000)


def test_what_presence_rests_on_is_said():
    fair = noise(np.random.default_rng(2).random((500, 64)) < 0.5)
    assert any("fair coin" in text for text in dpaudit.audit(fair, claim=CLAIM).bound.assumptions)
    apart = dpaudit.Observations(with_canary=np.arange(50.0), without_canary=np.arange(50.0))
    assert any("the only difference" in text for text in dpaudit.audit(apart, claim=CLAIM).bound.assumptions)


def pairs_drawn_in_each_step(steps, size, rng):
    return rng.permuted(opposites(steps, size, rng), axis=1)


@pytest.mark.parametrize(("steps", "size", "noise"), [(3, 4096, 5.0), (6, 1024, 2.0)])
def test_opposite_pairs_drawn_in_each_step_are_refused(steps, size, noise):
    """Before, they passed, and a mechanism that may reveal an exchange was refuted in every run."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        present = pairs_drawn_in_each_step(steps, size, rng)
        with pytest.raises(
            dpaudit.InputError, match=rf"exactly half of the canaries in every one of {steps} "
        ):
            dpaudit.Observations.from_presence(present / noise, present, normalized=True)


@pytest.mark.parametrize("size", [2, 3, 16, 1024])
def test_exactly_half_of_fair_coins_is_refused_at_most_once_in_8000_runs(size):
    """Exact: the probability of half of the canaries in each of the fewest steps that are refused."""
    half = stats.binom.pmf([size // 2, (size + 1) // 2], size, 0.5)[: 1 + size % 2].sum()
    check, steps = CoinCheck(), 0
    while check._halves[0] < 13:
        steps += 1
        check.add(np.arange(size)[None] < size // 2)
    assert half**steps < 1 / 8000
