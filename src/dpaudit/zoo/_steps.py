"""Steps that are functions of per-example gradients, and the calibration of their noise.

Some are run many times with canaries, noise and a fault of :mod:`dpaudit.zoo.faults`. Others are replayed:
run twice with the same noise, on data that differ in one example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit._types import FloatArray
from dpaudit.accounting import Claim, epsilon_below, noise_for_epsilon
from dpaudit.canaries import Constant
from dpaudit.diagnostics import Diagnostics
from dpaudit.observers.step import observe_step, replay
from dpaudit.recording import SupportsDiagnose
from dpaudit.zoo._evidence import (
    DELTA,
    NOISE,
    Evidence,
    Replay,
    Scenario,
    Scores,
    keep_checkpoint,
    paper_claim,
)
from dpaudit.zoo.faults import Injection, clipped_sum, fault_named, split_leaves

LEAVES = {
    "embedding.weight": 160,
    "hidden.weight": 160,
    "hidden.bias": 24,
    "output.weight": 160,
    "output.bias": 8,
    "head.weight": 88,
}
_SIZE = sum(LEAVES.values())
_RATE, _NUM_STEPS = 0.01, 1000  # the run for which noise is calibrated


def _step(
    name: str | None, size: Any, leaves: Iterable[int], num_steps: int, rng: np.random.Generator
) -> Callable[[FloatArray], FloatArray]:
    """Return a step with this fault, or none, under the paper's claim; its clipping norm is 1."""
    shapes = [(length,) for length in leaves]
    fault = fault_named(name or "correct")
    injection = Injection(fault, size, std=NOISE, num_steps=num_steps, rng=rng, leaves=shapes)
    # half of the 64 canaries are expected in a batch
    return lambda rows: injection.step(split_leaves(rows, shapes), max_grad_norm=1.0, expected_batch=32)


@dataclass(frozen=True, kw_only=True)
class ObservedFault:
    """Step under the paper's claim of epsilon = 1.27, audited as by a user who sets nothing else.

    Gradients and releases are in single precision.
    """

    fault: str | None
    size: Any = None
    num_steps: int = 300

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        name = self.fault if is_broken else None
        step = _step(name, self.size, LEAVES.values(), self.num_steps, np.random.default_rng([seed, 1]))
        recorder = observe_step(
            lambda rows: step(rows.astype(np.float64)).astype(np.float32),
            np.zeros((0, _SIZE), dtype=np.float32),
            claim=paper_claim(),
            max_grad_norm=1.0,
            num_steps=self.num_steps,
            leaves=LEAVES,
            seed=seed,
        )
        return Evidence(claim=paper_claim(), num_steps=self.num_steps, recorder=recorder)


@dataclass(frozen=True, kw_only=True)
class ConstantCanaries:
    """Step with 16 canaries that affect all parameters, under the paper's claim of epsilon = 1.27."""

    fault: str | None
    leaves: tuple[int, ...]
    num_steps: int = 300

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        name = self.fault if is_broken else None
        step = _step(name, None, self.leaves, self.num_steps, np.random.default_rng(seed))
        record, copies, numbers = Diagnostics(), dict[int, SupportsDiagnose](), count(1)

        def observed(rows: FloatArray) -> FloatArray:
            released = step(rows)
            record.observe_noise((released - clipped_sum(rows, 1.0)) / NOISE, self.leaves)
            keep_checkpoint(copies, record, next(numbers), self.num_steps)
            return released

        recorder = observe_step(
            observed,
            np.zeros((0, sum(self.leaves))),
            claim=paper_claim(),
            max_grad_norm=1.0,
            num_steps=self.num_steps,
            canary=Constant(),
            num_canaries=16,
            seed=seed,
        )
        return Evidence(
            claim=paper_claim(), num_steps=self.num_steps, scores=Scores.of(recorder), diagnostics=copies
        )


def replayed(release: Callable[[Any], Any], batch: Any, neighbors: Iterable[Any], **options: Any) -> Evidence:
    """Replay a release on neighboring batches, and return whether the difference exceeds the claim."""
    usual: dict[str, Any] = {"reseed": lambda: None, "max_grad_norm": 1.0}
    result = replay(release, batch, neighbors, **usual | options)
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
    neighbors = [(batch, size + 1), (more, size + 1)]  # the additional example is drawn, or it is not
    return replayed(release, (batch, size), neighbors, batch_size=expected)


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
    return torch.stack([torch.cat([leaf.reshape(-1) for leaf in grad]) for grad in grads])


def _end_with_less_noise(epsilon: float) -> float:
    """Bisect an interval and return the end that has too little noise."""
    low, high = 0.3, 10.0
    while high - low > 0.02:
        middle = (low + high) / 2
        claim = Claim.dpsgd(noise_multiplier=middle, sample_rate=_RATE, num_steps=_NUM_STEPS, delta=DELTA)
        low, high = (middle, high) if claim.epsilon > epsilon else (low, middle)
    return low


def calibration(is_broken: bool, seed: int) -> Evidence:
    """Calibrate noise to an epsilon between 1 and 4, and compute the epsilon that it achieves."""
    target = round(float(np.random.default_rng(seed).uniform(1, 4)), 3)
    if is_broken:
        noise = _end_with_less_noise(target)
    else:
        noise = noise_for_epsilon(target, sample_rate=_RATE, num_steps=_NUM_STEPS, delta=DELTA)
    epsilon = epsilon_below(noise, _RATE, _NUM_STEPS, DELTA)
    replay = Replay(
        f"For a target epsilon of {target:g}, the search found a noise multiplier of {noise:.4g}, "
        f"whose epsilon is {epsilon:.4g}.",
        epsilon > target,
    )
    return Evidence(claim=Claim.approximate_dp(epsilon=target, delta=DELTA), num_steps=1, replay=replay)


SCENARIOS: Mapping[str, Scenario] = {
    "per-layer-clip": ConstantCanaries(fault="by-leaf", leaves=(64,) * 4),
    "double-clip-per-parameter": ConstantCanaries(fault="leaves-noised-twice", leaves=(16,) * 16),
    "microbatch": microbatch,
    "floor-batch": floor_batch,
    "batch-norm": batch_norm,
    "sigma-search": calibration,
}
