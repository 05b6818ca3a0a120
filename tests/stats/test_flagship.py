"""The paper's flagship setting: WRN-16 on CIFAR-10, epsilon 8, one score a step and side."""

import numpy as np
import pytest
from scipy import special
from statistical_limits import most_flagged, room

import dpaudit
from dpaudit.stats._counts import StepErrors
from dpaudit.stats.inference import BoundQuery, _betting

RATE, STEPS, DELTA = 4096 / 50000, 2500, 1e-5
NOISE = {1: 15.372, 4: 4.513, 8: 2.577, 16: 1.576}


def composed(parameter):
    return dpaudit.training_epsilon(parameter, RATE, STEPS, DELTA)


def mean_room(values):
    """Return how far the mean of independent values may be from its expectation."""
    return room(np.std(values, ddof=1) / np.sqrt(len(values)))


def binomial_counts(mu, repetitions, seed):
    """Errors at the midpoint, as 2,500 scores a side from N(0, s) and N(1, s) have them."""
    rng = np.random.default_rng(seed)
    rate = special.ndtr(-mu / 2)
    for fp, fn in rng.binomial(STEPS, rate, (repetitions, 2)):
        yield dpaudit.ErrorCounts(
            false_positives=int(fp), num_absent=STEPS, false_negatives=int(fn), num_present=STEPS
        )


@pytest.mark.parametrize(
    ("inference", "mean"), [(dpaudit.ClopperPearson(), 5.5), (dpaudit.JointExact(), 6.5)], ids=repr
)
def test_one_score_a_step_recovers_most_of_epsilon_8_and_rarely_exceeds_it(inference, mean):
    query = BoundQuery(dpaudit.Gaussian(), DELTA, 0.05)
    found = [
        composed(inference.parameter(counts, query)) for counts in binomial_counts(1 / NOISE[8], 200, seed=0)
    ]
    assert np.mean(found) == pytest.approx(mean, abs=0.1 + mean_room(found))  # stated to a tenth
    assert np.sum(np.asarray(found) > 8) <= most_flagged(200, broken=0.15)


def test_scores_go_through_the_front_door_to_the_same_numbers():
    rng = np.random.default_rng(0)
    noise, found = NOISE[8], []
    claim = dpaudit.Claim.dpsgd(noise_multiplier=noise, sample_rate=RATE, num_steps=STEPS, delta=DELTA)
    for _ in range(100):
        observations = dpaudit.Observations(
            with_canary=rng.normal(1, noise, STEPS), without_canary=rng.normal(0, noise, STEPS)
        )
        result = dpaudit.audit(
            observations, claim=claim, inference=dpaudit.ClopperPearson(), threshold=dpaudit.Fixed(0.5)
        )
        found.append(result.bound.epsilon)
    assert np.mean(found) == pytest.approx(5.5, abs=0.1 + mean_room(found))


def bets(epsilon, canaries, repetitions):
    rng = np.random.default_rng(epsilon)
    mu = 1 / NOISE[epsilon]
    query = BoundQuery(dpaudit.Gaussian(), DELTA, 0.05)
    sizes = np.full(STEPS, canaries)
    for _ in range(repetitions):
        fp, fn = rng.binomial(canaries, special.ndtr(-mu / 2), (2, STEPS))
        errors = StepErrors(fp, sizes, fn, sizes, by_coin=False)
        yield dpaudit.Betting().from_errors(errors, query)


@pytest.mark.parametrize(("epsilon", "share"), [(1, 0.93), (4, 0.97), (8, 0.97), (16, 0.97)])
def test_512_canaries_a_step_recover_nearly_all_of_epsilon(epsilon, share):
    mu = 1 / NOISE[epsilon]
    parameters = list(bets(epsilon, 512, 60))
    claim = dpaudit.Claim.dpsgd(
        noise_multiplier=NOISE[epsilon], sample_rate=RATE, num_steps=STEPS, delta=DELTA
    )
    shares = [composed(p) / claim.epsilon for p in parameters]
    assert np.mean(shares) >= share - mean_room(shares)
    assert np.sum(np.asarray(parameters) > mu) <= most_flagged(60)


def constant_stakes(shares, error, guesses, horizon):
    """One stake for the whole run, but for what is learnt of the variance."""
    steps = np.arange(shares.size)
    mean = (0.25 + np.cumsum(shares)) / (steps + 2)
    squares = np.concatenate([[0.0], np.cumsum((shares - mean) ** 2)[:-1]])
    variance = (0.25 / guesses + squares) / (steps + 1)
    return np.sqrt(2 * np.log(1 / error) / (variance * horizon))


@pytest.mark.parametrize("epsilon", [1, 4, 8, 16])
@pytest.mark.parametrize("canaries", [1, 8, 64])
def test_a_stake_that_follows_the_wealth_beats_a_constant_one(epsilon, canaries, monkeypatch):
    following = list(bets(epsilon, canaries, 40))
    monkeypatch.setattr(_betting, "stakes", constant_stakes)
    gained = np.asarray(following) - list(bets(epsilon, canaries, 40))
    assert np.mean(gained) > mean_room(gained)
