"""Audit a step of your own: any function from per-example gradients to a privatized gradient."""

import numpy as np

import dpaudit
from dpaudit.observers.step import observe_step

# What the model card says. Write the numbers down: read from the code, they would repeat its mistakes.
CLAIM = dpaudit.Claim.dpsgd(noise_multiplier=0.8, sample_rate=0.01, num_steps=1000, delta=1e-5)
rng = np.random.default_rng(1)


def clipped_sum(gradients: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return (gradients / np.maximum(1.0, norms)).sum(axis=0)


def correct(gradients: np.ndarray) -> np.ndarray:
    return clipped_sum(gradients) + 0.8 * rng.standard_normal(gradients.shape[1])


def averaged(gradients: np.ndarray) -> np.ndarray:
    """Add the mean of the noise of two workers, which has a smaller variance."""
    workers = 0.8 * rng.standard_normal((2, gradients.shape[1]))
    return clipped_sum(gradients) + workers.mean(axis=0)


for step in (correct, averaged):
    recorder = observe_step(step, np.zeros((16, 300)), claim=CLAIM, max_grad_norm=1.0, seed=1)
    print(recorder.audit())
