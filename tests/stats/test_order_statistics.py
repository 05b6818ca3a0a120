"""Tests at scores of fixed ranks: exact against integration, and what they see in the tails of scores."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from score_samples import counts
from simulated_coverage import coverage, ideal_observations, tally
from statistical_limits import covers

import dpaudit
from dpaudit.stats.inference import BoundQuery

DEFAULT = dpaudit.BestOf((dpaudit.Fixed(0.5), dpaudit.Tails()), (0.9, 0.1))
FAMILIES = [dpaudit.Gaussian(), dpaudit.ApproximateDP(1e-3), dpaudit.Laplace()]


def _sizes(absent: int, present: int, rank: int = 0, misses: int = 0) -> dpaudit.ErrorCounts:
    return counts(rank, absent, misses, present)


def _slow_probability(family, theta, sizes):
    """P(as few false negatives) at the absent score with ``false_positives`` others above it."""
    fpr = stats.beta(sizes.false_positives + 1, sizes.num_absent - sizes.false_positives)

    def integrand(level):
        fnr = family.fnr(theta, np.asarray(fpr.ppf(level)))
        return float(stats.binom.cdf(sizes.false_negatives, sizes.num_present, fnr))

    levels = 1 - np.geomspace(1, 1e-12, 13)
    return sum(integrate.quad(integrand, a, b)[0] for a, b in itertools.pairwise(levels))


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
@pytest.mark.parametrize(
    ("rank", "absent", "misses", "present"), [(0, 30, 12, 20), (3, 200, 130, 150), (10, 40, 5, 60)]
)
def test_the_bound_at_a_rank_is_where_the_integral_equals_the_error(family, rank, absent, misses, present):
    query = BoundQuery(family, 0.0, 0.05)
    sizes = _sizes(absent, present, rank, misses)
    bound = dpaudit.JointExact().at_rank(sizes, query, 0.0)
    assert bound > 0
    probability = _slow_probability(family, bound, sizes)
    assert 0.04 < probability <= 0.05  # the sum over cells is above the integral


@pytest.mark.parametrize("inference", [dpaudit.JointExact(), dpaudit.ClopperPearson()], ids=str)
@given(st.integers(2, 300), st.integers(1, 300), st.floats(0.05, 3), st.data())
def test_the_most_refuting_errors_are_those_whose_bound_exceeds_the_claim(
    inference, absent, present, claimed, data
):
    rank = data.draw(st.integers(0, absent - 1))
    query = BoundQuery(dpaudit.Gaussian(), 0.0, 0.05)
    most = int(inference.most_refuting(np.asarray([rank]), claimed, _sizes(absent, present), query)[0])
    for misses in {most, most + 1} & set(range(present + 1)):
        bound = inference.at_rank(_sizes(absent, present, rank, misses), query, 0.0)
        assert (bound > claimed * (1 - 1e-5)) if misses == most else (bound <= claimed * (1 + 1e-5))


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", [dpaudit.Tails(), dpaudit.Simultaneous(), DEFAULT], ids=str)
@pytest.mark.parametrize("family", [dpaudit.Gaussian(), dpaudit.ApproximateDP()], ids=repr)
@pytest.mark.parametrize("size", [pytest.param(30, marks=pytest.mark.long), 400])
def test_bounds_at_ranks_cover(rule, family, size):
    found = coverage(
        tradeoff=family,
        parameter=1.0,
        size=size,
        inference=dpaudit.JointExact(),
        threshold=rule,
        repetitions=100,
        seed=3,
    )
    assert covers(found), found


@pytest.mark.parametrize("rule", [dpaudit.Tails(), dpaudit.Simultaneous(), DEFAULT], ids=str)
def test_ties_do_not_raise_a_bound_above_the_truth(rule):
    def once(rng):
        scores = ideal_observations(dpaudit.Gaussian(), 1.0, 300, 200, rng)
        rounded = dpaudit.Observations(
            with_canary=np.round(scores.with_canary, 1), without_canary=np.round(scores.without_canary, 1)
        )
        method = {"tradeoff": dpaudit.Gaussian(), "inference": dpaudit.JointExact()}
        return dpaudit.lower_bound(rounded, delta=1e-5, threshold=rule, **method).parameter

    assert covers(tally(once, 1.0, repetitions=100, seed=1))


def _truncated(rng, size, mu, deviations):
    """Scores with normal noise that is cut off, with the variance of the claim."""
    noise = stats.truncnorm(-deviations, deviations)
    scale = 1 / mu / noise.std()
    draw = [scale * noise.rvs(size, random_state=rng) for _ in range(2)]
    return dpaudit.Observations(with_canary=1 + draw[0], without_canary=draw[1], normalized=True)


def test_noise_without_tails_is_refuted_by_default():
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    for seed in range(10):
        observations = _truncated(np.random.default_rng(seed), 1000, 1.0, 2.0)
        result = dpaudit.audit(observations, claim=claim)
        assert result.verdict is dpaudit.Verdict.VIOLATION
        assert result.bound.threshold_rule == dpaudit.BestOf(DEFAULT.rules, DEFAULT.shares, dpaudit.Tails())
        middle = dpaudit.audit(observations, claim=claim, threshold=dpaudit.Fixed(0.5))
        assert result.bound.parameter > middle.bound.parameter


@pytest.mark.parametrize("side", [0, 1])
def test_a_canary_that_is_rarely_but_fully_revealed_is_refuted_by_default(side):
    """In a tenth of the runs, presence (or absence) is certain; else the noise is three times the claim."""
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        scores = [mean + 3 * rng.normal(size=1000) for mean in (0.0, 1.0)]
        scores[side][rng.random(1000) < 0.1] = (-50.0, 50.0)[side]
        observations = dpaudit.Observations(with_canary=scores[1], without_canary=scores[0], normalized=True)
        assert dpaudit.audit(observations, claim=claim).verdict is dpaudit.Verdict.VIOLATION
        middle = dpaudit.audit(observations, claim=claim, threshold=dpaudit.Fixed(0.5))
        assert middle.verdict is not dpaudit.Verdict.VIOLATION


def test_the_counts_of_tails_are_those_at_the_reported_threshold():
    rng = np.random.default_rng(0)
    query = BoundQuery(dpaudit.Gaussian(), 1e-5, 0.05)
    for _ in range(20):
        observations = dpaudit.Observations(
            with_canary=rng.normal(2, 1, 400), without_canary=rng.normal(size=300)
        )
        found = dpaudit.Tails().apply(observations, dpaudit.JointExact(), query)
        assert found.counts == _sizes(
            300,
            400,
            int((observations.without_canary > found.threshold).sum()),
            int((observations.with_canary <= found.threshold).sum()),
        )


def test_tails_are_found_in_chunks_of_files_too(tmp_path, monkeypatch):
    monkeypatch.setattr("dpaudit.stats._observations._CHUNK", 64)
    rng = np.random.default_rng(0)
    sides = {"with_canary": rng.normal(1, 1, 1500), "without_canary": rng.normal(size=1200)}
    on_disk = {}
    for name, scores in sides.items():
        np.save(tmp_path / f"{name}.npy", scores.astype(np.float32))
        on_disk[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    query = BoundQuery(dpaudit.Gaussian(), 1e-5, 0.05)
    in_memory = {name: np.array(scores) for name, scores in on_disk.items()}
    found, expected = (
        dpaudit.Tails().apply(dpaudit.Observations(**one), dpaudit.JointExact(), query)
        for one in (on_disk, in_memory)
    )
    assert found == expected
    absent = np.sort(in_memory["without_canary"])[::-1]
    assert dpaudit.Tails().ranks(1200).tolist() == [0, 4, 24]
    assert found.threshold in absent or found.counts.false_negatives in (0, 4, 24)


def test_the_best_of_rules_is_the_largest_bound_at_its_share():
    rng = np.random.default_rng(5)
    observations = ideal_observations(dpaudit.Gaussian(), 1.0, 500, 500, rng)
    rules, shares = (dpaudit.HeldOut(0.2), dpaudit.Fixed(0.5), dpaudit.Tails()), (0.3, 0.3, 0.4)
    method = {"delta": 1e-5, "tradeoff": dpaudit.Gaussian(), "inference": dpaudit.JointExact()}
    best = dpaudit.lower_bound(observations, threshold=dpaudit.BestOf(rules, shares), **method)
    each = [
        dpaudit.lower_bound(observations, threshold=rule, confidence=1 - 0.05 * share, **method)
        for rule, share in zip(rules, shares, strict=True)
    ]
    largest = max(each, key=lambda bound: bound.parameter)
    assert best.parameter == pytest.approx(largest.parameter, rel=1e-9)
    assert best.threshold_rule == dpaudit.BestOf(rules, shares, largest.threshold_rule)
    assert best.counts == largest.counts
    assert dpaudit.Bound.from_dict(best.to_dict()) == best
