"""Correct private linear regressions whose gradients depend on earlier noise, and all tests of their noise.

Weights are sums of earlier releases, so the noise of a step changes the gradients of the steps after it. The
more often the learning rate exceeds the inverse curvature, and the less is clipped, the more of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

import dpaudit
from dpaudit.diagnostics import Diagnosis, Diagnostics

NUM_EXAMPLES, SAMPLE_RATE = 1_000, 0.1
SIZES = (8, 40)  # numbers of weights
SETTINGS = tuple(product(("SGD", "momentum", "Adam"), (0.2, 0.5, 1.0, 1.5), (0.0, 0.5)))
SCHEDULES = (1.0, 0.995, 0.9)
FIRST_NOISE = 1_000.0  # of a schedule that falls by a tenth per step to the claimed level


@dataclass(frozen=True)
class LinearTraining:
    """A private linear regression with noise multiplier 1; ``rate`` is the learning rate times curvature."""

    update: str
    rate: float
    clipped: float
    """The share of the first gradients that are clipped."""
    decay: float
    """The factor of the noise per step, until it is as claimed; 1 if it is always as claimed."""
    num_steps: int

    @property
    def name(self) -> str:
        noise = "as claimed" if self.decay == 1 else f"times {self.decay:g} per step"
        return f"{self.update}, {self.rate:g} / curvature, {100 * self.clipped:g} % clipped, noise {noise}"

    def noise_levels(self) -> np.ndarray:
        """Return the standard deviation of each step, in claimed ones."""
        first = self.decay**-self.num_steps if self.decay > 0.99 else FIRST_NOISE
        return np.maximum(1.0, first * self.decay ** np.arange(self.num_steps))

    def diagnose(self, seed: int, confidence: float = 0.95) -> Diagnosis:
        """Train, and test the noise of all steps."""
        rng = np.random.default_rng([seed, self.num_steps, int(1e3 * self.decay), int(10 * self.rate)])
        inputs, targets = self._examples(rng, SIZES[seed % len(SIZES)])
        size, norm, curvature = inputs.shape[1], self._norm(inputs, targets), _curvature(inputs)
        optimizer, weights = _Optimizer(self.update, self.rate / curvature), np.zeros(size)
        record = Diagnostics(sample_rate=SAMPLE_RATE)
        for level in self.noise_levels():
            chosen = np.flatnonzero(rng.random(NUM_EXAMPLES) < SAMPLE_RATE)
            rows = inputs[chosen] * (inputs[chosen] @ weights - targets[chosen])[:, None]
            lengths = np.linalg.norm(rows, axis=1)
            total = (rows / np.maximum(1.0, lengths / norm)[:, None]).sum(axis=0)
            noise = norm * rng.standard_normal(size)
            record.observe_noise(
                level * noise / norm,
                known=total / norm,
                released=total + level * noise,
                weights=weights,
                batch_size=chosen.size,
                sum_norm=float(np.linalg.norm(total)),
                longest=float(lengths.max(initial=0.0)),
            )
            record.observe_batch(chosen, NUM_EXAMPLES)
            weights = weights - optimizer.step((total + level * noise) / (SAMPLE_RATE * NUM_EXAMPLES))
        return record.diagnose(confidence)

    def audit_with_opacus(self, seed: int) -> dpaudit.Result:
        """Train with Opacus, and return the audit with default settings."""
        import torch  # noqa: PLC0415  # the other runs need nothing but NumPy
        from opacus import PrivacyEngine  # noqa: PLC0415

        from dpaudit.observers.opacus import observe  # noqa: PLC0415

        torch.manual_seed(seed)
        inputs, targets = self._examples(np.random.default_rng(seed), SIZES[seed % len(SIZES)])
        norm, rate = self._norm(inputs, targets), self.rate / _curvature(inputs)
        model = torch.nn.Linear(inputs.shape[1], 1, bias=False)
        updates = {
            "SGD": torch.optim.SGD(model.parameters(), lr=rate),
            "momentum": torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
            "Adam": torch.optim.Adam(model.parameters(), lr=0.05 * self.rate),
        }
        data = torch.utils.data.TensorDataset(torch.Tensor(inputs), torch.Tensor(targets)[:, None])
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=updates[self.update],
            data_loader=torch.utils.data.DataLoader(data, batch_size=int(SAMPLE_RATE * NUM_EXAMPLES)),
            noise_multiplier=1.0,
            max_grad_norm=norm,
        )
        levels = iter(self.noise_levels())
        with observe(
            optimizer, loader=loader, num_steps=self.num_steps, delta=1e-5, noise_multiplier=1.0
        ) as recorder:
            while recorder.num_done < self.num_steps:
                for chosen, wanted in itertools.islice(loader, self.num_steps - recorder.num_done):
                    optimizer.noise_multiplier = float(next(levels))
                    optimizer.zero_grad()
                    (torch.nn.functional.mse_loss(model(chosen), wanted) / 2).backward()
                    optimizer.step()
        return recorder.audit()

    def _examples(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        inputs = rng.standard_normal((NUM_EXAMPLES, size))
        return inputs, inputs @ rng.standard_normal(size) + rng.standard_normal(NUM_EXAMPLES)

    def _norm(self, inputs: np.ndarray, targets: np.ndarray) -> float:
        first = np.linalg.norm(inputs * targets[:, None], axis=1)
        return float(np.quantile(first, 1 - self.clipped)) if self.clipped else 2 * float(first.max())


def _curvature(inputs: np.ndarray) -> float:
    return float(np.linalg.eigvalsh(inputs.T @ inputs / NUM_EXAMPLES)[-1])


class _Optimizer:
    """The changes of the weights by SGD, by SGD with momentum 0.9, or by Adam."""

    def __init__(self, update: str, rate: float) -> None:
        self._update, self._rate = update, rate
        self._first: np.ndarray | float = 0.0
        self._second: np.ndarray | float = 0.0
        self._count = 0

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self._count += 1
        if self._update == "SGD":
            return self._rate * gradient
        if self._update == "momentum":
            self._first = 0.9 * self._first + gradient
            return self._rate * self._first
        self._first = 0.9 * self._first + 0.1 * gradient
        self._second = 0.999 * self._second + 0.001 * gradient**2
        mean, square = self._first / (1 - 0.9**self._count), self._second / (1 - 0.999**self._count)
        return 0.05 * self._rate * mean / np.sqrt(square + 1e-8)


def adaptive_runs(count: int) -> Iterator[tuple[LinearTraining, int]]:
    """Yield this many runs with their seeds: all settings and schedules in turn, 200 to 2,000 steps."""
    lengths = np.random.default_rng(0).integers(200, 2_001, count).tolist()
    settings = list(product(SETTINGS, SCHEDULES))
    for seed, num_steps in enumerate(lengths):
        setting, decay = settings[seed % len(settings)]
        yield LinearTraining(*setting, decay, num_steps), seed + math.floor(seed / len(settings))


def has_finding(
    rng: np.random.Generator, _: float, *, update: str, rate: float, clipped: float, decay: float, steps: int
) -> float:
    """Return 1 if a correct training run has any finding at 95 % confidence, for a cell; or else 0."""
    training = LinearTraining(update, rate, clipped, decay, steps)
    return float(bool(training.diagnose(int(rng.integers(2**32))).findings))
