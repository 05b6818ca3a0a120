"""Verdicts say what they may say, with their power."""

import json
import math
import pickle

import numpy as np
import pytest
from statistical_limits import count_range

import dpaudit
from dpaudit.stats._audit import default_method


def scores(noise, size, seed=0, **more):
    rng = np.random.default_rng(seed)
    return dpaudit.Observations(
        with_canary=rng.normal(1, noise, size), without_canary=rng.normal(0, noise, size), **more
    )


STEP = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


@pytest.mark.parametrize("size", [2500, (300, 16)])
@pytest.mark.parametrize("normalized", [True, False])
def test_a_correct_step_is_not_refuted_and_one_with_less_noise_is(size, normalized):
    good = dpaudit.audit(scores(1.0, size, normalized=normalized), claim=STEP)
    bad = dpaudit.audit(scores(0.8, size, normalized=normalized), claim=STEP)
    assert good.verdict is dpaudit.Verdict.NO_VIOLATION
    assert bad.verdict is dpaudit.Verdict.VIOLATION
    good.raise_for_violation()
    with pytest.raises(dpaudit.ViolationError, match="VIOLATION"):
        bad.raise_for_violation()


def test_a_result_states_claim_bound_power_and_assumptions():
    result = dpaudit.audit(scores(1.0, 1000, normalized=True), claim=STEP)
    text = result.details()
    for words in (
        "NO_VIOLATION",
        "claim:",
        "bound: mu >=",
        "95 % confidence",
        "80 % of the time",
        "assumes:",
    ):
        assert words in text
    for never in ("private.", "pass", "safe"):
        assert never not in text
    again = json.loads(json.dumps(result.to_dict()))
    assert again["verdict"] == "NO_VIOLATION"
    assert again["bound"]["kind"] == "confidence"
    assert again["power"]["noise_factor"] < 1


def test_too_few_observations_are_called_underpowered():
    result = dpaudit.audit(scores(0.01, 2, normalized=True), claim=STEP)
    assert result.verdict is dpaudit.Verdict.UNDERPOWERED
    assert "detects no leak, however large" in str(result.power)


