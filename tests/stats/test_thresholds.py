"""A threshold may depend on the past, on a part held out or on nothing; never on what it counts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from score_samples import bound, gaussian_scores

import dpaudit
from dpaudit.stats._counts import StepScores, count
from dpaudit.stats._power import AuditDesign
from dpaudit.stats.inference import BoundQuery
from dpaudit.stats.thresholds._chosen import _from_earlier_steps


def test_fixed_counts_at_its_threshold():
    observations = gaussian_scores(2.0, 300)
    found = bound(observations, rule=dpaudit.Fixed(1.0))
    assert found.threshold == 1.0
    assert found.counts == count(observations, 1.0)


@pytest.mark.parametrize("rule", [dpaudit.Fixed(1.0), dpaudit.HeldOut(0.25), dpaudit.Simultaneous()], ids=str)
@pytest.mark.parametrize(("num_absent", "num_present"), [(80, 40), (40, 80)])
def test_the_design_of_an_audit_has_as_many_scores_as_its_rule_counts(rule, num_absent, num_present):
    rng = np.random.default_rng(0)
    observations = dpaudit.Observations(
        with_canary=rng.normal(1, 1, num_present), without_canary=rng.normal(0, 1, num_absent)
    )
    counts = bound(observations, rule=rule).counts
    query = BoundQuery(dpaudit.Gaussian(), 1e-5, 0.05)
    design = AuditDesign.of(observations, dpaudit.ClopperPearson(), rule, query)
    assert (design.num_absent, design.num_present) == (counts.num_absent, counts.num_present)
    assert design.num_steps == min(counts.num_absent, counts.num_present)
    assert design.query.error_rate == rule.error(0.05, num_absent)


def test_optimal_solves_the_papers_equation():
    noise, delta = 1.3, 1e-5
    w = dpaudit.Optimal(noise).threshold(delta)
    right = stats.norm.cdf((1 - w) / noise) - stats.norm.pdf((1 - w) / noise) / stats.norm.pdf(
        w / noise
    ) * stats.norm.cdf(-w / noise)
    assert right == pytest.approx(delta, rel=1e-6)


def test_optimal_refuses_delta_zero():
    with pytest.raises(dpaudit.InputError, match="delta must be positive"):
        bound(gaussian_scores(1.0, 10), rule=dpaudit.Optimal(1.0), delta=0.0)


@pytest.mark.parametrize("the_first", [True, False])
@pytest.mark.parametrize("shape", [200, (50, 4)])
def test_held_out_counts_only_what_it_did_not_choose_on(shape, the_first):
    observations = gaussian_scores(1.0, shape)
    rule = dpaudit.HeldOut(0.3, seed=5)
    absent, present, rest = rule.split(observations, the_first=the_first)
    for part, side in ((present, "with_canary"), (absent, "without_canary")):
        other, whole = getattr(rest, side).ravel(), getattr(observations, side).ravel()
        assert np.array_equal(np.sort(np.concatenate([part, other])), np.sort(whole))
        assert not np.intersect1d(part, other).size
        if the_first:
            assert np.array_equal(part, whole[: part.size])
    if not the_first:
        found = bound(observations, rule=rule)
        assert found.counts == count(rest, found.threshold)


def test_held_out_bets_on_the_steps_after_those_it_chose_on():
    observations = gaussian_scores(1.0, (40, 8))
    found = bound(observations, dpaudit.Betting(), dpaudit.HeldOut(0.25))
    assert found.counts.num_absent == 30 * 8


def test_held_out_keeps_the_steps_of_coins_together():
    rng = np.random.default_rng(0)
    observations = dpaudit.Observations.from_presence(rng.normal(size=(20, 6)), rng.random((20, 6)) < 0.5)
    absent, present, rest = dpaudit.HeldOut(0.25).split(observations)
    assert rest.num_steps == 15
    assert absent.size + present.size == 5 * 6
    assert present.size + rest.with_canary.size == observations.with_canary.size


@given(st.integers(0, 200))
def test_held_out_copes_with_steps_in_which_every_coin_fell_alike(seed):
    rng = np.random.default_rng(seed)
    present = rng.random((8, 2)) < 0.5
    present[0] = [True, False]
    present[7] = [True, False]
    observations = dpaudit.Observations.from_presence(rng.normal(size=(8, 2)), present)
    absent, held, rest = dpaudit.HeldOut(0.1, seed).split(observations)
    sizes = [absent.size, held.size, rest.without_canary.size, rest.with_canary.size]
    assert sum(sizes) == 16
    found = bound(observations, rule=dpaudit.HeldOut(0.1, seed))
    assert [found.counts.num_absent, found.counts.num_present] == sizes[2:]
    assert np.isfinite(found.threshold)


def test_held_out_is_repeatable_and_its_seed_matters():
    observations = gaussian_scores(1.0, 500)
    first, again, other = (bound(observations, rule=dpaudit.HeldOut(0.2, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_held_out_needs_two_scores():
    with pytest.raises(dpaudit.InputError, match="at least 2"):
        bound(dpaudit.Observations(with_canary=[1.0], without_canary=[0.0]), rule=dpaudit.HeldOut())


@pytest.mark.parametrize("size", [1, 5, 32, 33, 100, 2500])
def test_simultaneous_is_the_best_of_its_ranks_at_a_share_of_the_error(size):
    observations = gaussian_scores(1.5, size)
    rule = dpaudit.Simultaneous()
    ranks = rule.ranks(size)
    assert len(set(ranks.tolist())) == ranks.size == min(size, 32)
    assert ranks.min() >= 0
    assert ranks.max() < size
    absent = np.sort(observations.without_canary)[::-1]
    share = BoundQuery(dpaudit.Gaussian(), 1e-5, 0.05 / ranks.size)
    slow = max(
        dpaudit.ClopperPearson().parameter(
            dpaudit.ErrorCounts(
                false_positives=int(k),
                num_absent=size,
                false_negatives=int((observations.with_canary <= absent[k]).sum()),
                num_present=size,
            ),
            share,
        )
        for k in ranks
    )
    assert bound(observations, rule=rule).parameter == pytest.approx(slow, rel=1e-12)


def test_simultaneous_ranks_reach_both_ends():
    ranks = dpaudit.Simultaneous().ranks(100_000)
    assert ranks[:3].tolist() == [0, 1, 2]
    assert ranks[-1] >= 99_998


def test_scores_of_one_side_after_the_first_step_get_a_sentence():
    observations = dpaudit.Observations.from_presence([[1.0], [2.0]], [[False], [True]])
    with pytest.raises(dpaudit.InputError, match="with and without the canary after the first step"):
        bound(observations, dpaudit.Betting(), dpaudit.Predictable())


def from_earlier_steps(present, absent):
    """Return the threshold and both ends of the far interval, for each step."""
    observations = dpaudit.Observations(with_canary=present, without_canary=absent)
    thresholds, intervals = _from_earlier_steps(StepScores.of(observations), [0.05])
    return np.stack([thresholds, *intervals[0]])


@given(st.integers(0, 100))
def test_predictable_thresholds_do_not_look_ahead(seed):
    rng = np.random.default_rng(seed)
    size = (12, 8)
    present, absent = rng.normal(1, 1, size), rng.normal(0, 1, size)
    before = from_earlier_steps(present, absent)
    changed = present.copy()
    changed[7:] = rng.normal(9, 1, changed[7:].shape)
    after = from_earlier_steps(changed, absent)
    assert np.isfinite(before[:, 5:]).all()
    assert np.array_equal(before[:, :8], after[:, :8])


def test_predictable_finds_the_midpoint_of_raw_scores():
    rng = np.random.default_rng(0)
    raw = dpaudit.Observations(
        with_canary=rng.normal(-40, 3, (400, 32)), without_canary=rng.normal(-46, 3, (400, 32))
    )
    found = bound(raw, dpaudit.Betting(), dpaudit.Predictable())
    assert found.threshold == pytest.approx(-43, abs=0.5)
    assert 1.8 < found.parameter <= 2.0


@pytest.mark.parametrize(
    ("rule", "inference"),
    [
        (dpaudit.Simultaneous(), dpaudit.Posterior()),
        (dpaudit.Tails(), dpaudit.Betting()),
        (dpaudit.Predictable(), dpaudit.ClopperPearson()),
        (dpaudit.SameData(), dpaudit.Betting()),
    ],
)
def test_pairs_without_meaning_are_refused_with_a_sentence(rule, inference):
    with pytest.raises(dpaudit.InputError, match="needs an inference of type"):
        bound(gaussian_scores(1.0, 20), inference, rule)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dpaudit.Fixed(float("nan")),
        lambda: dpaudit.Fixed("a"),
        lambda: dpaudit.HeldOut(0.0),
        lambda: dpaudit.HeldOut(0.2, -1),
        lambda: dpaudit.Optimal(0.0),
        lambda: dpaudit.Simultaneous(0),
        lambda: dpaudit.Betting(horizon=0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(dpaudit.InputError):
        make()


@pytest.mark.parametrize("inference", [dpaudit.ClopperPearson(), dpaudit.Posterior(), dpaudit.JointExact()])
def test_same_data_says_that_it_is_a_heuristic(inference):
    found = bound(gaussian_scores(1.0, 200), inference, dpaudit.SameData())
    assert found.kind == "heuristic"
    assert "not a confidence bound" in found.statement
    assert "heuristic" in str(found.to_dict()["kind"])
    assert found.parameter >= bound(gaussian_scores(1.0, 200), inference, dpaudit.Fixed(0.5)).parameter * 0.98
