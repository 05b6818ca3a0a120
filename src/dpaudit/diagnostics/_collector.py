"""The collector of noise and batches for training loops of one's own, without any observer.

What it is given is in claimed standard deviations, so that the tests need no claim but the sample rate.
"""

from __future__ import annotations

from typing import Any

from dpaudit import _validate
from dpaudit.diagnostics._diagnosis import Diagnosis
from dpaudit.diagnostics._noise_check import NoiseCheck
from dpaudit.diagnostics._p_values import CheckResults
from dpaudit.diagnostics._participation import ParticipationRecord, participation_checks
from dpaudit.diagnostics._step import ClaimedStep, Leaves, NoiseMaximum, ObservedStep
from dpaudit.errors import InputError


class Diagnostics:
    """Collector of noise and batches, step by step and in bounded memory; ``diagnose()`` runs the tests.

    Several runs may be observed one after another: noise that two of them share is detected as well. The
    number of steps must not depend on the data observed.

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
        self._noise = NoiseCheck(names_missing_fields=False)  # a developer knows what is given
        self._participation = ParticipationRecord()

    def observe_noise(
        self,
        residual: Any,
        leaves: Leaves | None = None,
        *,
        rounding: float = 0.0,
        known: Any = None,
        examples: Any = None,
        released: Any = None,
        weights: Any = None,
        precision: Any = None,
        largest: tuple[float, float] | None = None,
        batch_size: float | None = None,
        sum_norm: float | None = None,
        longest: float | None = None,
        num_canaries: float | None = None,
        noise_multiplier: float | None = None,
    ) -> None:
        """Add the noise of one step: its release minus the known sum, in claimed standard deviations.

        ``residual`` is a vector; ``leaves`` are the sizes of the parameters it consists of, in order, with
        their names if they have any. A few coordinates are enough if they are the same in every step.
        ``rounding`` is the largest rounding error of a coordinate in the same units, if it exceeds 0.001, as
        in sums of many single-precision numbers.

        More can be tested if more is known. ``known`` is the sum that was subtracted, at the same coordinates
        and in the same units, given in all steps or in none; ``examples`` is the same without canaries, which
        may be much longer. ``released`` is the release at the same coordinates, exactly as it was returned,
        in any units: its numbers show its precision. If it is not available, ``precision`` is the relative
        precision of these numbers, one or one per coordinate; the default is single precision. ``weights``
        are those of the model before the step at the same coordinates, given in all steps or in none, so that
        weight decay after the noise is not mistaken for a leak. ``largest`` is the largest absolute noise
        over all coordinates of the model, in the units of the noise, and their number. The others describe
        the step: the size of its batch, the norm of its sum, its longest gradient, the number of canaries in
        it, and the noise multiplier that it states, which may follow a public schedule.
        """
        step = ObservedStep(
            noise=residual,
            leaves=leaves,
            rounding=_validate.at_least("rounding", rounding, 0.0),
            total=known,
            examples=examples,
            released=released,
            weights=weights,
            eps=precision,
            max_noise=largest if largest is None else NoiseMaximum._make(largest),
            num_rows=batch_size,
            sum_norm=sum_norm,
            max_row_norm=longest,
            num_canaries=num_canaries,
            noise_multiplier=noise_multiplier,
        )
        self._noise.observe(step)
        self._noise.flush()  # mistakes are reported at once

    def observe_batch(self, indices: Any, num_examples: int) -> None:
        """Add one batch: the indices of its examples in a data set of ``num_examples``."""
        self._participation.observe(indices, num_examples)

    def observe_batch_size(self, size: int, num_examples: int) -> None:
        """Add the size of one batch whose examples are unknown."""
        self._participation.observe_size(size, num_examples)

    def diagnose(self, confidence: float = 0.95) -> Diagnosis:
        """Run all tests; a correct training run has any finding with probability at most 1 - confidence."""
        claimed = ClaimedStep(noise_multiplier=1.0, confidence=_validate.confidence(confidence))
        noise, batches = self._noise.results(claimed), self._participation
        checks = participation_checks(batches, self.sample_rate)
        if not noise.checks and not checks:
            raise InputError("No step was observed. Did training run?")
        notes = () if self.sample_rate is None else batches.rate_notes(self.sample_rate)
        return Diagnosis.of((), confidence=confidence).joined(
            noise, CheckResults(checks=tuple(checks), notes=notes)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the observed state, for ``load_state_dict`` of an identically created collector."""
        return {"noise": self._noise.state_dict(), "participation": self._participation.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("Diagnostics()", state):
            self._noise.load_state_dict(state["noise"])
            self._participation.load_state_dict(state["participation"])