@pytest.mark.parametrize("size", [1, 2, 9, 10, 40])
def test_any_number_of_raw_scores_gets_a_verdict(size):
    result = dpaudit.audit(scores(2.0, size), claim=STEP)
    assert result.verdict in (dpaudit.Verdict.NO_VIOLATION, dpaudit.Verdict.UNDERPOWERED)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"threshold": dpaudit.SameData()}, r"cannot rest on SameData\(\)"),
        ({"inference": dpaudit.Posterior()}, r"cannot rest on Posterior\(\), which gives a credible bound"),
        ({"inference": dpaudit.KatzLog(), "tradeoff": dpaudit.PureDP()}, "heuristic bound"),
        ({"confidence": 1.2}, "confidence must be at least 0.5 and below 1, got 1.2"),
        ({"claim": 8.0}, "claim must be a Claim"),
    ],
)
def test_a_verdict_rests_on_confidence_only(arguments, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.audit(scores(1.0, 50), **{"claim": STEP, **arguments})


WITH_TAILS = dpaudit.BestOf((dpaudit.Fixed(0.5), dpaudit.Tails()), (0.9, 0.1))


@pytest.mark.parametrize(
    ("size", "normalized", "tradeoff", "inference", "rule"),
    [
        (100, True, dpaudit.Gaussian(), dpaudit.JointExact(), WITH_TAILS),
        (99, True, dpaudit.Gaussian(), dpaudit.JointExact(), dpaudit.Fixed(0.5)),
        ((9, 9), True, dpaudit.Gaussian(), dpaudit.Betting(), dpaudit.Fixed(0.5)),
        ((9, 9), False, dpaudit.Gaussian(), dpaudit.Betting(), dpaudit.Predictable()),
        (100, False, dpaudit.Gaussian(), dpaudit.JointExact(), dpaudit.HeldOut(0.1)),
        (49, False, dpaudit.ApproximateDP(), dpaudit.JointExact(), dpaudit.HeldOut(0.2)),
        (50, False, dpaudit.ApproximateDP(), dpaudit.JointExact(), dpaudit.Simultaneous()),
        (6000, False, dpaudit.Gaussian(), dpaudit.JointExact(), dpaudit.HeldOut(0.1)),
        (3, False, dpaudit.Gaussian(), dpaudit.JointExact(), dpaudit.Simultaneous()),
    ],
)
def test_defaults_follow_from_shape_and_claim(size, normalized, tradeoff, inference, rule):
    observations = scores(1.0, size, normalized=normalized)
    assert default_method(observations, tradeoff) == (inference, rule)


def test_what_is_given_is_kept_and_the_rest_fits():
    observations = scores(1.0, 100)
    gaussian = dpaudit.Gaussian()
    for given, expected in [
        ({"inference": dpaudit.Betting()}, dpaudit.Predictable()),
        ({"inference": dpaudit.ClopperPearson()}, dpaudit.HeldOut(0.1)),
    ]:
        assert default_method(observations, gaussian, **given) == (given["inference"], expected)
    for rule, inference in [
        (dpaudit.Simultaneous(), dpaudit.JointExact()),
        (WITH_TAILS, dpaudit.JointExact()),
        (dpaudit.Predictable(), dpaudit.Betting()),
        (dpaudit.Fixed(0.1), dpaudit.JointExact()),
    ]:
        assert default_method(observations, gaussian, rule=rule) == (inference, rule)


@pytest.mark.parametrize(
    ("rules", "inference"),
    [
        ((dpaudit.Fixed(0.5), dpaudit.Fixed(0.7)), dpaudit.Betting()),
        ((dpaudit.Fixed(0.5), dpaudit.HeldOut()), dpaudit.Betting()),
        ((dpaudit.Fixed(0.5), dpaudit.Predictable()), dpaudit.Betting()),
        ((dpaudit.Fixed(0.5), dpaudit.Tails()), dpaudit.JointExact()),
        ((dpaudit.Simultaneous(), dpaudit.Fixed(0.5)), dpaudit.JointExact()),
    ],
)
def test_the_best_of_several_rules_bets_on_steps_unless_a_rule_counts(rules, inference):
    best = dpaudit.BestOf(rules, (0.9, 0.1))
    observations = scores(1.0, (60, 8), normalized=True)
    assert default_method(observations, dpaudit.Gaussian(), rule=best) == (inference, best)
    if isinstance(inference, dpaudit.Betting):
        result = dpaudit.audit(observations, claim=STEP, threshold=best)
        assert result.verdict is dpaudit.Verdict.NO_VIOLATION
        assert isinstance(result.bound.inference, dpaudit.Betting)


def test_an_epsilon_delta_claim_assumes_no_mechanism():
    claim = dpaudit.Claim.approximate_dp(epsilon=1.0, delta=1e-5)
    good = dpaudit.audit(scores(2.0, 3000, normalized=True), claim=claim)
    bad = dpaudit.audit(scores(0.3, 3000, normalized=True), claim=claim)
    assert good.verdict is dpaudit.Verdict.UNDERPOWERED  # 3,000 scores do not detect twice this epsilon
    assert bad.verdict is dpaudit.Verdict.VIOLATION
    assert bad.bound.assumptions == (
        "all observations are independent and, on each side, identically distributed, and their number was "
        "fixed before seeing the data; for the steps of one training run, independence is an assumption "
        "about the mechanism",
        "the canary is the only difference between the observations with and without it",
    )
    assert bad.power.noise_factor is None


ALIKE = "independent and, on each side, identically distributed"
STEPS = "for the steps of one training run"


@pytest.mark.parametrize(
    ("observations", "inference", "rule", "is_alike", "of_steps"),
    [
        (scores(1.0, 100, normalized=True), dpaudit.JointExact(), dpaudit.Fixed(), True, True),
        (scores(1.0, 100), dpaudit.JointExact(), dpaudit.Fixed(), True, False),
        (scores(1.0, (9, 9)), dpaudit.JointExact(), dpaudit.Fixed(), True, True),
        (scores(1.0, 100), dpaudit.Posterior(), dpaudit.Fixed(), True, False),
        (scores(1.0, 100), dpaudit.ClopperPearson(), dpaudit.Fixed(), False, False),
        (scores(1.0, 100), dpaudit.ClopperPearson(), dpaudit.HeldOut(), True, False),
        (scores(1.0, 100), dpaudit.ClopperPearson(), dpaudit.Simultaneous(), True, False),
        (scores(1.0, 100), dpaudit.ClopperPearson(), WITH_TAILS, True, False),
        (dpaudit.ErrorCounts.perfect(9, 9), dpaudit.ClopperPearson(), None, False, True),
        (dpaudit.ErrorCounts.perfect(9, 8), dpaudit.ClopperPearson(), None, True, True),
    ],
    ids=str,
)
def test_counts_state_which_observations_they_take_as_alike(
    observations, inference, rule, is_alike, of_steps
):
    bound = dpaudit.lower_bound(
        observations, delta=1e-5, tradeoff=dpaudit.Gaussian(), inference=inference, threshold=rule
    )
    text = next(one for one in bound.assumptions if one.startswith("all observations"))
    assert (ALIKE in text) == is_alike
    assert (STEPS in text) == of_steps


def test_coins_are_not_pairs_even_if_as_many_are_present_as_absent():
    rng = np.random.default_rng(0)
    present = np.concatenate([one := rng.random((40, 8)) < 0.5, rng.permuted(~one, axis=0)])
    fair = dpaudit.Observations.from_presence(rng.normal(size=present.shape), present)
    assert fair.with_canary.size == fair.without_canary.size
    assert ALIKE in dpaudit.ClopperPearson().assumption(fair, is_fixed=True)


def test_only_bets_with_a_stop_loss_rest_on_guesses_that_do_not_know_other_coins():
    rng = np.random.default_rng(0)
    present = rng.random((40, 8)) < 0.5
    coins = {
        coupled: dpaudit.Observations.from_presence(rng.normal(size=(40, 8)), present, coupled=coupled)
        for coupled in (False, True)
    }
    groups = scores(1.0, (40, 8))
    pairs = scores(1.0, (40, 8), paired=True)
    words = "not on the presence of other canaries"
    for observations in (coins[False], coins[True], groups, pairs):
        found = dpaudit.audit(observations, claim=STEP).bound.assumptions
        assert any(words in text for text in found) == (observations is coins[False])
        assert any(text.startswith("each step satisfies its curve") for text in found)


def test_an_epsilon_delta_claim_can_be_tested_as_gaussian_and_the_verdict_says_so():
    claim = dpaudit.Claim.approximate_dp(epsilon=4.377, delta=1e-5)  # mu = 1
    generic = dpaudit.audit(scores(0.7, 2500, normalized=True), claim=claim)
    gaussian = dpaudit.audit(scores(0.7, 2500, normalized=True), claim=claim, tradeoff=dpaudit.Gaussian())
    assert not generic.refuted
    assert gaussian.verdict is dpaudit.Verdict.VIOLATION
    condition = "This holds if the mechanism's trade-off curve is Gaussian (mu-GDP)."
    assert condition in gaussian.details()
    assert condition in gaussian.to_dict()["sentence"]


def test_what_the_claim_implies_needs_no_condition():
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    for tradeoff in (None, dpaudit.Gaussian(), dpaudit.ApproximateDP()):
        result = dpaudit.audit(scores(0.05, 2500, normalized=True), claim=claim, tradeoff=tradeoff)
        assert result.verdict is dpaudit.Verdict.VIOLATION
        assert result.sentence == dpaudit.Verdict.VIOLATION.value


def test_another_curve_of_the_same_kind_is_not_the_claimed_one():
    claim = dpaudit.Claim.curve(dpaudit.PiecewiseLinear((3.0,), (1e-5,)), delta=1e-5)
    other = claim.hypothesis(dpaudit.PiecewiseLinear((0.1,), (1e-5,)))
    assert other.parameter > 3
    assert other.condition is not None


@pytest.mark.parametrize("size", [1, 5, 9, 20, 31, 100])
def test_the_largest_refutable_parameter_is_what_a_perfect_attack_of_that_size_refutes(size):
    perfect = dpaudit.Observations(with_canary=np.ones(size), without_canary=np.zeros(size))
    for method in ({"threshold": dpaudit.Simultaneous()}, {"inference": dpaudit.Betting(tails=0.0)}):
        if size == 1 and "inference" in method:
            continue
        result = dpaudit.audit(perfect, claim=STEP, **method)
        assert result.design.max_refutable == pytest.approx(result.bound.parameter, rel=1e-6)
    if size > 1:  # other scores without errors may be far from the threshold and refute more
        result = dpaudit.audit(perfect, claim=STEP, inference=dpaudit.Betting())
        assert result.design.max_refutable >= result.bound.parameter * (1 - 1e-9)


def test_a_threshold_that_a_leak_moves_away_from_finds_no_leak():
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-2)
    result = dpaudit.audit(scores(1.0, 2000, normalized=True), claim=claim, threshold=dpaudit.Optimal(1.0))
    assert "detects no leak, however large" in str(result.power)


