"""Estimates: their intervals contain the truth as often as stated, and no verdict rests on them."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats
from statistical_limits import count_range, most_flagged, room

import dpaudit
from dpaudit.stats import Estimate, Interval, RocBand
from dpaudit.stats import _estimate as estimate_module
from dpaudit.stats import _roc_band as band_module
from dpaudit.stats._effective_noise import ScoreSpread, noncentral_cdf, noncentral_interval
from dpaudit.stats._roc_band import attack_band, grid

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)


def independent(rng, mu, size):
    return dpaudit.Observations(
        with_canary=rng.normal(mu, 1, size), without_canary=rng.normal(0, 1, size), normalized=mu == 1
    )


def noise_of_steps(rng, steps, canaries, kind):
    """Standard normal noise, steps x canaries, that is independent or not within a step."""
    alone, shared = rng.normal(size=(steps, canaries)), rng.normal(size=(steps, 1))
    return {
        "independent": alone,
        "one draw": np.broadcast_to(shared, alone.shape),
        "half shared": math.sqrt(0.5) * (alone + shared),
        "one draw, either sign": shared * rng.choice([-1, 1], canaries),
    }[kind]


def in_steps(rng, mu, steps, canaries, kind="independent"):
    present = rng.random((steps, canaries)) < 0.5
    scores = present + noise_of_steps(rng, steps, canaries, kind) / mu
    return dpaudit.Observations.from_presence(scores, present, normalized=True)


KINDS = ["independent", "one draw", "half shared", "one draw, either sign"]


class TestNoncentralT:
    """The distribution of a ratio of means to their standard deviation."""

    @pytest.mark.parametrize("degrees", [2, 3, 10, 98])
    @pytest.mark.parametrize("center", [-2.0, 0.0, 0.7, 5.0, 25.0])
    def test_its_distribution_is_the_mean_over_the_standard_deviation(self, degrees, center):
        def given_spread(v):
            density = 2 * degrees * v * stats.chi2.pdf(degrees * v**2, degrees)
            return density * special.ndtr(statistic * v - center)

        for statistic in (-30.0, -1.0, 0.0, 0.5, 6.0, 40.0):
            slow = integrate.quad(given_spread, 0, 2, limit=500)[0]
            slow += integrate.quad(given_spread, 2, 12, limit=500)[0]
            assert noncentral_cdf(statistic, degrees, center) == pytest.approx(slow, abs=1e-8)

    @given(
        statistic=st.floats(-50, 50),
        degrees=st.sampled_from([2.0, 7.0, 100.0, 3e3]),
        error=st.floats(0.001, 0.4),
    )
    def test_both_ends_have_their_share_of_the_error(self, statistic, degrees, error):
        low, high = noncentral_interval(statistic, degrees, error)
        assert noncentral_cdf(statistic, degrees, low) == pytest.approx(1 - error / 2, abs=1e-7)
        assert noncentral_cdf(statistic, degrees, high) == pytest.approx(error / 2, abs=1e-7)

    @pytest.mark.parametrize("degrees", [1e4, 2.5e6, 2e8])
    @pytest.mark.parametrize("ratio", [0.0, 0.39, 3.0, 300.0])
    def test_of_millions_of_scores_it_is_nearly_normal(self, degrees, ratio):
        statistic = ratio * math.sqrt(degrees) / 2
        width = math.sqrt(1 + statistic**2 / (2 * degrees))
        low, high = ((end - statistic) / width for end in noncentral_interval(statistic, degrees, 0.05))
        assert low == pytest.approx(-1.96, abs=2 / math.sqrt(degrees) + 1e-4)
        assert high == pytest.approx(1.96, abs=2 / math.sqrt(degrees) + 1e-4)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=2, max_size=30),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_sums_over_steps_are_those_of_a_loop(sizes, seed, dtype):
    rng = np.random.default_rng(seed)
    steps = [np.repeat(np.arange(len(sizes)), [one[side] for one in sizes]) for side in (0, 1)]
    if steps[1].size == 0:
        return
    sides = [rng.normal(3.0, 2.0, one.size).astype(dtype) for one in steps]
    observations = dpaudit.Observations(
        with_canary=sides[0],
        without_canary=sides[1],
        with_steps=steps[0],
        without_steps=steps[1],
        _coins_were_checked=True,
    )
    spread = ScoreSpread.of(observations)
    for found, scores, step in zip((spread.present, spread.absent), sides, steps, strict=True):
        mean = scores.astype(float).mean()
        assert found.mean == pytest.approx(mean)
        for number in range(observations.num_steps):
            own = scores[step == number].astype(float) - mean
            assert found.counts[number] == own.size
            expected = [(own**k).sum() for k in (1, 2, 3, 4)]
            assert found.powers[:, number] == pytest.approx(expected, abs=1e-4)


def test_a_file_gives_the_noise_of_the_array(tmp_path):
    rng = np.random.default_rng(0)
    shape = 300, 1000  # more than one chunk, which ends within a step
    arrays = {
        "a": rng.normal(1, 1, shape).astype(np.float32),
        "b": rng.normal(0, 1, shape).astype(np.float32),
    }
    for side, array in arrays.items():
        np.save(tmp_path / f"{side}.npy", array)
    mapped = {side: np.load(tmp_path / f"{side}.npy", mmap_mode="r") for side in arrays}
    found = [
        dpaudit.audit(
            dpaudit.Observations(with_canary=one["a"], without_canary=one["b"]), claim=CLAIM
        ).estimate
        for one in (mapped, arrays)
    ]
    assert found[0] == found[1]


class TestIntervals:
    """How often the interval of the noise contains the true noise."""

    @pytest.mark.parametrize(("mu", "size"), [(0.1, 50), (0.39, 1000), (1.0, 50), (3.0, 5), (3.0, 1000)])
    def test_of_independent_normal_scores_is_exact(self, mu, size, is_long):
        runs, rng = 4000 if is_long else 400, np.random.default_rng(size)
        found = [ScoreSpread.of(independent(rng, mu, size)).separation(0.95) for _ in range(runs)]
        missed = sum(not one.low <= mu <= one.high for one in found)
        low, high = count_range(runs, 0.05, comparisons=5)
        assert low <= missed <= high

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("mu", "steps"), [(0.39, 60), (3.0, 12)])
    def test_covers_whatever_scores_of_a_step_share(self, kind, mu, steps):
        runs, rng = 200, np.random.default_rng(steps)
        found = [ScoreSpread.of(in_steps(rng, mu, steps, 12, kind)).separation(0.95) for _ in range(runs)]
        missed = sum(not one.low <= mu <= one.high for one in found)
        assert missed <= most_flagged(runs, 0.05, broken=0.25, comparisons=8)

    def test_that_takes_scores_of_a_step_as_independent_would_not_cover(self):
        rng = np.random.default_rng(0)
        missed = 0
        for _ in range(100):
            spread = ScoreSpread.of(in_steps(rng, 3.0, 60, 12, "one draw"))
            (present, absent), ratio = spread.sizes, spread.difference / spread.deviation
            size = math.sqrt(present * absent / (present + absent))
            low, high = noncentral_interval(ratio * size, spread.degrees, 0.05)
            missed += not low <= 3.0 * size <= high
        assert missed > 30

    @pytest.mark.long
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mu", [0.1, 0.39, 1.0, 3.0])
    @pytest.mark.parametrize(("steps", "canaries"), [(10, 16), (50, 64), (300, 8)])
    def test_covers_in_further_settings(self, kind, mu, steps, canaries):
        runs, rng = 2000, np.random.default_rng(steps)
        found = [
            ScoreSpread.of(in_steps(rng, mu, steps, canaries, kind)).separation(0.95) for _ in range(runs)
        ]
        missed = sum(not one.low <= mu <= one.high for one in found)
        assert missed <= most_flagged(runs, 0.05, broken=0.1, comparisons=48)

    def test_with_steps_is_never_narrower_than_without(self):
        rng = np.random.default_rng(1)
        for kind in KINDS:
            observations = in_steps(rng, 1.0, 40, 8, kind)
            flat = dpaudit.Observations(
                with_canary=observations.with_canary, without_canary=observations.without_canary
            )
            wide, narrow = (ScoreSpread.of(one).separation(0.95) for one in (observations, flat))
            assert wide.value == pytest.approx(narrow.value)
            assert wide.low <= narrow.low + 1e-12
            assert wide.high >= narrow.high - 1e-12

    @given(scale=st.floats(0.01, 100), shift=st.floats(-100, 100), seed=st.integers(0, 50))
    def test_does_not_depend_on_unit_and_origin_of_the_scores(self, scale, shift, seed):
        one = in_steps(np.random.default_rng(seed), 0.7, 12, 5)
        sides = {name: scale * getattr(one, name) + shift for name in ("with_canary", "without_canary")}
        other = replace(one, **sides)
        found = [ScoreSpread.of(each).separation(0.9) for each in (one, other)]
        for end in ("value", "low", "high"):
            assert getattr(found[0], end) == pytest.approx(getattr(found[1], end), rel=1e-6, abs=1e-6)


class TestShape:
    """The diagnostic beside the assumption of normal scores."""

    def test_normal_scores_look_normal_in_all_but_one_of_a_thousand(self):
        rng, runs = np.random.default_rng(3), 300
        kinds = [KINDS[number % 3] for number in range(runs)]
        odd = sum(not ScoreSpread.of(in_steps(rng, 1.0, 60, 8, kind)).shape().is_normal for kind in kinds)
        assert odd <= most_flagged(runs, 0.01, broken=0.1)

    @pytest.mark.parametrize("make", [np.random.Generator.laplace, np.random.Generator.exponential])
    def test_others_do_not(self, make):
        rng = np.random.default_rng(0)
        observations = dpaudit.Observations(
            with_canary=1 + make(rng, size=(100, 50)), without_canary=make(rng, size=(100, 50))
        )
        estimate = dpaudit.audit(observations, claim=CLAIM).estimate
        assert not estimate.shape.is_normal
        assert "(they do not look normal: skewness" in estimate.statement

    def test_is_that_of_scipy(self):
        rng = np.random.default_rng(0)
        sides = rng.gamma(2.0, size=1000), rng.gamma(2.0, size=1000)
        found = ScoreSpread.of(dpaudit.Observations(with_canary=sides[0], without_canary=sides[1])).shape()
        pooled = np.concatenate([side - side.mean() for side in sides])
        assert found.skewness == pytest.approx(stats.skew(pooled), rel=0.01)
        assert found.kurtosis == pytest.approx(stats.kurtosis(pooled), rel=0.01)


def slow_band(present, absent, confidence):
    """The band by its definition, by quantiles of Beta distributions for every rank."""
    rates = grid(absent.size)
    error = (1 - confidence) / (4 * rates.size)
    descending, n0, n1 = np.sort(absent)[::-1], absent.size, present.size
    ranks = np.arange(n0)
    at_most, at_least = (stats.beta.ppf(level, ranks + 1, n0 - ranks) for level in (1 - error, error))
    low, high = np.zeros(rates.size), np.ones(rates.size)
    for i, rate in enumerate(rates):
        if (at_most <= rate).any():
            hits = np.count_nonzero(present > descending[ranks[at_most <= rate].max()])
            low[i] = stats.beta.ppf(error, hits, n1 - hits + 1) if hits else 0.0
        if (at_least >= rate).any():
            hits = np.count_nonzero(present >= descending[ranks[at_least >= rate].min()])
            high[i] = stats.beta.ppf(1 - error, hits + 1, n1 - hits) if hits < n1 else 1.0
    return np.maximum.accumulate(low), np.minimum.accumulate(high[::-1])[::-1]


def normal_tpr(mu, fpr):
    return special.ndtr(mu + special.ndtri(fpr))


class TestBand:
    """The simultaneous band of the attack's ROC."""

    @pytest.mark.parametrize(("present", "absent"), [(7, 5), (60, 40), (100, 250)])
    def test_is_that_of_its_definition(self, present, absent):
        rng = np.random.default_rng(present)
        sides = rng.normal(1.5, 1, present), rng.normal(0, 1, absent)
        found = attack_band(dpaudit.Observations(with_canary=sides[0], without_canary=sides[1]), 0.95)
        low, high = slow_band(*sides, 0.95)
        assert found[2] == pytest.approx(low, abs=1e-9)
        assert found[3] == pytest.approx(high, abs=1e-9)

    @given(
        seed=st.integers(0, 99),
        present=st.integers(1, 200),
        absent=st.integers(1, 200),
        decimals=st.sampled_from([0, 1, 9]),
    )
    def test_contains_what_was_reached_and_rises(self, seed, present, absent, decimals):
        rng = np.random.default_rng(seed)
        sides = rng.normal(1, 1, present).round(decimals), rng.normal(0, 1, absent).round(decimals)
        observations = dpaudit.Observations(with_canary=sides[0], without_canary=sides[1])
        rates, reached, low, high = attack_band(observations, 0.95)
        for fpr, tpr in zip(rates, reached, strict=True):
            rules = [(sides[1] >= t, sides[0] >= t) for t in sides[1]]
            rules += [(sides[1] > t, sides[0] > t) for t in sides[1]]
            best = max(hit.mean() for wrong, hit in rules if wrong.sum() <= math.floor(fpr * absent))
            assert tpr == pytest.approx(best)
        assert (low <= reached).all()
        assert (reached <= high).all()
        for ends in (reached, low, high):
            assert (np.diff(ends) >= 0).all()

    @pytest.mark.parametrize("bins", [False, True])
    @pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
    def test_contains_the_whole_curve_of_independent_scores(self, mu, bins, monkeypatch):
        if bins:  # as for very many scores
            monkeypatch.setattr(band_module, "_SORTED", 10)
        rng, runs, missed = np.random.default_rng(0), 100, 0
        for _ in range(runs):
            rates, _, low, high = attack_band(independent(rng, mu, 300), 0.5)
            truth = normal_tpr(mu, rates)
            missed += bool((low > truth + 1e-12).any() or (high < truth - 1e-12).any())
        assert missed <= most_flagged(runs, 0.5, broken=0.8)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mu", [0.39, 3.0])
    def test_contains_the_whole_curve_whatever_scores_of_a_step_share(self, kind, mu):
        rng, runs, missed = np.random.default_rng(0), 60, 0
        for _ in range(runs):
            rates, _, low, high = attack_band(in_steps(rng, mu, 50, 30, kind), 0.95)
            truth = normal_tpr(mu, rates)
            missed += bool((low > truth + 1e-12).any() or (high < truth - 1e-12).any())
        assert missed <= most_flagged(runs, 0.05, broken=0.3)

    def test_of_one_shared_draw_is_that_of_steps_not_of_scores(self):
        rng = np.random.default_rng(0)
        shared, alone = (
            attack_band(in_steps(rng, 1.0, 100, 50, kind), 0.95) for kind in ("one draw", KINDS[0])
        )
        middle = -7
        assert shared[0][middle] == 0.5
        assert shared[3][middle] - shared[2][middle] > 2 * (alone[3][middle] - alone[2][middle])
        fewer = attack_band(independent(rng, 1.0, 100), 0.95)
        assert shared[3][middle] - shared[2][middle] == pytest.approx(
            fewer[3][middle] - fewer[2][middle], rel=0.4
        )

    def test_of_very_many_scores_takes_bins_for_ranks_and_loses_little(self, monkeypatch):
        observations = independent(np.random.default_rng(0), 1.0, 20_000)
        exact = attack_band(observations, 0.95)
        monkeypatch.setattr(band_module, "_SORTED", 10)
        rough = attack_band(observations, 0.95)
        assert rough[2] == pytest.approx(exact[2], abs=0.003)
        assert rough[3] == pytest.approx(exact[3], abs=0.003)
        assert (rough[2] <= exact[2] + 1e-12).all()
        assert (rough[3] >= exact[3] - 1e-12).all()

    def test_counts_steps_in_blocks(self, monkeypatch):
        observations = in_steps(np.random.default_rng(0), 1.0, 60, 20, "half shared")
        whole = attack_band(observations, 0.95)
        monkeypatch.setattr(band_module, "_CELLS", 200)
        parts = attack_band(observations, 0.95)
        assert np.array_equal(whole, parts)


