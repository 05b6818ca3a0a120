"""Presence that fair coins cannot have made is refused, and that of fair ones is not."""

import numpy as np
import pytest

import dpaudit
from dpaudit.stats._observations import require_fair

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=5.0, delta=1e-5)


def noise(present, seed=0):
    scores = np.random.default_rng(seed).standard_normal(present.shape)
    return dpaudit.Observations.from_presence(scores, present, normalized=True)


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.45, 0.55, 0.99])
def test_coins_that_are_not_fair_are_refused(rate):
    """Guessing what is likelier would be right more often than a fair coin lets anybody be."""
    present = np.random.default_rng(0).random((500, 64)) < rate
    with pytest.raises(dpaudit.InputError, match=r"fair coin .* of 32,000 present overall"):
        noise(present)


def test_a_canary_or_a_step_that_is_always_there_is_named():
    rng = np.random.default_rng(1)
    one = rng.random((500, 64)) < 0.5
    one[:, 7] = True
    with pytest.raises(dpaudit.InputError, match="got 500 of 500 present for one canary"):
        noise(one)
    together = np.repeat(rng.random((500, 1)) < 0.5, 64, axis=1)  # one coin for all canaries of a step
    with pytest.raises(dpaudit.InputError, match="64 present in one step"):
        noise(together)


@pytest.mark.parametrize("shape", [(1, 1), (2, 64), (500, 1), (500, 64), (3, 4000)])
def test_fair_coins_are_never_refused(shape):
    for seed in range(200):
        require_fair(np.random.default_rng(seed).random(shape) < 0.5)


def test_steps_of_which_half_is_present_need_no_coin():
    require_fair(np.tile([False, True], (4000, 1)))


def test_what_presence_rests_on_is_said():
    fair = noise(np.random.default_rng(2).random((500, 64)) < 0.5)
    assert any("fair coin" in text for text in dpaudit.audit(fair, claim=CLAIM).bound.assumptions)
    apart = dpaudit.Observations(with_canary=np.arange(50.0), without_canary=np.arange(50.0))
    assert any("the only difference" in text for text in dpaudit.audit(apart, claim=CLAIM).bound.assumptions)
