"""Bets with a stop-loss and on far scores, against gamblers, linear programs and adversaries."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special, stats
from statistical_limits import most_flagged

import dpaudit
from dpaudit.stats.inference import BoundQuery
from dpaudit.stats.inference._betting import Betting, FarGuess
from dpaudit.stats.inference._stop_loss import AdvantageBets, StopLosses, Wealth, stop_loss

QUERY = BoundQuery(dpaudit.Gaussian(), 1e-5, 0.05)
LEVELS = FarGuess.levels(0.39)


def stops_of(guesses):
    """Return the numbers of right guesses at each stop; -1 for the bet without one."""
    found = StopLosses.of(guesses)
    return [round((stop + 1) * guesses / 2 - 0.5) for stop in found.stops], found.losses


@pytest.mark.parametrize("guesses", [2, 3, 8, 17, 64, 1000])
def test_a_stop_loss_belongs_to_a_weight_of_other_guesses_of_at_most_one(guesses):
    """The payoff is that of the lemma with an F in [0, 1]: a ramp up to the stop, then 1."""
    right = np.arange(guesses + 1)
    for stop, loss in zip(*stops_of(guesses), strict=True):
        weight = [loss]
        for w in range(1, guesses):
            weight.append((w * weight[-1] + guesses * loss) / (guesses - w) if w <= stop else 1.0)
        others = np.asarray(weight)
        assert others.min() >= 0
        assert others.max() == pytest.approx(1, abs=1e-9)
        below, at = np.append(0.0, others), np.append(others, 0.0)
        payoffs = (right * below - (guesses - right) * at) / guesses
        assert payoffs == pytest.approx(np.where(right > stop, 2 * right / guesses - 1, -loss), abs=1e-9)


def test_the_loss_is_the_ratio_of_binomial_sums():
    for guesses in (3, 10, 31):
        for right in range(1, guesses):
            expected = math.comb(guesses - 1, right) / sum(math.comb(guesses, j) for j in range(right + 1))
            assert float(stop_loss(np.asarray(float(right)), guesses)) == pytest.approx(expected)


class Mechanism:
    """A linear program over all mechanisms that answer with one of ``answers`` for each canary.

    Given any coins of the others, the answers with and without a canary are within a limit: every test has
    P(test | one) <= ratio P(test | other) + delta, in both directions.
    """

    def __init__(self, guesses, answers, ratio, delta):
        self.coins = list(itertools.product((0, 1), repeat=guesses))
        self.outputs = list(itertools.product(answers, repeat=guesses))
        size = len(self.coins) * len(self.outputs)
        pairs = [
            (a, b)
            for a, b in itertools.permutations(range(len(self.coins)), 2)
            if sum(x != y for x, y in zip(self.coins[a], self.coins[b], strict=True)) == 1
        ]
        extra = len(pairs) * len(self.outputs)
        rows, limits = [], []
        for p, (a, b) in enumerate(pairs):
            total = np.zeros(size + extra)
            for o in range(len(self.outputs)):
                above = np.zeros(size + extra)
                slack = size + p * len(self.outputs) + o
                above[a * len(self.outputs) + o] = 1
                above[b * len(self.outputs) + o] = -ratio
                above[slack] = -1
                total[slack] = 1
                rows.append(above)
                limits.append(0.0)
            rows.append(total)
            limits.append(delta)
        sums = np.zeros((len(self.coins), size + extra))
        for c in range(len(self.coins)):
            sums[c, c * len(self.outputs) : (c + 1) * len(self.outputs)] = 1
        self._limits = {"A_ub": np.asarray(rows), "b_ub": limits, "A_eq": sums, "b_eq": np.ones(len(sums))}
        self._size, self._extra = size, extra

    def largest(self, payoff):
        """Return the largest mean of payoff(coins, output) under fair coins."""
        values = [payoff(c, o) / len(self.coins) for c in self.coins for o in self.outputs]
        cost = -np.concatenate([values, np.zeros(self._extra)])
        return -optimize.linprog(cost, **self._limits, bounds=(0, 1)).fun


@pytest.mark.parametrize("variation", [0.05, 0.4])
def test_no_mechanism_pays_more_than_its_total_variation(variation):
    guesses = 3
    mechanism = Mechanism(guesses, (0, 1), 1.0, variation)

    def payoff(coins, output, stop, loss):
        right = sum(c == o for c, o in zip(coins, output, strict=True))
        return 2 * right / guesses - 1 if right > stop else -loss

    for stop, loss in zip(*stops_of(guesses), strict=True):
        largest = mechanism.largest(partial(payoff, stop=stop, loss=loss))
        assert largest == pytest.approx(variation, abs=1e-7)


def test_guesses_that_know_other_coins_do_need_the_bet_without_a_stop_loss():
    """Each guess is right by total variation alone, but all are right or wrong together."""
    variation, guesses = 0.4, 64
    rng = np.random.default_rng(0)
    right = np.where(rng.random(20_000) < (1 + variation) / 2, guesses, 0)  # the mean advantage is 0.4
    stops = StopLosses.of(guesses)
    means = stops.payoffs(2 * right / guesses - 1).mean(axis=1)
    assert means[0] == pytest.approx(variation, abs=0.03)
    assert (means[4:] > variation + 0.1).all()  # a stop-loss would pay for nothing


@pytest.mark.parametrize("most_wrong", [1, 2])
def test_no_mechanism_pays_more_at_far_scores_than_its_delta_allows(most_wrong):
    guesses, ratio, delta = 2, 3.0, 0.1
    mechanism = Mechanism(guesses, (-1, 0, 1), ratio, delta)

    def payoff(coins, output):
        pairs = list(zip(coins, output, strict=True))
        right = sum((c, o) in ((1, 1), (0, -1)) for c, o in pairs) * 2 / guesses
        wrong = sum((c, o) in ((0, 1), (1, -1)) for c, o in pairs)
        gained = right if wrong < most_wrong else 0.0
        return gained - (ratio * wrong * 2 / guesses if wrong <= most_wrong else 0.0)

    assert mechanism.largest(payoff) <= 2 * delta + 1e-7


advantages = st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=80)


def placed(values, *, horizon=None, error=0.05, stop=True):
    stops = StopLosses.of(8) if stop else StopLosses.none()
    bets = AdvantageBets(8, stops=stops, error=error, horizon=horizon, expected=0.2)
    bets.extend(np.asarray(values))
    return bets


def slow_wealth(bets, mean):
    """One step after the other, as a gambler would; return the largest wealth."""
    wealth = best = 1.0
    book = bets._wealth
    for payoff, loss, largest_stake in book._rows[:, 0, : book.num_steps].T:
        stake = min(largest_stake, 0.99 / (mean + loss))
        assert payoff >= -loss
        wealth *= 1 + stake * (payoff - mean)
        assert wealth > 0
        best = max(best, wealth)
    return best


@given(advantages, st.floats(0.01, 0.3), st.booleans())
def test_the_bound_is_where_a_gamblers_wealth_reaches_one_over_the_error(values, error, stop):
    bets = placed(values, error=error, stop=stop)
    refuted = bets.refuted()
    assert 0 <= refuted <= 1
    if 1e-6 < refuted < 1 - 1e-6:
        assert slow_wealth(bets, refuted - 1e-7) >= 1 / error
    if refuted < 1 - 1e-6:
        assert slow_wealth(bets, refuted + 1e-6) < 1 / error


@given(advantages, st.one_of(st.none(), st.integers(2, 200)))
def test_the_future_does_not_change_the_bets_of_the_past(values, horizon):
    cut = len(values) // 2
    bets, others = placed(values, horizon=horizon), placed([*values[:cut], -1.0], horizon=horizon)
    first, second = (placed_bets._wealth._rows[1:, :, : cut + 1] for placed_bets in (bets, others))
    assert np.array_equal(first, second)  # losses and stakes
    # a prefix refutes what a shorter run would have refuted, and a longer run at least as much
    shorter = placed(values[:-1], horizon=horizon)
    assert bets.refuted(len(values) - 1) == pytest.approx(shorter.refuted(), rel=1e-6)
    assert bets.refuted() >= shorter.refuted() * (1 - 1e-6)


@given(advantages, st.integers(1, 79))
def test_steps_may_arrive_in_any_number_at_a_time(values, cut):
    whole, parts = placed(values, horizon=100), placed(values[:cut], horizon=100)
    parts.extend(np.asarray(values[cut:]))
    assert parts.refuted() == pytest.approx(whole.refuted(), rel=1e-9)


@given(advantages)
def test_wealth_falls_with_the_tested_mean_so_that_refuted_means_are_an_interval(values):
    bets = placed(values)
    wealth = np.asarray([slow_wealth(bets, mean) for mean in np.linspace(0, 0.99, 34)])
    assert (np.diff(wealth) <= 1e-9 * wealth[:-1]).all()


def test_a_wealth_without_steps_refutes_nothing():
    assert Wealth(0.05).largest_refuted() == 0
    assert Wealth(0.05).evidence(0.1) < 0


def independent(rng, steps, coins, mu):
    return rng.binomial(coins, special.ndtr(mu / 2), steps)


def one_shared_draw(rng, steps, coins, mu):
    """All canaries of a step have the same noise: their guesses are right or wrong together."""
    heads = rng.binomial(coins, 0.5, steps)
    noise = rng.standard_normal(steps)
    present = heads * (noise > -mu / 2)  # score = mu presence + noise, threshold mu / 2
    absent = (coins - heads) * (noise < mu / 2)
    return present + absent


def total_reveal(rng, steps, coins, mu):
    """With probability of the total variation, a step reveals every coin; otherwise it reveals nothing."""
    reveals = rng.random(steps) < 2 * special.ndtr(mu / 2) - 1
    return np.where(reveals, coins, rng.binomial(coins, 0.5, steps))


def adaptive(rng, steps, coins, mu):
    """Reveal little until luck has run out, then in one step as much as the curve allows."""
    right = np.empty(steps, dtype=np.int64)
    behind = 0.0
    for step in range(steps):
        full = behind < 0
        source = total_reveal if full else one_shared_draw
        right[step] = source(rng, 1, coins, mu)[0]
        behind += 2 * right[step] / coins - 1 - (2 * special.ndtr(mu / 2) - 1)
    return right


@pytest.mark.few(4)
@pytest.mark.parametrize("horizon", [60, None], ids=["planned", "unplanned"])
@pytest.mark.parametrize("mechanism", [independent, one_shared_draw, total_reveal, adaptive])
@pytest.mark.parametrize(("coins", "mu"), [(16, 1.0), pytest.param(512, 0.39, marks=pytest.mark.long)])
def test_bounds_hold_for_every_dependence_within_a_step(mechanism, coins, mu, horizon, is_long):
    rng = np.random.default_rng(7)
    runs, above = 400 if is_long else 60, 0
    for _ in range(runs):
        bets = Betting(horizon=horizon, expected=mu).start(coins, QUERY, by_coin=True, with_tails=False)
        bets.extend(2 * mechanism(rng, 60, coins, mu) / coins - 1)
        above += bets.parameter() > mu
    assert above <= most_flagged(runs)


def scores_of(noise, steps, canaries, mu, rng):
    present = rng.random((steps, canaries)) < 0.5
    scores = present + noise(rng, (steps, canaries)) / mu
    return dpaudit.Observations.from_presence(scores, present, normalized=True)


def normal(rng, shape):
    return rng.standard_normal(shape)


def truncated(rng, shape):
    """Normal noise cut off at two standard deviations, with its variance restored."""
    return stats.truncnorm.rvs(-2, 2, size=shape, random_state=rng) / stats.truncnorm.std(-2, 2)


def verdicts(noise, seeds, *, mu=0.39, canaries=64, **options):
    claim = dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=1e-5)
    for seed in seeds:
        observations = scores_of(noise, 300, canaries, mu, np.random.default_rng(seed))
        yield dpaudit.audit(observations, claim=claim, **options).verdict.name


@pytest.mark.parametrize("mu", [0.39, 1.0])
def test_noise_without_tails_is_refuted_by_the_bound_alone(mu):
    assert set(verdicts(truncated, range(10), mu=mu)) == {"VIOLATION"}
    assert "VIOLATION" not in set(verdicts(truncated, range(3), mu=mu, inference=Betting(tails=0.0)))


@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_rarely_forgets_to_clip_is_refuted(seed):
    """Canaries are 100 times too long in one step of fifty, which the balanced error hardly shows."""
    rng, mu = np.random.default_rng(seed), 0.22
    present = rng.random((300, 64)) < 0.5
    lengths = np.where(rng.random((300, 1)) < 0.02, 100.0, 1.0)
    scores = present * lengths + rng.standard_normal(present.shape) / mu
    observations = dpaudit.Observations.from_presence(scores, present, normalized=True)
    claim = dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=1e-5)
    assert dpaudit.audit(observations, claim=claim).verdict.name == "VIOLATION"


def test_correct_noise_is_not_refuted_by_its_tails(is_long):
    runs = 400 if is_long else 40
    found = list(verdicts(normal, range(runs), inference=Betting(horizon=300)))
    assert found.count("VIOLATION") <= most_flagged(runs)


def test_far_guesses_allow_what_the_best_test_of_the_gaussian_gains():
    far = FarGuess.levels(1.0)[0]
    grid = np.linspace(-8, 8, 40_001)
    gained = special.ndtr(1.0 - grid) - far.ratio * special.ndtr(-grid)
    assert far.allowed(1.0) == pytest.approx(2 * gained.max(), rel=1e-6)
    assert far.distance == pytest.approx(grid[gained.argmax()], abs=1e-3)


def test_the_label_names_only_what_was_chosen():
    assert repr(Betting()) == "Betting()"
    assert repr(Betting(500, expected=0.5, stop_loss=False)) == (
        "Betting(horizon=500, expected=0.5, stop_loss=False)"
    )
    for betting in (Betting(), Betting(500, expected=0.5, tails=0.0, stop_loss=False)):
        assert dpaudit.Inference.from_dict(betting.to_dict()) == betting


def test_a_stop_loss_that_is_no_yes_or_no_is_refused():
    with pytest.raises(dpaudit.InputError, match="stop_loss must be True or False, got 'no'"):
        Betting(stop_loss="no")


@pytest.mark.parametrize("tails", [-0.1, 1.0, math.nan, True, "a", None])
def test_a_share_of_the_tails_outside_its_range_is_refused(tails):
    with pytest.raises(dpaudit.InputError, match="tails must be"):
        Betting(tails=tails)


@pytest.mark.parametrize("seed", range(3))
def test_tails_are_seen_without_knowing_the_scale_of_the_scores(seed):
    rng, mu = np.random.default_rng(seed), 0.39
    present = rng.random((300, 64)) < 0.5
    claim = dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=1e-5)
    for noise, verdict in ((truncated, "VIOLATION"), (normal, "NO_VIOLATION")):
        scores = 7 * (present + noise(rng, present.shape) / mu) + 3
        result = dpaudit.audit(dpaudit.Observations.from_presence(scores, present), claim=claim)
        assert result.bound.threshold_rule == dpaudit.Predictable()
        assert result.verdict.name == verdict


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 50.0])
def test_bets_start_for_claims_with_much_and_with_little_noise(mu):
    observations = scores_of(normal, 20, 8, mu, np.random.default_rng(0))
    result = dpaudit.audit(observations, claim=dpaudit.Claim.gaussian(noise_multiplier=1 / mu, delta=1e-5))
    assert result.bound.parameter >= 0