class TestResult:
    """Estimates as a part of a result."""

    def test_states_the_ratio_to_the_claim_and_epsilon(self):
        rng = np.random.default_rng(0)
        result = dpaudit.audit(in_steps(rng, 1 / 0.7, 400, 64), claim=CLAIM)
        found = result.estimate
        assert found.noise_ratio.low < 0.7 < found.noise_ratio.high
        assert found.noise_ratio == found.noise_multiplier  # of a claimed 1
        assert found.epsilon.low < dpaudit.Gaussian().epsilon(1 / 0.7, 1e-5) < found.epsilon.high
        assert found.noise.startswith("effective noise 0.7")
        assert " of the claim [0.6" in found.noise
        line = next(line for line in str(result).splitlines() if line.startswith("  estimate: "))
        assert line == f"  estimate: {found.statement}"
        assert "an estimate for this attack, not a bound, that assumes normal scores" in line
        assert "(they look normal: excess kurtosis" in line

    def test_epsilon_is_that_of_the_claim_with_this_noise(self):
        found = Estimate.of(
            in_steps(np.random.default_rng(0), 1.0, 100, 64),
            tradeoff=dpaudit.Gaussian(),
            claimed=0.5,
            epsilon=lambda mu: 10 * mu,
            confidence=0.95,
        )
        for end, other in (("value", "value"), ("low", "high"), ("high", "low")):
            assert getattr(found.epsilon, end) == pytest.approx(10 / getattr(found.noise_multiplier, other))
            assert getattr(found.noise_ratio, end) == pytest.approx(getattr(found.noise_multiplier, end) / 2)

    def test_is_in_units_of_the_sensitivity_where_the_clip_is_wrong(self):
        # twice the signal at the claimed noise is half of the effective noise
        rng = np.random.default_rng(0)
        observations = dpaudit.Observations(
            with_canary=rng.normal(2, 1, 5000), without_canary=rng.normal(0, 1, 5000), normalized=True
        )
        ratio = dpaudit.audit(observations, claim=CLAIM).estimate.noise_ratio
        assert ratio.value == pytest.approx(0.5, abs=room(0.5 * math.sqrt(1 / 10_000 + 2 / 5000 / 4)))

    @pytest.mark.parametrize("shift", [0.0, -0.2])
    def test_without_a_difference_has_no_upper_end(self, shift):
        rng = np.random.default_rng(0)
        observations = dpaudit.Observations(
            with_canary=rng.normal(shift, 1, 300), without_canary=rng.normal(0, 1, 300)
        )
        found = dpaudit.audit(observations, claim=CLAIM).estimate
        assert found.noise_ratio.high == math.inf
        assert found.epsilon.low == 0
        assert found.noise.startswith("effective noise at least ")
        assert json.loads(json.dumps(found.to_dict()))["noise_ratio"]["high"] == "inf"

    def test_no_verdict_rests_on_it(self, monkeypatch):
        def broken(*_, **__):
            raise AssertionError

        monkeypatch.setattr(estimate_module.Estimate, "of", broken)
        rng = np.random.default_rng(0)
        for mu, verdict in ((1.0, "NO_VIOLATION"), (3.0, "VIOLATION")):
            result = dpaudit.audit(in_steps(rng, mu, 200, 64), claim=CLAIM)
            assert result.verdict.name == verdict
            result.power  # noqa: B018
        assert Estimate.kind not in list(dpaudit.Kind)

    def test_says_why_it_is_missing(self):
        rng = np.random.default_rng(0)
        cases = {
            "at least 10 steps, got 9": in_steps(rng, 1.0, 9, 64),
            "at least 2 scores on each side": dpaudit.Observations(with_canary=[1.0], without_canary=[0.1]),
            "do not spread like noise": dpaudit.Observations(
                with_canary=[1.0] * 30, without_canary=[0.0] * 30
            ),
        }
        for reason, observations in cases.items():
            method = {"threshold": dpaudit.Fixed(0.5)}
            result = dpaudit.audit(observations, claim=CLAIM, **method)
            assert reason in result.estimate.missing
            assert result.estimate.noise_multiplier is None
            assert result.estimate.statement == result.estimate.missing
            assert "estimate:" not in str(result)
            assert result.to_dict()["estimate"]["missing"] == result.estimate.missing

    def test_of_another_claim_has_rates_only(self):
        observations = independent(np.random.default_rng(0), 1.0, 500)
        claim = dpaudit.Claim.approximate_dp(epsilon=4.0, delta=1e-5)
        result = dpaudit.audit(observations, claim=claim)
        found = result.estimate
        assert found.noise_multiplier is None
        assert [point.fpr for point in found.roc.points] == [0.001, 0.01, 0.1]
        for point in found.roc.points:
            assert point.claimed == pytest.approx(min(1e-5 + math.exp(4) * point.fpr, 1), rel=0.05)
            assert point.low <= point.reached <= point.high
        assert f"  rates: {found.rates}" in str(result).splitlines()
        assert "at a false positive rate of 0.1 %, this attack has a true positive rate of" in found.rates
        assert found.rates.endswith("; the intervals assume independent scores of a number fixed before")

    def test_has_no_band_of_few_steps_but_one_of_files(self, tmp_path):
        rng = np.random.default_rng(0)
        few = dpaudit.audit(in_steps(rng, 1.0, 9, 64), claim=CLAIM).estimate
        assert few.roc is None
        assert few.rates is None
        np.save(tmp_path / "scores.npy", rng.normal(size=1000))
        mapped = np.load(tmp_path / "scores.npy", mmap_mode="r")
        large = dpaudit.audit(dpaudit.Observations(with_canary=mapped, without_canary=mapped), claim=CLAIM)
        assert large.estimate.noise_multiplier is not None
        whole = dpaudit.Observations(with_canary=np.array(mapped), without_canary=np.array(mapped))
        assert large.estimate.roc is not None
        assert large.estimate.roc.to_dict() == dpaudit.audit(whole, claim=CLAIM).estimate.roc.to_dict()

    def test_is_restored_from_json(self):
        result = dpaudit.audit(in_steps(np.random.default_rng(0), 1.0, 50, 8), claim=CLAIM)
        values = json.loads(json.dumps(result.to_dict()["estimate"], allow_nan=False))
        again = Estimate.from_dict(values)
        assert again == result.estimate
        assert str(again) == str(result.estimate)
        assert again.to_dict() == values
        assert values["kind"] == "estimate"

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("confidence", 2.0),
            ("noise_ratio", {"value": 3.0, "low": 1.0, "high": 2.0}),
            ("noise_ratio", [1, 2, 3]),
            ("shape", {"skewness": "large", "kurtosis": 0, "is_normal": True}),
            ("missing", 7),
            ("roc", {"confidence": 0.95, "fpr": [0.1], "claimed": [], "reached": [], "low": [], "high": []}),
            (
                "roc",
                {
                    "confidence": 0.95,
                    **dict.fromkeys(("fpr", "claimed", "reached", "low", "high"), [0.1] * 3),
                },
            ),
        ],
    )
    def test_refuses_damaged_values(self, key, value):
        values = dpaudit.audit(in_steps(np.random.default_rng(0), 1.0, 50, 8), claim=CLAIM).estimate.to_dict()
        with pytest.raises(dpaudit.InputError):
            Estimate.from_dict({**values, key: value})

    def test_survives_pickling(self):
        result = dpaudit.audit(in_steps(np.random.default_rng(0), 1.0, 50, 8), claim=CLAIM)
        again = pickle.loads(pickle.dumps(result.estimate))
        assert again == result.estimate
        assert again.rates == result.estimate.rates

    def test_of_a_result_without_scores_is_empty(self):
        result = dpaudit.audit(in_steps(np.random.default_rng(0), 1.0, 50, 8), claim=CLAIM)
        bare = dpaudit.Result(
            claim=result.claim,
            bound=result.bound,
            hypothesis=result.hypothesis,
            design=result.design,
        )
        assert bare.estimate.missing == "The scores are not part of this result."
        assert bare.estimate.roc is None

    def test_band_can_be_drawn(self):
        pytest.importorskip("matplotlib")
        from matplotlib.figure import Figure  # noqa: PLC0415

        roc = dpaudit.audit(in_steps(np.random.default_rng(0), 1.0, 50, 8), claim=CLAIM).estimate.roc
        assert isinstance(roc, RocBand)
        ax = roc.plot(ax=Figure().subplots())
        assert {text.get_text() for text in ax.get_legend().get_texts()} == {
            "95 % band",
            "claimed curve",
            "this attack",
        }


def test_an_interval_of_a_falling_function_is_turned_around():
    assert Interval(2.0, 1.0, 4.0).mapped(lambda x: 1 / x) == Interval(0.5, 0.25, 1.0)
