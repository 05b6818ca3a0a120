"""Perfect separation, one observation, ties, all equal, unequal sizes, extremes: right and finite."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import dpaudit

PAIRS = [
    (dpaudit.ClopperPearson(), dpaudit.Fixed(0.5)),
    (dpaudit.ClopperPearson(), dpaudit.Simultaneous()),
    (dpaudit.ClopperPearson(), dpaudit.SameData()),
    (dpaudit.ClopperPearson(), dpaudit.HeldOut()),
    (dpaudit.JointExact(), dpaudit.Fixed(0.5)),
    (dpaudit.JointExact(), dpaudit.HeldOut()),
    (dpaudit.JointExact(), dpaudit.SameData()),
    (dpaudit.Posterior(), dpaudit.Fixed(0.5)),
    (dpaudit.Posterior(), dpaudit.SameData()),
    (dpaudit.Betting(), dpaudit.Fixed(0.5)),
    (dpaudit.Betting(), dpaudit.Predictable()),
]
FAMILIES = [
    dpaudit.Gaussian(),
    dpaudit.ApproximateDP(),
    dpaudit.PureDP(),
    dpaudit.Laplace(),
    dpaudit.RandomizedResponse(),
    dpaudit.PiecewiseLinear((0.5, 1.0), (0.1, 1e-5)),
]
pairs = pytest.mark.parametrize(("inference", "rule"), PAIRS, ids=str)
families = pytest.mark.parametrize("family", FAMILIES, ids=repr)


def bound(present, absent, inference, rule, family=None, delta=1e-5):  # noqa: PLR0917
    return dpaudit.lower_bound(
        dpaudit.Observations(with_canary=present, without_canary=absent),
        delta=delta,
        tradeoff=family or dpaudit.Gaussian(),
        inference=inference,
        threshold=rule,
    )


@families
@pairs
def test_every_meaningful_pair_works_and_is_finite(family, inference, rule):
    rng = np.random.default_rng(0)
    found = bound(rng.normal(1, 0.5, 60), rng.normal(0, 0.5, 60), inference, rule, family)
    assert 0 < found.parameter < math.inf
    assert 0 <= found.epsilon < math.inf
    assert found.statement in str(found)


@pairs
def test_perfect_separation_gives_the_most_that_so_few_can_say(inference, rule):
    few = bound(np.ones(50), np.zeros(50), inference, rule)
    more = bound(np.ones(500), np.zeros(500), inference, rule)
    assert 0 < few.parameter < more.parameter < 20


@pairs
def test_a_perfectly_wrong_attack_refutes_nothing(inference, rule):
    found = bound(np.zeros(50) - 1, np.ones(50), inference, rule)
    if inference.kind == "confidence":
        assert found.parameter == 0
        assert found.epsilon == 0
    else:
        assert math.isfinite(found.parameter)


@pairs
def test_scores_that_are_all_equal_refute_nothing(inference, rule):
    if inference.kind == "confidence":
        assert bound(np.zeros(40), np.zeros(40), inference, rule).parameter == 0
    else:
        assert math.isfinite(bound(np.zeros(40), np.zeros(40), inference, rule).parameter)


@pytest.mark.parametrize(
    ("inference", "rule"),
    [p for p in PAIRS if not isinstance(p[1], dpaudit.HeldOut | dpaudit.Predictable)],
    ids=str,
)
def test_one_observation_a_side_is_enough_to_be_defined(inference, rule):
    found = bound([1.0], [0.0], inference, rule)
    assert math.isfinite(found.parameter)
    if inference.kind == "confidence" and rule.valid:
        assert found.parameter == 0


@pairs
@given(
    present=hnp.arrays(float, st.integers(2, 40), elements=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
    absent=hnp.arrays(float, st.integers(2, 40), elements=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
)
def test_ties_and_unequal_sizes_are_defined(inference, rule, present, absent):
    found = bound(present, absent, inference, rule)
    assert 0 <= found.parameter < math.inf
    assert 0 <= found.epsilon < math.inf


@pytest.mark.parametrize("rule", [dpaudit.Simultaneous(), dpaudit.SameData(), dpaudit.HeldOut()], ids=repr)
@given(
    seed=st.integers(0, 20), scale=st.sampled_from([1e-6, 0.5, 1e6]), shift=st.sampled_from([-1e3, 0.0, 7.0])
)
def test_rules_that_look_at_ranks_are_free_of_scale_and_place(rule, seed, scale, shift):
    rng = np.random.default_rng(seed)
    present, absent = rng.integers(0, 50, 40) / 1.0, rng.integers(-20, 30, 40) / 1.0
    here = bound(present, absent, dpaudit.ClopperPearson(), rule)
    there = bound(present * scale + shift, absent * scale + shift, dpaudit.ClopperPearson(), rule)
    assert there.parameter == pytest.approx(here.parameter, rel=1e-12)


@pytest.mark.parametrize("delta", [0.0, 1e-12, 0.5, 1 - 1e-6])
@families
def test_any_delta_is_answered(family, delta):
    found = bound(np.ones(200), np.zeros(200), dpaudit.ClopperPearson(), dpaudit.Fixed(0.5), family, delta)
    assert found.epsilon >= 0
    # a Gaussian has no finite epsilon at delta = 0, and these lines end at delta = 1e-5
    endless = isinstance(family, dpaudit.Gaussian | dpaudit.PiecewiseLinear) and delta < 1e-5
    assert math.isinf(found.epsilon) == (endless and not (isinstance(family, dpaudit.Gaussian) and delta > 0))


@pytest.mark.parametrize("mu", [1e-6, 100.0])
@pairs
def test_tiny_and_huge_leaks_stay_below_the_truth_or_at_zero(inference, rule, mu):
    rng = np.random.default_rng(1)
    found = bound(rng.normal(0.5 + mu / 2, 1, 300), rng.normal(0.5 - mu / 2, 1, 300), inference, rule)
    assert math.isfinite(found.epsilon)
    assert found.parameter < max(mu, 0.3)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("inference", "rule"),
    [p for p in PAIRS if not isinstance(p[1], dpaudit.Predictable) or isinstance(p[0], dpaudit.Betting)],
    ids=str,
)
def test_a_million_scores_a_side_are_tight(inference, rule):
    rng = np.random.default_rng(2)
    n = 1_000_000
    found = bound(rng.normal(1, 1, n), rng.normal(0, 1, n), inference, rule)
    assert 0.97 < found.parameter < (1.001 if rule.valid else 1.2)  # SameData exceeds the truth


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"confidence": 1.2}, r"confidence must be at least 0.5 and below 1, got 1.2"),
        ({"confidence": 1.0}, "confidence must be at least 0.5 and below 1, got 1"),
        ({"confidence": float("nan")}, "confidence must be at least 0.5 and below 1, got nan"),
        ({"confidence": "high"}, "confidence must be a number, got 'high'"),
        ({"delta": -1}, r"delta must be at least 0 and below 1, got -1"),
        ({"delta": 1.0}, "delta must be at least 0 and below 1, got 1"),
        ({"tradeoff": "gaussian"}, r"tradeoff must be a trade-off such as Gaussian\(\), got 'gaussian'"),
        ({"inference": dpaudit.ClopperPearson}, "inference must be a"),
        ({"threshold": 0.5}, r"threshold must be a threshold rule such as Fixed\(0.5\), got 0.5"),
        ({"threshold": None}, "threshold must be a"),
        ({"observations": [1.0]}, "observations must be Observations"),
    ],
)
def test_bad_input_gets_one_sentence(wrong, sentence):
    arguments = {
        "observations": dpaudit.Observations(with_canary=[1.0], without_canary=[0.0]),
        "delta": 1e-5,
        "confidence": 0.95,
        "tradeoff": dpaudit.Gaussian(),
        "inference": dpaudit.ClopperPearson(),
        "threshold": dpaudit.Fixed(0.5),
        **wrong,
    }
    observations = arguments.pop("observations")
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.lower_bound(observations, **arguments)


def test_counts_can_be_given_instead_of_scores():
    counts = dpaudit.ErrorCounts(false_positives=3, num_absent=50, false_negatives=4, num_present=60)
    found = dpaudit.lower_bound(
        counts, delta=1e-5, tradeoff=dpaudit.Gaussian(), inference=dpaudit.JointExact()
    )
    assert found.threshold is None
    assert "the threshold for the counts was chosen before seeing the data" in found.assumptions
    with pytest.raises(dpaudit.InputError, match="needs scores, got counts"):
        dpaudit.lower_bound(counts, delta=1e-5, tradeoff=dpaudit.Gaussian(), inference=dpaudit.Betting())
    with pytest.raises(
        dpaudit.InputError, match=r"Error counts need no threshold rule, got Fixed\(threshold=0\.5\)"
    ):
        dpaudit.lower_bound(
            counts,
            delta=1e-5,
            tradeoff=dpaudit.Gaussian(),
            inference=dpaudit.JointExact(),
            threshold=dpaudit.Fixed(0.5),
        )
