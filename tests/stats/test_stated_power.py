"""Audits detect the leak that they state as often as they say, whatever their rule and canaries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from statistical_limits import count_range, room, share_room

import dpaudit
from dpaudit.accounting import SubsampledGaussian
from dpaudit.accounting._log_ratios import log_ratio_attack
from dpaudit.recording import Recorder, WholeRunRecorder
from dpaudit.stats._counts import StepScores
from dpaudit.stats._planning import _Planner
from dpaudit.stats._power import AuditDesign
from dpaudit.stats._simulated_bets import BettingPower, needed_shift
from dpaudit.stats.inference import BoundQuery
from dpaudit.stats.thresholds._base import least_balanced_error
from dpaudit.stats.thresholds._placement import (
    best_bound_rates,
    least_error_rates,
    simulated_roc,
    step_rates,
)
from dpaudit.stats.thresholds._rules import choose
from dpaudit.stats.tradeoffs._attack import gaussian_attack, sampled_attack

DELTA = 1e-5
GAUSSIAN = dpaudit.Gaussian()
Audit = Callable[[float, np.random.Generator], dpaudit.Result]


def gaussian_claim(mu: float) -> dpaudit.Claim:
    return dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=DELTA)


def independent(claim: dpaudit.Claim, size: int, mu: Callable[[float], float], **kind: bool) -> Audit:
    def audit(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        noise = rng.standard_normal((2, size)) / mu(parameter)
        scores = dpaudit.Observations(with_canary=1 + noise[1], without_canary=noise[0], **kind)
        return dpaudit.audit(scores, claim=claim)

    return audit


def generic(epsilon: float, size: int, **kind: bool) -> Audit:
    claim = dpaudit.Claim.approximate_dp(epsilon=epsilon, delta=DELTA)
    return independent(claim, size, lambda leak: GAUSSIAN.with_epsilon(leak, DELTA), **kind)


def steps(mu: float, num_steps: int, num_canaries: int, *, normalized: bool) -> Audit:
    def audit(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        present = rng.random((num_steps, num_canaries)) < 0.5
        values = present + rng.standard_normal(present.shape) / parameter
        scores = dpaudit.Observations.from_presence(values, present, normalized=normalized)
        return dpaudit.audit(scores, claim=gaussian_claim(mu))

    return audit


def recorded(mu: float, num_steps: int, num_canaries: int, lengths: tuple[float, ...]) -> Audit:
    """Canaries of different lengths, in units of their own; as power depends on them, all runs share them."""
    length = np.resize(lengths, num_canaries)

    def audit(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        recorder = Recorder(claim=gaussian_claim(mu), num_steps=num_steps, coupled=True, signal=1.0)
        for _ in range(num_steps):
            present = rng.random(num_canaries) < 0.5
            noise = rng.standard_normal(num_canaries) / (parameter * length)
            recorder.record(present + noise, present, lengths=length)
        return recorder.audit()

    return audit


def whole_run(noise: float, rate: float, num_steps: int, num_canaries: int) -> Audit:
    def audit(parameter: float, rng: np.random.Generator) -> dpaudit.Result:
        present = rng.random(num_canaries) < 0.5
        recorder = WholeRunRecorder(
            present, noise_multiplier=noise, sample_rate=rate, num_steps=num_steps, delta=DELTA
        )
        for _ in range(num_steps):
            joined = present & (rng.random(num_canaries) < rate)
            recorder.record(joined + rng.standard_normal(num_canaries) / parameter)
        return recorder.audit()

    return audit


DESIGNS: dict[str, tuple[float, Audit]] = {
    "(eps, delta), normalized": (1.0, generic(1.0, 300, normalized=True)),  # before: 0 %
    "(eps, delta), raw": (1.0, generic(1.0, 60)),  # before: 0 %
    "normalized, few": (2.0, independent(gaussian_claim(2.0), 90, lambda mu: mu, normalized=True)),
    "coins": (1.0, steps(1.0, 60, 32, normalized=True)),
    "raw coins": (1.0, steps(1.0, 60, 32, normalized=False)),
    "short canaries": (1.0, recorded(1.0, 50, 32, (0.1,))),  # before: 0 %
    "canaries of many lengths": (1.0, recorded(1.0, 50, 32, (0.1, 0.5, 1.0))),  # before: 0 %
}
SLOW_DESIGNS: dict[str, tuple[float, Audit]] = {
    "raw, many": (1.0, independent(gaussian_claim(1.0), 400, lambda mu: mu)),
    "whole run": (0.5, whole_run(2.0, 0.1, 40, 300)),  # before: 53 %
    "raw, very many": (1.0, independent(gaussian_claim(1.0), 1000, lambda mu: mu)),  # before: 72 %
    "long run": (0.39, steps(0.39, 300, 256, normalized=True)),
}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", [*DESIGNS, *(pytest.param(name, marks=pytest.mark.long) for name in SLOW_DESIGNS)]
)
def test_a_leak_is_detected_as_often_as_stated(name: str, is_long: bool) -> None:
    claimed, audit = (DESIGNS | SLOW_DESIGNS)[name]
    leak = audit(claimed, np.random.default_rng(0)).power.parameter
    runs = 600 if is_long else 80
    found = [audit(leak, np.random.default_rng([1, seed])).verdict for seed in range(runs)]
    # five points for the approximation, besides the variation of few runs
    low, high = count_range(runs, 0.75)[0], count_range(runs, 0.85)[1]
    assert low <= found.count(dpaudit.Verdict.VIOLATION) <= high


def test_the_power_of_a_threshold_from_held_out_scores_is_that_of_real_choices() -> None:
    query = BoundQuery(GAUSSIAN, DELTA, 0.05)
    design = AuditDesign.sized(
        num_absent=1000,
        num_present=1000,
        num_steps=None,
        inference=dpaudit.ClopperPearson(),
        rule=dpaudit.HeldOut(0.1),
        query=query,
        normalized=False,
    )
    leak, rng = design.smallest_leak(1.0), np.random.default_rng(4)
    sizes = dpaudit.ErrorCounts.perfect(900, 900)
    region = dpaudit.ClopperPearson().refuting_region(1.0, sizes, (0.001, 0.999), query)
    rates = []
    for _ in range(150):
        threshold = choose(rng.standard_normal(100), leak + rng.standard_normal(100), query)
        rates.append(region.probability(special.ndtr(-threshold), special.ndtr(threshold - leak)))
    assert abs(np.mean(rates) - 0.8) < 0.02 + room(float(np.std(rates)) / np.sqrt(150))


@pytest.mark.parametrize("sizes", [(4, 4), (100, 60), (3000, 3000)], ids=str)
def test_simulated_thresholds_lie_where_real_ones_do(sizes: tuple[int, int]) -> None:
    query, rng, runs = BoundQuery(GAUSSIAN, DELTA, 0.05), np.random.default_rng(5), 60
    real = []
    for _ in range(runs):
        absent, present = rng.standard_normal(sizes[0]), 1.5 + rng.standard_normal(sizes[1])
        found = choose(absent, present, query), least_balanced_error(absent, present)
        real.append([sum(special.ndtr([-one, one - 1.5])) for one in found])
    attack = gaussian_attack(1.5)
    for column, rates in enumerate(
        (best_bound_rates(attack, sizes, 64, query), least_error_rates(attack, sizes))
    ):
        values = np.asarray(real)[:, column]
        error = float(np.hypot(values.std() / np.sqrt(runs), (rates[0] + rates[1]).std() / 8))
        assert float((rates[0] + rates[1]).mean()) == pytest.approx(values.mean(), abs=0.004 + room(error))


def test_predictable_thresholds_lose_most_in_the_first_steps() -> None:
    fpr, fnr = step_rates(gaussian_attack(1.0), (4, 4), 300)
    errors = fpr + fnr
    assert errors.size == 300
    assert (np.diff(errors) < 0.01).all()
    assert 2 * special.ndtr(-0.5) <= errors[-1] < errors[0] - 0.02
    assert errors[-1] < 2 * special.ndtr(-0.5) + 0.01


def test_false_negatives_at_ranks_are_those_of_sorted_scores() -> None:
    attack, ranks, rng = gaussian_attack(1.0), np.asarray([0, 3, 10, 29]), np.random.default_rng(6)
    fpr, misses = simulated_roc(attack, ranks, (30, 20), 2000, rng)
    absent = -np.sort(-rng.standard_normal((2000, 30)), axis=1)[:, ranks]
    present = 1 + rng.standard_normal((2000, 20))
    counted = (present[:, None, :] <= absent[:, :, None]).sum(axis=2)
    for column, rank in enumerate(ranks):
        assert stats.kstest(fpr[:, column], stats.beta(rank + 1, 30 - rank).cdf).pvalue > 1e-4
        error = float(np.hypot(misses[:, column].std(), counted[:, column].std()) / np.sqrt(2000)) + 1e-3
        assert misses[:, column].mean() == pytest.approx(counted[:, column].mean(), abs=room(error))


@pytest.mark.parametrize(("noise", "assumed"), [(1.0, 1.0), (0.7, 1.0), (0.4, 0.4)])
def test_log_ratios_of_whole_runs_have_their_simulated_distribution(noise: float, assumed: float) -> None:
    rate, num_steps, size, rng = 0.1, 30, 20_000, np.random.default_rng(7)
    attack = log_ratio_attack(noise, rate, num_steps, assumed)
    sums = []
    for joins in (0.0, rate):
        scores = (rng.random((num_steps, size)) < joins) + noise * rng.standard_normal((num_steps, size))
        sums.append(np.log1p(rate * np.expm1((2 * scores - 1) / (2 * assumed**2))).sum(axis=0))
    assert attack.rates_at is not None
    for threshold in np.quantile(sums[0], [0.1, 0.5, 0.9, 0.99]):
        fpr, fnr = attack.rates_at(float(threshold))
        assert fpr == pytest.approx(np.mean(sums[0] > threshold), abs=share_room(0.25, size))
        assert fnr == pytest.approx(np.mean(sums[1] <= threshold), abs=share_room(0.25, size))
        assert float(attack.fnr(np.asarray(fpr))) == pytest.approx(fnr, abs=1e-3)


@given(
    mu=st.floats(0.05, 6.0),
    lengths=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5).map(tuple),
    threshold=st.floats(-2.0, 3.0),
)
def test_shorter_canaries_reveal_less(mu: float, lengths: tuple[float, ...], threshold: float) -> None:
    attack = gaussian_attack(mu, lengths)
    assert attack.rates_at is not None
    fpr, fnr = attack.rates_at(threshold)
    assert fpr == pytest.approx(np.mean(special.ndtr(-threshold * mu * np.asarray(lengths))))
    assert fnr >= float(GAUSSIAN.fnr(mu, np.asarray(fpr))) - 1e-12
    if 1e-6 < fpr < 1 - 1e-6:
        assert float(attack.fnr(np.asarray(fpr))) == pytest.approx(fnr, abs=5e-3)


@given(mu=st.floats(0.1, 5.0), rate=st.floats(0.05, 1.0), fpr=st.floats(0.001, 0.999))
def test_a_sampled_step_reveals_as_much_as_its_curve_in_one_direction(
    mu: float, rate: float, fpr: float
) -> None:
    attack = sampled_attack(mu, rate)
    assert float(attack.fnr(np.asarray(fpr))) == pytest.approx(
        (1 - rate) * (1 - fpr) + rate * float(GAUSSIAN.fnr(mu, np.asarray(fpr)))
    )
    back = attack.exchanged().fnr(attack.fnr(np.asarray([fpr])))
    assert float(back[0]) == pytest.approx(fpr, abs=2e-3)


@given(
    margins=st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=30).map(np.asarray),
    spread=st.floats(1e-3, 0.2),
    probability=st.floats(0.05, 0.95),
)
def test_the_needed_shift_reaches_the_probability(
    margins: np.ndarray, spread: float, probability: float
) -> None:
    shift = needed_shift(margins, spread, probability)
    assert special.ndtr((margins + shift) / spread).mean() == pytest.approx(probability, abs=1e-4)


@pytest.mark.parametrize(("num_steps", "num_canaries"), [(60, 16), (300, 2)])
def test_simulated_bounds_are_those_of_real_bets(num_steps: int, num_canaries: int) -> None:
    """The mean distance of a bound from the mean of its run, in standard deviations of that mean."""
    mu, size = 1.3, num_steps * num_canaries // 2
    planner = _Planner.of(gaussian_claim(1.0), dpaudit.Betting(expected=1.0), 0.95, None)
    design = AuditDesign.sized(
        num_absent=size,
        num_present=size,
        num_steps=num_steps,
        inference=dpaudit.Betting(expected=1.0),
        rule=dpaudit.Fixed(0.5),
        query=planner.query,
        by_coin=True,
    )
    margins, spread = BettingPower(design, 1.0)._margins(mu)
    true, allowed = (1 - 2 * GAUSSIAN.balanced_error(one) for one in (mu, 1.0))
    simulated = (true - allowed - margins) / spread
    rng, real = np.random.default_rng(8), []
    for _ in range(40):
        present = rng.random((num_steps, num_canaries)) < 0.5
        scores = present + rng.standard_normal(present.shape) / mu
        observations = dpaudit.Observations.from_presence(scores, present, normalized=True)
        errors = StepScores.of(observations).errors(0.5)
        bets = design.inference.start(
            num_canaries, BoundQuery(GAUSSIAN, DELTA, 0.045), by_coin=True, with_tails=False
        )
        bets.extend(1 - 2 * errors.balanced())
        bound = 1 - 2 * GAUSSIAN.balanced_error(bets.parameter())
        real.append((1 - 2 * errors.balanced().mean() - bound) / spread)
    error = float(np.hypot(np.std(real) / np.sqrt(40), simulated.std() / np.sqrt(simulated.size)))
    assert simulated.mean() == pytest.approx(np.mean(real), abs=0.15 + room(error))


def test_several_rules_detect_more_than_each_and_less_than_independent_ones() -> None:
    audit = independent(gaussian_claim(2.0), 150, lambda mu: mu, normalized=True)
    design = audit(2.0, np.random.default_rng(0)).design
    main, tails = design._power(2.0, 2.5), design.others[0].power(2.0, 2.5)
    assert max(main, tails) < design.power(2.0, 2.5) < 1 - (1 - main) * (1 - tails)


def test_a_sentence_names_the_length_of_short_canaries() -> None:
    short = recorded(1.0, 50, 16, (0.1,))(1.0, np.random.default_rng(0)).power
    assert str(short).endswith(
        "with 80 % probability by an attack of this design (canaries reach 0.1 of the clipping norm)"
    )
    assert short.to_dict()["canary_length"] == pytest.approx(0.1)
    assert dpaudit.Power.from_dict(short.to_dict()) == short
    full = recorded(1.0, 50, 16, (1.0,))(1.0, np.random.default_rng(0)).power
    assert str(full).endswith("by an attack of this design")
    assert "canary_length" not in full.to_dict()


def test_lengths_survive_a_restart() -> None:
    recorder, again = (Recorder(claim=gaussian_claim(1.0), num_steps=20) for _ in range(2))
    rng = np.random.default_rng(0)
    for _ in range(20):
        recorder.record(rng.standard_normal(8), rng.random(8) < 0.5, lengths=np.full(8, 0.25))
    again.load_state_dict(recorder.state_dict())
    assert again.audit().power.canary_length == pytest.approx(0.25)


def test_the_curve_of_a_whole_run_is_attained_in_one_direction_only() -> None:
    curve = SubsampledGaussian(0.05, 20)
    attack = curve.attack(1.5, DELTA)
    rates = np.asarray([0.001, 0.01, 0.1, 0.3, 0.6])
    assert (attack.fnr(rates) > curve.fnr(1.5, rates) - 2e-3).all()
    assert float((attack.fnr(rates) - curve.fnr(1.5, rates)).max()) > 0.01
