"""Tests of the noise, the sums and the batches of a training run, as a training hook without canaries."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics import (
    BatchRecord,
    CheckResults,
    ClaimedStep,
    CoordinateSample,
    Diagnosis,
    Leaves,
    NoiseCheck,
    NoiseMaximum,
    ObservedStep,
    SumRecord,
)
from dpaudit.errors import InputError
from dpaudit.training._training import Hook, Step, Training
from dpaudit.training.gradients import trainable

_CHUNK_STEPS = 64  # steps that are recorded together, which takes less time than one at a time
# the number of the step, its noise and release at the sampled coordinates, its batch, and three numbers: the
# smallest and the largest noise of all coordinates, and the squared norm of the sum
_PendingStep = tuple[int, FloatArray, FloatArray, IntArray, tuple[Tensor, Tensor, Tensor]]


class Diagnose(Hook):
    """Hook that collects the noise, the sum and the batch of every step; ``diagnose()`` tests them.

    The noise is the release minus the sum of examples and canaries, so the hook can be combined with an
    audit. It is compared with the training settings. Of a large model, the noise of about a thousand
    coordinates is kept, and the largest noise of all. Attach the hook to several training runs in turn to
    test whether they share their noise.
    """

    def __init__(self) -> None:
        self._pending: list[_PendingStep] = []
        self.noise, self.sums, self.batches = NoiseCheck(), SumRecord(), BatchRecord()
        self._claimed: tuple[float, float] | None = None  # noise multiplier and sample rate

    def attach(self, training: Training) -> None:
        settings = training.settings
        claimed = _validate.positive("noise_multiplier", settings.noise_multiplier), settings.sample_rate
        if self._claimed not in (None, claimed):
            raise InputError("Expected training runs with equal noise and sample rate in one Diagnose.")
        self._claimed, self._is_first = claimed, True
        self._num_examples, self._norm = len(training.data), settings.max_grad_norm
        parameters = trainable(training.model)
        self._eps = torch.finfo(next(iter(parameters.values())).dtype).eps
        sizes = {name: value.numel() for name, value in parameters.items()}
        self._num_parameters = sum(sizes.values())
        sample = CoordinateSample.of(list(sizes.values()))
        is_named = len(sample.leaves) == len(sizes)
        self._leaves: Leaves = dict(zip(sizes, sample.leaves, strict=True)) if is_named else sample.leaves
        self._indices = torch.as_tensor(sample.indices, device=training.device)

    def observe(self, step: Step) -> None:
        # a dot product is faster than the norm; the rest is computed later, with full caches
        numbers = *step.noise.aminmax(), torch.dot(step.clipped_sum, step.clipped_sum)
        indices = step.indices.cpu().numpy().copy()
        self._pending.append(
            (step.index, self._sampled(step.noise), self._sampled(step.noisy_sum), indices, numbers)
        )
        if self._is_first or len(self._pending) == _CHUNK_STEPS:
            self._flush()
            self._is_first = False

    def _sampled(self, vector: Tensor) -> FloatArray:
        """Return the numbers at the coordinates that are kept."""
        numbers: FloatArray = vector.index_select(0, self._indices).cpu().numpy()
        return numbers

    def _flush(self) -> None:
        """Pass the steps that were only read so far to the checks."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        lows, highs, squares = (
            torch.stack(column) for column in zip(*(step[-1] for step in pending), strict=True)
        )
        largest, norms = torch.stack([torch.maximum(-lows, highs), squares.sqrt()]).tolist()
        for (index, noise, released, batch, _), most, norm in zip(pending, largest, norms, strict=True):
            if not math.isfinite(most):
                raise InputError(f"Expected finite noise in step {index}, got {most}: did training diverge?")
            self._check(noise, released, batch, most, norm)

    def _check(
        self, noise: FloatArray, released: FloatArray, batch: IntArray, most: float, norm: float
    ) -> None:
        step = ObservedStep(
            noise=noise / self._norm,
            leaves=self._leaves,
            total=(released - noise) / self._norm,
            released=released,
            release_unit=1 / self._norm,
            max_noise=NoiseMaximum(most / self._norm, self._num_parameters),
            sum_norm=norm / self._norm,
            num_rows=len(batch),
            clipping_norm=self._norm,
            example_sum_norm=norm / self._norm,
            batch=batch,
            num_examples=self._num_examples,
        )
        for check in (self.noise, self.sums, self.batches):
            check.observe(step)

    def diagnose(self, confidence: float = 0.95) -> Diagnosis:
        """Test the steps so far; the false alarm rate holds for a single diagnosis."""
        noise_multiplier, sample_rate = self._claimed or (1.0, None)
        claimed = ClaimedStep(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            confidence=_validate.confidence(confidence),
        )
        results = [check.results(claimed) for check in self.checks]
        if self.noise.num_steps == 0:
            raise InputError("Expected at least one observed step, got none: did training run?")
        return Diagnosis.of((), confidence=confidence).joined(*results)

    @property
    def checks(self) -> tuple[NoiseCheck, BatchRecord, SumRecord]:
        """The checks of all steps so far."""
        self._flush()
        return self.noise, self.batches, self.sums

    def state_dict(self) -> dict[str, Any]:
        return {type(check).__name__: check.state_dict() for check in self.checks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()
        for check in self.checks:
            check.load_state_dict(state[type(check).__name__])


class ChecksOfHook:
    """The checks of a :class:`Diagnose` hook as one check of a recorder; the hook itself observes steps."""

    tests_noise = True

    def __init__(self, hook: Diagnose) -> None:
        self._hook = hook

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return the results of all checks of the hook."""
        joined = Diagnosis.of((), confidence=claimed.confidence)
        results = [check.results(claimed) for check in self._hook.checks]
        joined = joined.joined(*results)
        return CheckResults(
            checks=joined.checks,
            certain=tuple(finding for result in results for finding in result.certain),
            notes=joined.notes,
            not_covered=joined.not_covered,
            assumptions=joined.assumptions,
            noise=joined.noise,
        )
