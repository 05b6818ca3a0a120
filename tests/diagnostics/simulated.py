"""Trainings in numpy, right and wrong: only their noise and their batches."""

import numpy as np

from dpaudit.diagnostics import ClaimedStep, Diagnosis, Diagnostics, NoiseCheck, ObservedStep

LEAVES = {"first": 60, "second": 60, "third": 30}
NUM_EXAMPLES, SAMPLE_RATE = 400, 0.05
SIZE = sum(LEAVES.values())


def correct_noise(rng, _step):
    return rng.standard_normal(SIZE).astype(np.float32)


def poisson(rng, _step):
    return np.flatnonzero(rng.random(NUM_EXAMPLES) < SAMPLE_RATE)


def diagnostics(noise=correct_noise, batch=poisson, *, num_steps=500, seed=0):
    """A collector that was fed with a whole training."""
    rng = np.random.default_rng([seed, num_steps])
    record = Diagnostics(sample_rate=SAMPLE_RATE)
    for step in range(num_steps):
        record.observe_noise(noise(rng, step), LEAVES)
        record.observe_batch(batch(rng, step), NUM_EXAMPLES)
    return record


def names(diagnosis):
    return [finding.name for finding in diagnosis.findings]


class Releases:
    """Collects releases and the sums before their noise."""

    def __init__(self):
        self.check = NoiseCheck()

    def observe(self, released, total, leaves, *, norm=1.0, **fields):
        step = ObservedStep.of_release(released, total, leaves=leaves, clipping_norm=norm, **fields)
        self.check.observe(step)

    def diagnose(self, *, noise_multiplier=1.0, confidence=0.95):
        claimed = ClaimedStep(noise_multiplier=noise_multiplier, confidence=confidence)
        return Diagnosis.of((), confidence=confidence).joined(self.check.results(claimed))
