"""Tests of the noise, the sums and the batches of a training run, as a training hook without canaries."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit._types import FloatArray
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._coordinate_layout import Leaves
from dpaudit.diagnostics._sum_checks import StepSum, SumRecord
from dpaudit.errors import InputError
from dpaudit.recording import CoordinateSample, UntestedError
from dpaudit.training._training import Hook, Step, Training
from dpaudit.training.gradients import trainable

_PENDING = 64  # steps that are recorded together, which takes less time than one at a time
# the number of the step, its noise and release at the kept coordinates, its batch, and three numbers: the
# smallest and the largest noise of all coordinates, and the squared norm of the sum
_PendingStep = tuple[int, FloatArray, FloatArray, FloatArray, tuple[Tensor, Tensor, Tensor]]


class Diagnose(Hook):
    """Hook that collects the noise, the sum and the batch of every step; ``diagnose()`` tests them.

    The noise is the release minus the sum of examples and canaries, so the hook can be combined with an
    audit. It is compared with the training settings. Of a large model, the noise of about a thousand
    coordinates is kept, and the largest noise of all. Attach the hook to several training runs in turn to
    test whether they share their noise.
    """

    def __init__(self) -> None:
        self._record = Diagnostics()
        self._pending: list[_PendingStep] = []
        self.sums = SumRecord()
        self._claimed: tuple[float, float] | None = None  # noise and sample rate

    @property
    def record(self) -> Diagnostics:
        """The noise and the batches of all steps so far."""
        std, pending, self._pending = (self._claimed or (1.0, 1.0))[0], self._pending, []
        if pending:
            steps, noises, releases, batches, numbers = zip(*pending, strict=True)
            lows, highs, squares = (torch.stack(one) for one in zip(*numbers, strict=True))
            largest, norms = torch.stack([torch.maximum(-lows, highs), squares.sqrt()]).tolist()
            self._add_sums(steps, [len(batch) for batch in batches], largest, norms)
            noise, released = np.stack(noises), np.stack(releases)
            self._record.observe_noise_of_steps(
                noise / std,
                self._leaves,
                known=(released - noise) / std,
                released=released,
                largest=[(one / std, float(self._num_parameters)) for one in largest],
                described=[
                    {"batch_size": len(batch), "sum_norm": norm}
                    for batch, norm in zip(batches, norms, strict=True)
                ],
            )
            for indices in batches:
                self._record.observe_batch(indices, self._num_examples)
        return self._record

    def _add_sums(
        self, steps: Sequence[int], sizes: Sequence[int], largest: Sequence[float], norms: Sequence[float]
    ) -> None:
        for step, size, most, norm in zip(steps, sizes, largest, norms, strict=True):
            if not math.isfinite(most):
                raise InputError(f"Expected finite noise in step {step}, got {most}: did training diverge?")
            known = StepSum(
                norm=norm,
                limit=size * self._norm,
                rows=size,
                max_grad_norm=self._norm,
                num_drawn=size,
            )
            self.sums.observe(known, eps=self._eps)

    def attach(self, training: Training) -> None:
        settings = training.settings
        noise = _validate.positive("noise_multiplier", settings.noise_multiplier) * settings.max_grad_norm
        self._noise_multiplier = settings.noise_multiplier
        claimed = noise, settings.sample_rate
        if self._claimed not in (None, claimed):
            raise InputError("Expected training runs with equal noise and sample rate in one Diagnose.")
        self._claimed = claimed
        self.record.sample_rate = settings.sample_rate
        self._is_first = True
        self._num_examples, self._norm = len(training.data), settings.max_grad_norm
        parameters = trainable(training.model)
        self._eps = torch.finfo(next(iter(parameters.values())).dtype).eps
        sizes = {name: value.numel() for name, value in parameters.items()}
        self._num_parameters = sum(sizes.values())
        sample = CoordinateSample.of(list(sizes.values()))
        is_named = len(sample.leaves) == len(sizes)
        self._sizes = sizes
        self._leaves: Leaves = dict(zip(sizes, sample.leaves, strict=True)) if is_named else sample.leaves
        self._indices = torch.as_tensor(sample.indices, device=training.device)

    def observe(self, step: Step) -> None:
        # a dot product is faster than the norm; the rest is computed later, with full caches
        numbers = *step.noise.aminmax(), torch.dot(step.clipped_sum, step.clipped_sum)
        kept = self._kept(step.noise), self._kept(step.noisy_sum)
        indices = step.indices.cpu().numpy().copy()
        self._pending.append((step.index, *kept, indices, numbers))
        if self._is_first or len(self._pending) == _PENDING:
            _, self._is_first = self.record, False

    def _kept(self, vector: Tensor) -> FloatArray:
        """Return the numbers at the coordinates that are kept."""
        numbers: FloatArray = vector.index_select(0, self._indices).cpu().numpy()
        return numbers

    def diagnose(
        self,
        confidence: float = 0.95,
        *,
        noise_multiplier: float | None = None,
        has_signal: Callable[[], bool] | None = None,  # noqa: ARG002  # canaries cancel
    ) -> Diagnosis:
        """Test the steps so far; the false alarm rate holds for a single diagnosis.

        A ``noise_multiplier`` must be the one of the training settings.
        """
        if noise_multiplier is not None and not math.isclose(noise_multiplier, self._noise_multiplier):
            raise UntestedError(
                f"Expected noise_multiplier={self._noise_multiplier:g}, that of the training settings, got "
                f"{noise_multiplier:g}."
            )
        found = self.record.diagnose(confidence)
        rate = None if self._claimed is None else self._claimed[1]
        return found.joined(self.sums.results(noise_multiplier=self._noise_multiplier, sample_rate=rate))

    def state_dict(self) -> dict[str, Any]:
        return {**self.record.state_dict(), "step_sums": self.sums.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()
        self._record.load_state_dict(state)
        self.sums.load_state_dict(state["step_sums"])
