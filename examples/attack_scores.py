"""Audit by the scores of any attack: one score per model, trained with or without the canary."""

import numpy as np

import dpaudit

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=5.0, sample_rate=1.0, num_steps=20, delta=1e-5)
NUM_MODELS = 1000  # on each side
DATA = np.random.default_rng(0).normal(size=(50, 4))
CANARY = np.array([[100.0, 0.0, 0.0, 0.0]])


def train(examples: np.ndarray, rng: np.random.Generator, noise_multiplier: float) -> np.ndarray:
    """Estimate the mean of the examples by DP-SGD: gradients are clipped to norm 1."""
    weights = np.zeros(4)
    for _ in range(20):
        gradients = examples - weights
        gradients /= np.maximum(1.0, np.linalg.norm(gradients, axis=1, keepdims=True))
        weights += 0.01 / len(DATA) * (gradients.sum(axis=0) + noise_multiplier * rng.normal(size=4))
    return weights


def audit(noise_multiplier: float) -> dpaudit.Result:
    rng, with_canary = np.random.default_rng(1), np.concatenate([DATA, CANARY])
    inside, outside = (
        [train(examples, rng, noise_multiplier)[0] for _ in range(NUM_MODELS)]  # the attack: one weight
        for examples in (with_canary, DATA)
    )
    observations = dpaudit.Observations(with_canary=inside, without_canary=outside, scores_of="run")
    return dpaudit.audit(observations, claim=CLAIM)


print(audit(noise_multiplier=5.0))
print(audit(noise_multiplier=2.5))  # less than claimed
