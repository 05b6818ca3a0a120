"""Estimates: their intervals contain the truth as often as stated, and no verdict rests on them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from statistical_limits import count_range, most_flagged

import dpaudit
from dpaudit.stats import Estimate
from dpaudit.stats import _estimate as estimate_module
from dpaudit.stats import _roc_band as band_module
from dpaudit.stats._estimate import Interval, ScoreSums, step_sides
from dpaudit.stats._observations import CoinSteps
from dpaudit.stats._roc_band import RATES, attack_roc

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
        steps=CoinSteps(*steps),
    )
    sums = ScoreSums.of(observations)
    pooled = np.zeros((5, observations.num_steps))
    gaps = np.zeros(observations.num_steps)
    for scores, step, sign in zip(sides, steps, (1, -1), strict=True):
        for number in range(observations.num_steps):
            centered = scores[step == number].astype(float) - scores.astype(float).mean()
            pooled[:, number] += [(centered**k).sum() for k in range(5)]
            gaps[number] += sign * centered.sum() / scores.size
    assert sums.difference == pytest.approx(sides[0].astype(float).mean() - sides[1].astype(float).mean())
    assert sums.powers == pytest.approx(pooled, abs=1e-4)
    assert sums.gaps == pytest.approx(gaps, abs=1e-5)


def test_sums_of_many_steps_are_stored_in_groups(monkeypatch):
    observations = in_steps(np.random.default_rng(0), 1.0, 47, 6)
    steps = ScoreSums.of(observations)
    monkeypatch.setattr(estimate_module, "_MOST_GROUPS", 12)
    groups = ScoreSums.of(observations)
    merged = np.pad(steps.powers, [(0, 0), (1, 0)]).reshape(5, 12, 4).sum(axis=2)  # the first has fewer
    assert groups.powers == pytest.approx(merged)
    assert groups.deviation == pytest.approx(steps.deviation)


class TestIntervals:
    """How often the interval of the noise contains the true noise."""

    @pytest.mark.parametrize(("mu", "size"), [(0.1, 50), (0.39, 1000), (1.0, 50), (3.0, 5), (3.0, 1000)])
    def test_of_independent_normal_scores_has_its_error_rate(self, mu, size, is_long):
        runs, rng = 4000 if is_long else 400, np.random.default_rng(size)
        found = [ScoreSums.of(independent(rng, mu, size)).separation(0.95) for _ in range(runs)]
        missed = sum(not one.low <= mu <= one.high for one in found)
        low, high = count_range(runs, 0.05, comparisons=5)
        assert (0 if size < 20 else low) <= missed <= high

    @pytest.mark.parametrize("sizes", [(2, 2), (5, 50), (20, 20), (1000, 10), (1000, 1000)])
    @pytest.mark.parametrize("mu", [-1.0, 0.0, 0.39, 3.0, 10.0])
    def test_has_the_error_rate_of_a_noncentral_t(self, sizes, mu):
        """The share of ratios whose interval misses mu, by the exact distribution of the ratio."""
        size, degrees = math.sqrt(sizes[0] * sizes[1] / sum(sizes)), sum(sizes) - 2
        levels = np.linspace(0.0005, 0.9995, 1000)
        ratios = stats.nct.ppf(levels, degrees, mu * size) / size
        powers = np.asarray([[sum(sizes)], [0], [degrees], [0], [1]])
        sums = [ScoreSums(0.0, ratio, 1.0, sizes, np.zeros(1), powers, False) for ratio in ratios]
        found = [one.separation(0.95) for one in sums]
        above, below = np.mean([(one.low > mu, one.high < mu) for one in found], axis=0)
        assert below + above <= 0.0505
        if min(sizes) >= 20:
            assert below + above >= 0.046
            assert max(below, above) <= 0.037

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("mu", "steps", "canaries"),
        [
            (0.39, 60, 12),
            (3.0, 12, 12),
            *(pytest.param(mu, 10, 16, marks=pytest.mark.long) for mu in (0.1, 0.39, 1.0, 3.0)),
            *(pytest.param(mu, 300, 8, marks=pytest.mark.long) for mu in (0.1, 0.39, 1.0, 3.0)),
        ],
    )
    def test_covers_whatever_scores_of_a_step_share(self, kind, mu, steps, canaries, is_long):
        runs, rng = 2000 if is_long else 200, np.random.default_rng(steps)
        found = [ScoreSums.of(in_steps(rng, mu, steps, canaries, kind)).separation(0.95) for _ in range(runs)]
        missed = sum(not one.low <= mu <= one.high for one in found)
        assert missed <= most_flagged(runs, 0.05, broken=0.1 if is_long else 0.25, comparisons=40)

    def test_that_takes_scores_of_a_step_as_independent_would_not_cover(self):
        rng = np.random.default_rng(0)
        sums = [ScoreSums.of(in_steps(rng, 3.0, 60, 12, "one draw")) for _ in range(100)]
        found = [replace(one, is_stepped=False).separation(0.95) for one in sums]
        assert sum(not one.low <= 3.0 <= one.high for one in found) > 30

    @given(scale=st.floats(0.01, 100), shift=st.floats(-100, 100), seed=st.integers(0, 50))
    def test_does_not_depend_on_unit_and_origin_of_the_scores(self, scale, shift, seed):
        one = in_steps(np.random.default_rng(seed), 0.7, 12, 5)
        sides = {name: scale * getattr(one, name) + shift for name in ("with_canary", "without_canary")}
        other = replace(one, **sides)
        found = [ScoreSums.of(each).separation(0.9) for each in (one, other)]
        for end in ("value", "low", "high"):
            assert getattr(found[0], end) == pytest.approx(getattr(found[1], end), rel=1e-6, abs=1e-6)


class TestShape:
    """The diagnostic beside the assumption of normal scores."""

    def test_normal_scores_look_normal_in_all_but_one_of_a_thousand(self):
        rng, runs = np.random.default_rng(3), 300
        kinds = [KINDS[number % 3] for number in range(runs)]
        odd = sum(not ScoreSums.of(in_steps(rng, 1.0, 60, 8, kind)).shape().is_normal for kind in kinds)
        assert odd <= most_flagged(runs, 0.01, broken=0.1)

    @pytest.mark.parametrize("make", [np.random.Generator.laplace, np.random.Generator.exponential])
    def test_others_do_not(self, make):
        rng = np.random.default_rng(0)
        observations = dpaudit.Observations(
            with_canary=1 + make(rng, size=(100, 50)), without_canary=make(rng, size=(100, 50))
        )
        estimate = dpaudit.audit(observations, claim=CLAIM).estimate
        assert not estimate.shape.is_normal
        assert estimate.noise_multiplier is estimate.noise_ratio is estimate.epsilon is None
        assert estimate.noise is None
        assert estimate.missing.startswith(
            "The noise is not estimated, as the scores do not look normal (skewness "
        )
        assert estimate.statement == estimate.missing
        assert Estimate.from_dict(json.loads(json.dumps(estimate.to_dict()))) == estimate

    def test_is_that_of_scipy(self):
        rng = np.random.default_rng(0)
        sides = rng.gamma(2.0, size=1000), rng.gamma(2.0, size=1000)
        found = ScoreSums.of(dpaudit.Observations(with_canary=sides[0], without_canary=sides[1])).shape()
        pooled = np.concatenate([side - side.mean() for side in sides])
        assert found.skewness == pytest.approx(stats.skew(pooled), rel=0.01)
        assert found.kurtosis == pytest.approx(stats.kurtosis(pooled), rel=0.01)


def roc_of(observations, confidence=0.95):
    sums = ScoreSums.of(observations)
    return attack_roc(
        list(step_sides(observations)),
        center=sums.center,
        deviation=sums.deviation,
        fnr=lambda fpr: 1 - fpr,
        confidence=confidence,
    )


def slow_interval(present, absent, fpr, confidence):
    """The interval of one true positive rate by its definition, threshold by threshold."""
    quantile, lows, highs = stats.norm.ppf((1 + confidence) / 2), [], []
    error = math.sqrt(fpr * (1 - fpr) * absent.size)
    thresholds = np.concatenate([[-np.inf], np.sort(absent)])
    above = np.asarray([np.count_nonzero(absent > threshold) for threshold in thresholds])
    for angle in np.linspace(-math.pi / 2, math.pi / 2, 17):
        tail = stats.norm.cdf(-quantile * math.cos(angle))
        off = quantile * math.sin(angle) * error
        fewer, more = math.floor(fpr * absent.size - off), math.ceil(fpr * absent.size + off)
        low, high = 0.0, 1.0
        if fewer >= 0:
            hits = np.count_nonzero(present > thresholds[above <= fewer].min())
            low = stats.beta.ppf(tail, hits, present.size - hits + 1) if hits else 0.0
        if more <= absent.size:
            hits = np.count_nonzero(present > thresholds[above >= more].max())
            high = stats.beta.ppf(1 - tail, hits + 1, present.size - hits) if hits < present.size else 1.0
        lows.append(low)
        highs.append(high)
    return min(lows), max(highs)


def normal_tpr(mu, fpr):
    return special.ndtr(mu + special.ndtri(fpr))


def missed_rates(found, mu):
    truth = normal_tpr(mu, found.fpr)
    return (found.low > truth + 1e-12) | (found.high < truth - 1e-12)


class TestBand:
    """The intervals of the attack's true positive rates."""

    @pytest.mark.parametrize(("present", "absent"), [(7, 5), (60, 40), (100, 250)])
    def test_is_that_of_its_definition(self, present, absent):
        rng = np.random.default_rng(present)
        sides = rng.normal(1.5, 1, present), rng.normal(0, 1, absent)
        found = roc_of(dpaudit.Observations(with_canary=sides[0], without_canary=sides[1]))
        slow = np.asarray([slow_interval(*sides, fpr, 0.95) for fpr in found.fpr])
        assert found.low == pytest.approx(np.minimum.accumulate(slow[::-1, 0])[::-1], abs=1e-9)
        assert found.high == pytest.approx(np.maximum.accumulate(slow[:, 1]), abs=1e-9)

    @given(
        seed=st.integers(0, 99),
        present=st.integers(1, 200),
        absent=st.integers(1, 200),
        decimals=st.sampled_from([0, 1, 9]),
    )
    def test_contains_what_was_reached_and_rises(self, seed, present, absent, decimals):
        rng = np.random.default_rng(seed)
        sides = rng.normal(1, 1, present).round(decimals), rng.normal(0, 1, absent).round(decimals)
        found = roc_of(dpaudit.Observations(with_canary=sides[0], without_canary=sides[1]))
        for fpr, tpr in zip(found.fpr, found.reached, strict=True):
            rules = [(sides[1] >= t, sides[0] >= t) for t in sides[1]]
            rules += [(sides[1] > t, sides[0] > t) for t in sides[1]]
            best = max(hit.mean() for wrong, hit in rules if wrong.sum() <= math.floor(fpr * absent))
            assert tpr == pytest.approx(best)
        assert (found.low <= found.reached).all()
        assert (found.reached <= found.high).all()
        for ends in (found.reached, found.low, found.high):
            assert (np.diff(ends) >= 0).all()

    @pytest.mark.parametrize("bins", [False, True])
    @pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
    def test_contains_each_rate_of_independent_scores(self, mu, bins, monkeypatch):
        if bins:  # as for very many scores
            monkeypatch.setattr(band_module, "_SORTED", 10)
        rng, runs = np.random.default_rng(0), 200
        missed = sum(missed_rates(roc_of(independent(rng, mu, 300), 0.8), mu) for _ in range(runs))
        assert missed.max() <= most_flagged(runs, 0.2, broken=0.4, comparisons=6 * missed.size)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("mu", [0.39, 1.0])
    def test_contains_each_rate_whatever_scores_of_a_step_share(self, kind, mu):
        rng, runs = np.random.default_rng(0), 100
        every = [missed_rates(roc_of(in_steps(rng, mu, 50, 30, kind)), mu)[-12:] for _ in range(runs)]
        assert np.sum(every, axis=0).max() <= most_flagged(runs, 0.05, broken=0.35, comparisons=8 * 12)

    def test_of_very_many_scores_takes_bins_for_ranks_and_loses_little(self, monkeypatch):
        observations = independent(np.random.default_rng(0), 1.0, 20_000)
        exact = roc_of(observations)
        monkeypatch.setattr(band_module, "_SORTED", 10)
        rough = roc_of(observations)
        many = exact.fpr >= 0.001  # where there are 20 absent scores above the threshold
        assert rough.low[many] == pytest.approx(exact.low[many], abs=0.003)
        assert rough.high[many] == pytest.approx(exact.high[many], abs=0.003)

    def test_errors_of_steps_are_those_of_a_loop(self):
        observations = in_steps(np.random.default_rng(0), 1.0, 30, 8, "half shared")
        scores, ends = next(step_sides(observations))
        scores, thresholds = np.floor(3 + 2 * scores).clip(0).astype(int), np.asarray([5, 4, 4, 2])
        found = band_module._step_errors((scores, ends), lambda numbers: numbers, thresholds)
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            for column, threshold in enumerate(thresholds):
                share = np.mean(scores >= threshold)
                error = np.count_nonzero(scores[start:end] >= threshold) - share * (end - start)
                unit = math.sqrt(29 / 30 * scores.size * share * (1 - share))
                assert found[number, column] == pytest.approx(error / unit)


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
        line = next(line for line in result.details().splitlines() if line.startswith("  estimate: "))
        assert line == f"  estimate: {found.statement}"
        assert "an estimate for this attack, not a bound, that assumes normal scores" in line
        assert line.endswith("normal scores, independent steps and no early stopping")

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
            assert "estimate:" not in result.details()
            assert result.to_dict()["estimate"]["missing"] == result.estimate.missing

    def test_of_another_claim_has_rates_only(self):
        observations = independent(np.random.default_rng(0), 1.0, 500)
        claim = dpaudit.Claim.approximate_dp(epsilon=4.0, delta=1e-5)
        result = dpaudit.audit(observations, claim=claim)
        found = result.estimate
        assert found.noise_multiplier is None
        for rate in RATES:
            place = int(np.flatnonzero(found.roc.fpr == rate)[0])
            assert found.roc.claimed[place] == pytest.approx(min(1e-5 + math.exp(4) * rate, 1), rel=0.05)
            assert f"of {100 * rate:g} %, {found.roc.reached[place]:.3g} [" in found.rates
        assert f"  rates: {found.rates}" in result.details().splitlines()
        assert found.rates.endswith("; each interval has 95 % confidence, if scores are independent")

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


def test_an_interval_of_a_falling_function_is_turned_around():
    assert Interval(2.0, 1.0, 4.0).mapped(lambda x: 1 / x) == Interval(0.5, 0.25, 1.0)
