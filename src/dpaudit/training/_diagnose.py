"""Tests of a training's noise and batches, while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpaudit import _validate
from dpaudit.diagnostics import Diagnosis, Diagnostics
from dpaudit.errors import InputError
from dpaudit.training._hook import Hook
from dpaudit.training._step import Step
from dpaudit.training.gradients._flat import trainable

if TYPE_CHECKING:
    from dpaudit.training._training import Training

__all__ = ["Diagnose"]


class Diagnose(Hook):
    """A hook that collects the noise and the batches of every step; ``diagnose()`` tests them.

    The noise is what a step released less what went into it, examples and canaries: so it may be used
    beside an audit. Held against it is what the training's settings say. Give it to one training after
    another to see whether two runs have the same noise.
    """

    def __init__(self) -> None:
        self.record = Diagnostics()
        self._claimed: tuple[float, float] | None = None  # the noise, and the sample rate

    def attach(self, training: Training) -> None:
        settings = training.settings
        noise = _validate.positive("noise_multiplier", settings.noise_multiplier) * settings.max_grad_norm
        claimed = noise, settings.sample_rate
        if self._claimed not in (None, claimed):
            raise InputError("Expected trainings of equal noise and sample rate to be diagnosed together.")
        self._claimed = claimed
        self.record.sample_rate = settings.sample_rate
        self._num_examples = len(training.data)
        self._leaves = {name: value.numel() for name, value in trainable(training.model).items()}

    def observe(self, step: Step) -> None:
        assert self._claimed is not None  # it is attached to the training that is observed
        noise = step.noise / self._claimed[0]
        self.record.observe_noise(noise.cpu().numpy(), self._leaves)
        self.record.observe_batch(step.indices.cpu().numpy(), self._num_examples)

    def diagnose(self, confidence: float = 0.95) -> Diagnosis:
        """What the steps so far show; the false alarm rate is that of one look."""
        return self.record.diagnose(confidence)

    def state_dict(self) -> dict[str, Any]:
        return self.record.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.record.load_state_dict(state)
