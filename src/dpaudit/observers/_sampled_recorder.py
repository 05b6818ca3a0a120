"""The recorder of canaries that are entries of the data set: each is one observation of the whole run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.diagnostics import Diagnosis
from dpaudit.errors import InputError
from dpaudit.observers._claims import Claims, Facts, Terms, require_terms
from dpaudit.observers._observer_recorder import KeptNoise, Side, require_arrival
from dpaudit.recording import LikelihoodRatios, LiveBound, WholeRunRecorder
from dpaudit.stats import Bound, Observations, Result

_MANY = 20  # draws expected; to see none of them then has a chance of two in a billion


class SampledRecorder:
    """Holds them against the curve of the whole training that ``read`` tells of, sampling and all.

    What is ``given`` counts more. ``present`` says which canaries are in the data set. How scores are weighed
    is settled before the first step, by the noise and the sample rate that are known then. A canary has the
    share ``reach`` of the clipping norm. ``finished`` gets the sample rate, and raises if the run cannot be
    judged.
    """

    def __init__(
        self,
        read: Callable[[], Terms],
        given: Terms,
        present: BoolArray,
        *,
        signal: float = 1.0,
        not_covered: tuple[str, ...] = (),
        confidence: float = 0.95,
        reach: float = 1.0,
        finished: Callable[[float], None] | None = None,
        facts: Callable[[], Facts] | None = None,
    ) -> None:
        self._claims, self._signal = Claims(read, given), signal
        self.not_covered = not_covered
        self.noise = KeptNoise()
        self._facts = facts
        self.confidence = _validate.confidence(confidence)
        now = self._claims.terms(Terms(), 0).known("noise_multiplier", "sample_rate")
        self._rate = now["sample_rate"]
        noise = _validate.positive("noise_multiplier", now["noise_multiplier"])
        self._ratios = LikelihoodRatios(present, noise_multiplier=noise / reach, sample_rate=self._rate)
        self._finished = finished
        self._joined, self._absent = Side(), Side()

    @property
    def present(self) -> BoolArray:
        """Which canaries are in the data set."""
        return self._ratios.present

    @property
    def num_done(self) -> int:
        """How many steps were recorded."""
        return self._ratios.num_done

    @property
    def claim(self) -> Claim:
        """What is held against the scores."""
        return self._claims.claim(Terms(), self.num_done)

    def record(self, scores: FloatArray, joined: BoolArray) -> None:
        """The scores of all canaries in one step, and which of them the sampler drew for it."""
        self._ratios.record(scores)
        self._joined.add(scores[joined])
        self._absent.add(scores[~joined])

    def live(self) -> LiveBound:
        """There is none."""
        raise InputError("Expected to wait for the end with sampling=True: there is no bound before it.")

    @property
    def observations(self) -> Observations:
        """One score a canary; only after the last step, because the claim is of all of them."""
        return self._ratios.observations(self._claims.given.num_steps or self.num_done)

    def audit(
        self,
        *,
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
        return replace(self._whole_run(asked).audit(**method), not_covered=self.not_covered)

    @property
    def facts(self) -> Facts | None:
        """What is known of the training besides its claim."""
        return None if self._facts is None else self._facts()

    def close(self) -> None:
        """The run is over. Nothing depends on it: there is no bound before."""

    def diagnose(self, *, noise_multiplier: float | None = None, confidence: float = 0.95) -> Diagnosis:
        """Tests of the noise of all steps; refused if none was kept."""
        asked = Terms(noise_multiplier=noise_multiplier)
        claimed = self._claims.terms(asked, self.num_done).known("noise_multiplier")["noise_multiplier"]
        return self.noise.diagnose(noise_multiplier=claimed, confidence=confidence)

    def one_run_bound(self, **asked: Any) -> Bound:
        """A bound that holds also if the canaries of the run depend on each other; it is looser.

        Any part of the claim can be given here, as to :meth:`audit`.
        """
        require_terms(asked)
        return self._whole_run(Terms(**asked)).one_run_bound()

    def _whole_run(self, asked: Terms) -> WholeRunRecorder:
        """Of a run that can be judged."""
        self._require_draws()
        if self._finished is not None:
            self._finished(self._rate)
        require_arrival(self._joined, self._absent, self._signal)
        known = self._claims.terms(asked, self.num_done).known()
        return WholeRunRecorder(self.present, **known, confidence=self.confidence, ratios=self._ratios)

    def _require_draws(self) -> None:
        expected = self._rate * int(self.present.sum()) * self.num_done
        if self._joined.count == 0 and expected > _MANY:
            raise InputError(
                f"Expected the sampler to draw canaries about {expected:.0f} times, got none: it does not "
                "draw from the entries that it says it has, so that nothing is known of it."
            )