def test_the_power_is_that_of_the_threshold_where_it_is():
    claim, threshold = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-2), dpaudit.Fixed(0.8)
    result = dpaudit.audit(scores(1.0, 2000, normalized=True), claim=claim, threshold=threshold)
    noise = 1 / result.power.parameter
    found = [
        dpaudit.audit(scores(noise, 2000, seed, normalized=True), claim=claim, threshold=threshold).verdict
        for seed in range(200)
    ]
    fewest, most = count_range(200, 0.8)
    assert fewest <= found.count(dpaudit.Verdict.VIOLATION) <= most


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda o: dpaudit.audit(o, claim=STEP, threshold=0.5), "threshold must be a"),
        (lambda o: dpaudit.audit(o, claim=STEP, inference="x"), "inference must be a"),
        (
            lambda _: dpaudit.audit(([1.0], [0.0]), claim=STEP),
            r"observations must be Observations\(\.\.\.\), got \(\[1\.0\], \[0\.0\]\)",
        ),
        (lambda _: dpaudit.plan_observations(STEP, 0.8), "leak must be a"),
        (lambda o: dpaudit.plan_observations(o, dpaudit.Leak(noise_factor=0.8)), "claim must be a Claim"),
        (lambda o: dpaudit.one_run_bound(o, delta=1e-5), "got Observations"),
    ],
)
def test_wrong_objects_get_a_sentence(call, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        call(scores(1.0, 20))


DPSGD = dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.1, num_steps=10, delta=1e-5)


