"""Steps that are functions of per-example gradients, and the calibration of their noise.

Some are run many times with canaries and noise; others are replayed: run twice with the same noise, on data
that differ in one example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit._types import FloatArray
from dpaudit.accounting import Claim, epsilon_below, noise_for_epsilon
from dpaudit.canaries import Constant, GradientCanary
from dpaudit.diagnostics import Diagnostics
from dpaudit.observers._residuals import clipped_sum, residual
from dpaudit.observers.step import observe_step, replay
from dpaudit.zoo._entry import DELTA, NOISE, Evidence, Replay, Scores, keep_checkpoint, paper_claim

Step: TypeAlias = Callable[[FloatArray, tuple[int, ...], np.random.Generator], FloatArray]
"""Function of gradients, parameter sizes and an RNG that returns a noisy sum; the clipping norm is 1."""

_CONSTANT = Constant()
_RATE, _STEPS = 0.01, 1000  # the run for which noise is calibrated


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """Step with canaries that affect all parameters, under the paper's claim of epsilon = 1.27 per step."""

    broken: Step
    leaves: tuple[int, ...]
    canary: GradientCanary = _CONSTANT
    num_canaries: int = 16
    num_steps: int = 300

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        rng = np.random.default_rng(seed)
        step = self.broken if is_broken else correct_step
        record, seen, numbers = Diagnostics(), dict[int, Diagnostics](), count(1)

        def observed(rows: FloatArray) -> FloatArray:
            released = step(rows, self.leaves, rng)
            record.observe_noise(residual(released, rows, max_grad_norm=1.0, std=NOISE), self.leaves)
            keep_checkpoint(seen, record, next(numbers), self.num_steps)
            return released

        recorder = observe_step(
            observed,
            np.zeros((0, sum(self.leaves))),
            claim=paper_claim(),
            max_grad_norm=1.0,
            num_steps=self.num_steps,
            canary=self.canary,
            num_canaries=self.num_canaries,
            seed=seed,
        )
        return Evidence(
            claim=paper_claim(), num_steps=self.num_steps, scores=Scores.of(recorder), diagnostics=seen
        )


