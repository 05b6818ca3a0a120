"""Collects what the tests need, while a training runs."""

from __future__ import annotations

from typing import Any

from dpaudit import _validate
from dpaudit.diagnostics._diagnosis import Diagnosis
from dpaudit.diagnostics._exact import RESOLUTION
from dpaudit.diagnostics.noise import Amount, Leaves, NoiseRecord, amount, noise_checks
from dpaudit.diagnostics.participation import ParticipationRecord, drawn_rate, participation_checks
from dpaudit.errors import InputError

__all__ = ["Diagnostics"]


class Diagnostics:
    """Is fed step by step, in bounded memory; ``diagnose()`` makes the tests that the observations allow.

    Several runs may be fed one after another: noise that is equal in two of them is found, too. The number
    of steps must not be chosen by what they show.

    >>> import numpy as np
    >>> rng, record = np.random.default_rng(0), Diagnostics(sample_rate=0.1)
    >>> for _ in range(100):
    ...     record.observe_noise(0.5 * rng.standard_normal(20))
    ...     record.observe_batch(np.flatnonzero(rng.random(200) < 0.1), num_examples=200)
    >>> [finding.name for finding in record.diagnose().findings]
    ['noise-variance']
    """

    def __init__(self, *, sample_rate: float | None = None) -> None:
        self.sample_rate = None if sample_rate is None else _validate.sample_rate(sample_rate)
        self._noise = NoiseRecord()
        self._participation = ParticipationRecord()

    def observe_noise(self, residual: Any, leaves: Leaves | None = None, *, rounding: float = 0.0) -> None:
        """What one step released, less the sum that is known, over the claimed standard deviation.

        ``residual`` is a vector; ``leaves`` are the sizes of the parameters it is made of, one after another,
        by name if there are names. A few coordinates of every step will do, if they stay the same ones.
        ``rounding`` is how far a coordinate may be off, in the same units, if that is more than a thousandth:
        sums of many single-precision numbers are.
        """
        self._noise.observe(residual, leaves, _validate.at_least("rounding", rounding, 0.0))

    def observe_batch(self, indices: Any, num_examples: int) -> None:
        """Which examples were in one batch, as places in a data set of ``num_examples``."""
        self._participation.observe(indices, num_examples)

    def observe_batch_size(self, size: int, num_examples: int) -> None:
        """How many examples were in one batch, where it is not known which."""
        self._participation.observe_size(size, num_examples)

    def diagnose(self, confidence: float = 0.95) -> Diagnosis:
        """All tests, with a false alarm in 1 - confidence of correct trainings at most."""
        _validate.confidence(confidence)
        noise, participation = self._noise, self._participation
        checks = noise_checks(noise, confidence) + participation_checks(participation, self.sample_rate)
        if not checks:
            raise InputError("Expected at least one observed step, got none: did the training run?")
        found = amount(noise, confidence) if noise.num_steps else None
        return Diagnosis.of(checks, confidence=confidence, noise=found, notes=self._notes(found))

    def _notes(self, noise: Amount | None) -> list[str]:
        notes = []
        if noise is not None and noise.low > 1 + RESOLUTION:
            notes.append(f"The noise is {noise}: more than claimed costs accuracy, not privacy.")
        claimed, seen = self.sample_rate, self._participation
        if claimed is not None and seen.num_steps:
            trials = seen.num_steps * seen.num_examples
            rate, error = drawn_rate(seen), (claimed * (1 - claimed) / trials) ** 0.5
            if rate < claimed * (1 - RESOLUTION) - 4 * error:
                notes.append(
                    f"Examples are drawn with a rate of {rate:.4g}, less than the claimed {claimed:.4g}."
                )
        return notes

    def state_dict(self) -> dict[str, Any]:
        """What was observed; give it to ``load_state_dict`` of an equal collector."""
        return {"noise": self._noise.state_dict(), "participation": self._participation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self._noise.load_state_dict(state["noise"])
        self._participation.load_state_dict(state["participation"])
