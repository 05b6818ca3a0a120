"""The paper's flagship setting: WRN-16 on CIFAR-10, epsilon 8, one score a step and side."""

import numpy as np
import pytest
from scipy import special
from score_samples import counts
from statistical_limits import most_flagged, room

import dpaudit
from dpaudit.stats.inference import BoundQuery

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
        yield counts(int(fp), STEPS, int(fn), STEPS)


@pytest.mark.parametrize(
    ("inference", "mean"), [(dpaudit.ClopperPearson(), 5.5), (dpaudit.JointExact(), 6.5)], ids=repr
)
def test_one_score_a_step_recovers_most_of_epsilon_8_and_rarely_exceeds_it(inference, mean):
    query = BoundQuery(dpaudit.Gaussian(), DELTA, 0.05)
    found = [
        composed(inference.parameter(errors, query)) for errors in binomial_counts(1 / NOISE[8], 200, seed=0)
    ]
    assert np.mean(found) == pytest.approx(mean, abs=0.1 + mean_room(found))  # stated to a tenth
    assert np.sum(np.asarray(found) > 8) <= most_flagged(200, broken=0.15)


def bets(epsilon, canaries, repetitions, steps=STEPS):
    """Bounds of the default audit of one run, without far scores, from its numbers of right guesses."""
    rng = np.random.default_rng(epsilon)
    mu = 1 / NOISE[epsilon]
    query = BoundQuery(dpaudit.Gaussian(), DELTA, 0.05)
    coins, betting = 2 * canaries, dpaudit.Betting(horizon=steps, expected=mu)
    none = (np.zeros(steps), np.zeros(steps))
    for right in rng.binomial(coins, special.ndtr(mu / 2), (repetitions, steps)):
        placed = betting.start(coins, query, by_coin=True, with_tails=True)
        placed.extend(2 * right / coins - 1, [none] * len(betting.far_guesses(query)))
        yield placed.parameter()


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("epsilon", "canaries", "share"),
    [
        (1, 512, 0.935),
        pytest.param(4, 512, 0.976, marks=pytest.mark.long),
        (8, 512, 0.985),
        pytest.param(16, 512, 0.99, marks=pytest.mark.long),
        (1, 4096, 0.98),
        pytest.param(4, 4096, 0.99, marks=pytest.mark.long),
        (8, 4096, 0.995),
        pytest.param(16, 4096, 0.995, marks=pytest.mark.long),
    ],
)
def test_one_run_recovers_nearly_all_of_epsilon(epsilon, canaries, share):
    mu = 1 / NOISE[epsilon]
    parameters = list(bets(epsilon, canaries, 40))
    claim = dpaudit.Claim.dpsgd(
        noise_multiplier=NOISE[epsilon], sample_rate=RATE, num_steps=STEPS, delta=DELTA
    )
    shares = [composed(p) / claim.epsilon for p in parameters]
    assert np.mean(shares) >= share - mean_room(shares)
    assert np.sum(np.asarray(parameters) > mu) <= most_flagged(40)


def test_fifty_steps_with_64_canaries_a_side_recover_three_quarters_of_mu():
    mu = 1 / NOISE[8]
    shares = np.asarray(list(bets(8, 64, 60, steps=50))) / mu
    assert np.mean(shares) >= 0.75
    assert np.sum(shares > 1) <= most_flagged(60)
