"""Black-box audits with ensembles: what is broken is seen, and what is correct is not flagged."""

import pytest

import dpaudit
from dpaudit.training.broken import Noiseless
from dpaudit.training.data import digits
from dpaudit.training.ensemble import clip_bkd, pretrained_weights, with_weights
from dpaudit.training.models import mlp

RATE, STEPS, MODELS = 0.1, 50, 200


@pytest.fixture(scope="module")
def worst_case():
    """Weights from held-out examples, and a canary that they find least likely."""
    held_out, rest = digits().split(400)
    data = rest.split(200)[0]
    weights = pretrained_weights(lambda: mlp(64, 16, 10), held_out, num_steps=500)
    canary = clip_bkd(data, with_weights(lambda: mlp(64, 16, 10), weights))
    return {"data": data, "canary": canary, "initial_weights": weights}


@pytest.fixture
def audited(make, worst_case):
    """The verdict on a claim of epsilon = 2, which is tested without knowing that it is DP-SGD."""

    def run(fault=None):
        noise = dpaudit.noise_for_epsilon(2.0, sample_rate=RATE, num_steps=STEPS, delta=1e-5)
        broken = fault and fault(noise_multiplier=noise, max_grad_norm=1.0)
        terms = {"noise_multiplier": noise, "max_grad_norm": 1.0, "sample_rate": RATE, "num_steps": STEPS}
        ensemble = make(**worst_case, **terms, mechanism=broken)
        scores = ensemble.scores(range(MODELS), [number % 2 == 0 for number in range(MODELS)]).numpy()
        observations = dpaudit.Observations(with_canary=scores[::2], without_canary=scores[1::2])
        return dpaudit.audit(
            observations, claim=dpaudit.Claim.approximate_dp(epsilon=2.0, delta=1e-5)
        ).verdict

    return run


def test_correct_training_is_not_flagged(audited) -> None:
    assert audited() is not dpaudit.Verdict.VIOLATION


def test_forgotten_noise_is_flagged(audited) -> None:
    assert audited(Noiseless) is dpaudit.Verdict.VIOLATION