def correct_step(rows: FloatArray, leaves: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Clip each gradient, sum them and add noise."""
    noise: FloatArray = NOISE * rng.standard_normal(sum(leaves))
    return clipped_sum(rows, 1.0) + noise


def _by_leaf(rows: FloatArray, leaves: tuple[int, ...]) -> FloatArray:
    """Return the sum of gradients with each leaf clipped to the full norm."""
    parts = np.split(rows, np.cumsum(leaves)[:-1], axis=1)
    return np.concatenate([clipped_sum(part, 1.0) for part in parts])


def clipped_by_layer(rows: FloatArray, leaves: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Clip every layer to the full norm, with noise for a single layer."""
    noise: FloatArray = NOISE * rng.standard_normal(sum(leaves))
    return _by_leaf(rows, leaves) + noise


def clipped_by_parameter_and_noised_twice(
    rows: FloatArray, leaves: tuple[int, ...], rng: np.random.Generator
) -> FloatArray:
    """Clip every parameter to the full norm, and add noise twice, which is still not enough."""
    noise: FloatArray = NOISE * rng.standard_normal((2, sum(leaves))).sum(axis=0)
    return _by_leaf(rows, leaves) + noise


def replayed(
    release: Callable[[Any], Any],
    batch: Any,
    neighbours: Iterable[Any],
    *,
    reseed: Callable[[], object] = lambda: None,
    max_grad_norm: float = 1.0,
    batch_size: float | None = None,
) -> Evidence:
    """Replay a release on neighboring batches, and return whether the difference exceeds the claim."""
    result = replay(
        release,
        batch,
        neighbours,
        reseed=reseed,
        max_grad_norm=max_grad_norm,
        batch_size=batch_size,
    )
    relation = "more than" if result.is_violation else "within"
    sentence = (
        f"One example moves the release by {result.largest:.4g} clipping norms, {relation} the 1 allowed."
    )
    return Evidence(claim=paper_claim(), num_steps=1, replay=Replay(sentence, result.is_violation))


def _noise(seed: int, size: int) -> FloatArray:
    """Return the same noise for the same seed."""
    drawn: FloatArray = NOISE * np.random.default_rng(seed).standard_normal(size)
    return drawn


def microbatch(is_broken: bool, seed: int) -> Evidence:
    """Clip the means of microbatches of two examples, one of which outweighs the other."""
    size = 2 if is_broken else 1
    rng = np.random.default_rng([seed, 1])
    rows = rng.standard_normal((8, 16))
    rows[1] = -100 * rows[0]
    without = rows.copy()
    without[1] = 0  # no gradient: the example is absent

    def release(batch: FloatArray) -> FloatArray:
        means = batch.reshape(-1, size, batch.shape[1]).mean(axis=1)
        return clipped_sum(means, 1.0) + _noise(seed, batch.shape[1])

    return replayed(release, rows, [without])


def floor_batch(is_broken: bool, seed: int) -> Evidence:
    """Divide the noisy sum by ``int(rate * size)``, which grows by one with one more example."""
    rate, size, expected = 0.1, 99, 10
    direction = np.zeros(16)
    direction[seed % 16] = 1.0
    batch = np.tile(direction, (expected, 1))

    def release(sampled: tuple[FloatArray, int]) -> FloatArray:
        rows, num_examples = sampled
        divisor = int(rate * num_examples) if is_broken else expected
        return (clipped_sum(rows, 1.0) + _noise(seed, rows.shape[1])) / divisor

    more = np.concatenate([batch, -batch[:1]])
    neighbours = [(batch, size + 1), (more, size + 1)]  # the additional example is drawn, or it is not
    return replayed(release, (batch, size), neighbours, batch_size=expected)


def batch_norm(is_broken: bool, seed: int) -> Evidence:
    """Normalize activations over the batch, or in the twin over the features of each example."""
    torch.manual_seed(seed)
    norm: nn.Module = nn.BatchNorm1d(16) if is_broken else nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.Tanh(), nn.Linear(16, 2))
    inputs = torch.randn(16, 8)
    inputs[-1] *= 100
    targets = torch.randint(2, (16,))
    small = 0.01  # so that every gradient is clipped

    def release(count: int) -> FloatArray:
        rows = _per_example(model, inputs[:count], targets[:count]).double().numpy()
        return clipped_sum(rows, small) + small * _noise(seed, rows.shape[1])

    return replayed(release, 16, [15], max_grad_norm=small)


def _per_example(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of each example's loss, after one forward pass of the batch."""
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    parameters = list(model.parameters())
    grads = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([part.reshape(-1) for part in grad]) for grad in grads])


def _end_with_less_noise(epsilon: float) -> float:
    """Bisect an interval and return the end that has too little noise."""
    low, high = 0.3, 10.0
    while high - low > 0.02:
        middle = (low + high) / 2
        claim = Claim.dpsgd(noise_multiplier=middle, sample_rate=_RATE, num_steps=_STEPS, delta=DELTA)
        low, high = (middle, high) if claim.epsilon > epsilon else (low, middle)
    return low


def calibration(is_broken: bool, seed: int) -> Evidence:
    """Calibrate noise to an epsilon between 1 and 4, and compute the epsilon that it achieves."""
    target = round(float(np.random.default_rng(seed).uniform(1, 4)), 3)
    if is_broken:
        noise = _end_with_less_noise(target)
    else:
        noise = noise_for_epsilon(target, sample_rate=_RATE, num_steps=_STEPS, delta=DELTA)
    found = epsilon_below(noise, _RATE, _STEPS, DELTA)
    replay = Replay(
        f"For a target epsilon of {target:g}, the search found a noise multiplier of {noise:.4g}, "
        f"whose epsilon is {found:.4g}.",
        found > target,
    )
    return Evidence(claim=Claim.approximate_dp(epsilon=target, delta=DELTA), num_steps=1, replay=replay)
