"""Tests of the noise, the sums and the batches of a training run, as a training hook without canaries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit._torch import largest_absolute
from dpaudit._types import FloatArray
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.diagnostics._coordinate_layout import Leaves
from dpaudit.diagnostics._sum_checks import StepSum, SumRecord
from dpaudit.errors import InputError
from dpaudit.recording import CoordinateSample, UntestedError
from dpaudit.training._training import Hook, Step, Training
from dpaudit.training.gradients import trainable

_PENDING = 64  # steps that are recorded together, which takes less time than one at a time
# noise, release, batch, largest noise of how many coordinates, and numbers that describe the step
_PendingStep = tuple[FloatArray, FloatArray, FloatArray, tuple[float, float], dict[str, float]]


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
            noises, releases, batches, largest, described = zip(*pending, strict=True)
            noise, released = np.stack(noises), np.stack(releases)
            known = (released - noise) / std
            self._record.observe_noise_of_steps(
                noise / std,
                self._leaves,
                known=known,
                released=released,
                largest=largest,
                described=described,
            )
            for indices in batches:
                self._record.observe_batch(indices, self._num_examples)
        return self._record

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
        sizes = {name: value.numel() for name, value in trainable(training.model).items()}
        sample = CoordinateSample.of(list(sizes.values()))
        is_named = len(sample.leaves) == len(sizes)
        self._sizes = sizes
        self._leaves: Leaves = dict(zip(sizes, sample.leaves, strict=True)) if is_named else sample.leaves
        self._indices: Tensor | None = torch.as_tensor(sample.indices, device=training.device)

    def observe(self, step: Step) -> None:
        assert self._claimed is not None  # attached, because a step is being observed
        # a dot product is faster than the norm
        numbers = largest_absolute(step.noise), torch.dot(step.clipped_sum, step.clipped_sum).sqrt()
        largest, norm = torch.stack(numbers).tolist()  # one transfer from the device
        if not math.isfinite(largest):
            raise InputError(
                f"Expected finite noise in step {step.index}, got {largest}: did training diverge?"
            )
        described = {"batch_size": len(step.indices), "sum_norm": norm}
        of_all = largest / self._claimed[0], float(step.noise.numel())
        indices = step.indices.cpu().numpy().copy()
        kept = self._kept(step.noise), self._kept(step.noisy_sum)
        self._pending.append((*kept, indices, of_all, described))
        if self._is_first or self._indices is None or len(self._pending) == _PENDING:
            _, self._is_first = self.record, False
        known = StepSum(
            norm=norm,
            limit=step.batch_size * self._norm,
            rows=step.batch_size,
            max_grad_norm=self._norm,
            num_drawn=step.batch_size,
        )
        self.sums.observe(known, eps=torch.finfo(step.clipped_sum.dtype).eps)

    def _kept(self, vector: Tensor) -> FloatArray:
        """Return the numbers at the coordinates that are kept."""
        kept = vector if self._indices is None else vector.index_select(0, self._indices)
        numbers: FloatArray = kept.cpu().numpy()
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
        self.sums.load_state_dict(state.get("step_sums"))
        if state["noise"].get("num_parameters") == sum(self._sizes.values()):  # as in version 0.1
            self._leaves, self._indices = self._sizes, None
