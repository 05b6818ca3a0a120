"""The check of the noise of all steps, and the collector of noise and batches for loops of one's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.diagnostics._coordinate_layout import Leaves
from dpaudit.diagnostics._diagnosis import Diagnosis
from dpaudit.diagnostics._lattice_tests import is_coarse
from dpaudit.diagnostics._noise_record import NoiseLog, NoiseRecord
from dpaudit.diagnostics._noise_tests import PUBLIC_TESTS, noise_amount, noise_checks
from dpaudit.diagnostics._p_values import RESOLUTION, Amount, CheckResults
from dpaudit.diagnostics._participation import ParticipationRecord, participation_checks
from dpaudit.diagnostics._public_parts import discount_weight_decay, drift_note, with_cause_of_correlation
from dpaudit.diagnostics._step import ClaimedStep, NoiseMaximum, ObservedStep, missing_fields
from dpaudit.errors import InputError

_NEEDED = ("total", "sum_norm", "num_rows", "max_row_norm")  # by tests of what the noise depends on


class NoiseCheck:
    """All tests of the noise; steps without noise are not tested.

    A canary that is not clipped as claimed leaves a trace in the noise. Where an observer gives
    ``noise_apart`` as well, that is tested instead if canaries do not score as expected.
    """

    tests_noise = True

    def __init__(self, *, names_missing_fields: bool = True) -> None:
        self._names_missing_fields = names_missing_fields
        self._log, self._apart = NoiseLog(), NoiseLog()
        self._pending: list[ObservedStep] = []
        self._given: set[str] = set()

    @property
    def num_steps(self) -> int:
        """The number of steps whose noise was observed."""
        return self._log.num_steps + len(self._pending)

    def observe(self, step: ObservedStep) -> None:
        """Add the next step, if its noise is known."""
        if step.noise is None:
            return
        self._pending.append(step)
        chunk_steps = 64  # steps that are processed together
        if len(self._pending) == chunk_steps or self._log.num_steps == 0:
            self.flush()

    def flush(self) -> None:
        """Process the steps that are only noted so far.

        Many at once take less time: after a step of training, caches are empty.
        """
        steps, self._pending = self._pending, []
        if not steps:
            return
        self._log.observe(steps)
        if steps[0].noise_apart is not None:
            self._apart.observe(steps, "noise_apart")
        self._given |= set(steps[-1].given)

    def record(self, noise_multiplier: float = 1.0) -> NoiseRecord:
        """Return the noise in units of this noise multiplier."""
        self.flush()
        return self._log.record(noise_multiplier)

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Test the noise against the claimed noise multiplier."""
        self.flush()
        if self.num_steps == 0:
            return CheckResults()
        log = self._log if self._apart.num_steps == 0 or claimed.has_signal() else self._apart
        results = noise_results(log.record(claimed.noise_multiplier), claimed.confidence)
        missing = missing_fields(self._given, _NEEDED) if self._names_missing_fields else ()
        return replace(results, not_covered=(*results.not_covered, *missing))

    @property
    def given_fields(self) -> frozenset[str]:
        """The fields of the observed steps that were not left out."""
        self.flush()
        return frozenset(self._given)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        self.flush()
        states = {"noise": self._log.state_dict(), "apart": self._apart.state_dict()}
        return {**states, "given": sorted(self._given)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self._pending.clear()
        with _validate.state_dict_errors("the noise of steps", state):
            self._given = set(state["given"])
            for log, name in ((self._log, "noise"), (self._apart, "apart")):
                log.load_state_dict(state[name])
                if log.num_steps:
                    _ = log.record().resolution, log.record().sum_energy  # raises if sizes do not fit


def noise_results(record: NoiseRecord, confidence: float) -> CheckResults:
    """Run all tests of the noise in claimed standard deviations."""
    checks, notes = discount_weight_decay(record, noise_checks(record, confidence), PUBLIC_TESTS)
    amount = noise_amount(record, confidence)
    return CheckResults(
        checks=tuple(with_cause_of_correlation(record, checks)),
        notes=(*_notes(record, amount), *notes),
        not_covered=_gaps(record),
        noise=amount,
    )


def _notes(record: NoiseRecord, amount: Amount) -> list[str]:
    notes, drift = [], drift_note(record)
    if amount.low > 1 + RESOLUTION:
        notes.append(f"The noise is {amount}: noise above the claim costs accuracy, not privacy.")
    return notes if drift is None else [*notes, drift]


def _gaps(record: NoiseRecord) -> tuple[str, ...]:
    coarse, stated = is_coarse(record), np.asarray(record.covariates["noise_multiplier"])
    gaps = []
    if np.ptp(stated) > 0:  # NaN if a step states none
        gaps.append(
            "whether the noise multiplier, which changed during the run, depends on the data is not tested"
        )
    if coarse.any():
        where = "" if coarse.all() else f" at {100 * coarse.mean():.0f} % of the coordinates"
        gaps.append(
            f"The release is in low precision{where}, which hides whether the noise was drawn on a lattice "
            "or from a table: ties are not tested there."
        )
    return tuple(gaps)


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
            raise InputError("Expected at least one observed step, got none: did training run?")
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