@pytest.mark.parametrize(
    ("scores_of", "tradeoff", "sentence"),
    [
        (None, None, "A claim about DP-SGD needs to know what each score is of"),
        (None, dpaudit.Gaussian(), "A claim about DP-SGD needs to know what each score is of"),
        ("step", dpaudit.SubsampledGaussian(0.1, 10), "the curve of 10 of 10 steps"),
        ("run", dpaudit.SubsampledGaussian(0.1, 1), "the curve of 1 of 10 steps"),
        ("run", dpaudit.Gaussian(), "the curve of 1 of 10 steps"),
        ("epoch", None, "scores_of must be 'step', 'run' or 'one-run', got 'epoch'"),
    ],
)
def test_a_dpsgd_claim_needs_to_know_what_a_score_is_of(scores_of, tradeoff, sentence):
    with pytest.raises(dpaudit.InputError, match=sentence):
        dpaudit.audit(scores(1.0, 20, scores_of=scores_of), claim=DPSGD, tradeoff=tradeoff)


def test_what_a_score_is_of_selects_the_curve():
    for scores_of, tradeoff in (
        ("step", dpaudit.Gaussian()),
        ("run", dpaudit.SubsampledGaussian(0.1, 10)),
        ("one-run", dpaudit.SubsampledGaussian(0.1, 10)),
    ):
        result = dpaudit.audit(scores(1.0, 100, scores_of=scores_of), claim=DPSGD)
        assert result.bound.tradeoff == tradeoff
        assert result.to_dict()["scores_of"] == scores_of
    assert dpaudit.audit(scores(1.0, 100, scores_of="run"), claim=STEP).bound.tradeoff == dpaudit.Gaussian()


def test_the_guesses_of_one_run_take_no_other_method():
    members = scores(1.0, 100, scores_of="one-run")
    with pytest.raises(dpaudit.InputError, match="allows no inference"):
        dpaudit.audit(members, claim=DPSGD, inference=dpaudit.JointExact())
    with pytest.raises(dpaudit.InputError, match="needs one score per canary"):
        scores(1.0, (10, 10), scores_of="one-run")
    fixed = dpaudit.audit(members, claim=DPSGD, threshold=dpaudit.Fixed(0.5)).bound.counts
    right = (members.with_canary > 0.5).sum() + (members.without_canary <= 0.5).sum()
    assert (fixed.num_guesses, fixed.num_correct) == (200, right)


def test_a_result_can_be_sent_to_another_process():
    for claim in (
        STEP,
        dpaudit.Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.1, num_steps=10, delta=1e-5),
    ):
        result = dpaudit.audit(scores(1.0, 100, normalized=True, scores_of="step"), claim=claim)
        again = pickle.loads(pickle.dumps(result))
        assert again.bound == result.bound
        assert again.estimate == result.estimate


@pytest.mark.parametrize("scale", [1e77, 1e100, 1e300])
def test_scores_that_are_too_large_for_an_estimate_are_audited(scale):
    result = dpaudit.audit(scores(1.0, 200, normalized=True), claim=STEP)
    seen = scores(1.0, 200)
    large = dpaudit.Observations(
        with_canary=seen.with_canary * scale, without_canary=seen.without_canary * scale
    )
    assert "too large" in str(dpaudit.audit(large, claim=STEP).estimate)
    assert result.estimate.noise is not None


@pytest.mark.parametrize("noise", [0.01, 1e-4])
def test_an_audit_that_cannot_refute_its_claim_detects_no_leak(noise):
    claim = dpaudit.Claim.gaussian(noise_multiplier=noise, delta=1e-5)
    result = dpaudit.audit(scores(1.0, 200), claim=claim)
    assert result.verdict is dpaudit.Verdict.UNDERPOWERED
    assert math.isinf(result.power.parameter)
