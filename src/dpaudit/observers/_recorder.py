"""The recorder of an observer: its claim is read from the training that it observes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpaudit.accounting import Claim
from dpaudit.diagnostics import Diagnosis
from dpaudit.observers._arriving import ArrivingRecorder
from dpaudit.observers._claims import Claims
from dpaudit.observers._kept_noise import KeptNoise
from dpaudit.observers._terms import Terms, require_terms
from dpaudit.observers._untested import UntestedError
from dpaudit.stats import Betting, Inference, Result

__all__ = ["ObserverRecorder"]

_SOME_STEPS = 1000  # what the bets prepare for if nobody says how long the training will be
_SELDOM = 50  # an epsilon for every other number of steps is not cheap


class ObserverRecorder(ArrivingRecorder):
    """A :class:`dpaudit.Recorder` that learns from ``read`` what the training claims.

    What is ``given`` counts more. Without a number of steps, the claim is of those that were recorded. A
    present canary scores ``signal`` or more. ``not_covered`` says in sentences which parts of the training
    the canaries do not go through.
    """

    def __init__(
        self,
        read: Callable[[], Terms],
        given: Terms,
        *,
        not_covered: tuple[str, ...] = (),
        every: int | None = None,
        **options: Any,
    ) -> None:
        self._claims = Claims(read, given)
        self.not_covered = not_covered
        self.noise = KeptNoise()
        planned = given.num_steps
        super().__init__(
            claim=None,  # not known yet: see the property
            num_steps=_SOME_STEPS if planned is None else planned,
            every=_SELDOM if planned is None and every is None else every,
            **options,
        )

    @property
    def claim(self) -> Claim:
        return self._claims.claim(Terms(), self.num_done)

    @property
    def _is_over(self) -> bool:
        """Without a number of steps that was given, nobody knows before the recorder is closed."""
        return self._closed or self.num_done == self._claims.given.num_steps

    def audit(
        self,
        *,
        inference: Inference | None = None,
        claim: Claim | None = None,
        noise_multiplier: float | None = None,
        sample_rate: float | None = None,
        num_steps: int | None = None,
        delta: float | None = None,
        **method: Any,
    ) -> Result:
        """The verdict on the claim, any part of which can be given here; other keywords as for ``audit``."""
        require_terms(method)
        asked = Terms(
            noise_multiplier=noise_multiplier, sample_rate=sample_rate, num_steps=num_steps, delta=delta
        )
        if inference is None and self._claims.given.num_steps is None and not self._looked:
            inference = Betting()  # nobody could have stopped the run because of what it showed
        self.observations  # noqa: B018  # a training that did not run has no claim either
        result = super().audit(
            inference=inference, claim=claim or self._claims.claim(asked, self.num_done), **method
        )
        return replace(result, not_covered=self.not_covered + self._claims.remarks(asked))

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Tests of the noise of all steps; refused if there is none, or if it may have ended the run.

        Their error rate is that of a number of steps that nobody chose by what the noise showed.
        """
        self._require_fixed_length()
        self._shown = True
        asked = Terms(noise_multiplier=noise_multiplier)
        claimed = self._claims.terms(asked, self.num_done).known("noise_multiplier")["noise_multiplier"]
        return self.noise.diagnose(noise_multiplier=claimed, confidence=confidence)

    def _require_fixed_length(self) -> None:
        planned = self._claims.given.num_steps
        if not self._looked or self.num_done == planned:
            return
        ends = "a run of no planned length" if planned is None else f"{self.num_done} of {planned} steps"
        raise UntestedError(
            f"Expected the number of steps not to depend on what they showed, got {ends} whose bound was "
            "looked at before the end: tests of the noise would have another error rate than they say. Pass "
            "num_steps= to the observer and make all of them, or look only after the end."
        )
