"""The evidence from one run of an entry of the zoo.

Most scenarios claim the privacy of the paper's three violations: one Gaussian step with epsilon = 1.27.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim
from dpaudit.diagnostics import Finding
from dpaudit.recording import Recorder, SupportsDiagnose
from dpaudit.stats import Betting, Gaussian, Inference, Observations, ThresholdRule, TradeOff

DELTA = 1e-5
EPSILON = 1.27


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores of canaries whose presence was decided by fair coins: steps x canaries, or one per canary."""

    values: FloatArray
    present: BoolArray
    tradeoff: TradeOff | None = None
    """The trade-off function of one score; None for that of the claim."""
    inference: Inference | None = None
    """The inference behind the verdict; None for betting, which allows dependent canaries within a step.

    Others require noise that is independent across coordinates, as in a correct twin.
    """
    threshold: ThresholdRule | None = None
    """A threshold fixed before the data; None to choose it from earlier or held-out scores."""

    @classmethod
    def of(cls, recorder: Recorder) -> Scores:
        """Return the scores that an observer recorded of canaries that are alike."""
        state = recorder.state_dict()
        return cls(values=state["scores"], present=state["present"])

    @property
    def is_stepped(self) -> bool:
        """Whether scores belong to single steps, so that a prefix of the run can be judged."""
        return self.values.ndim == 2

    def first(self, num_steps: int) -> Observations:
        """Return the scores of the first ``num_steps`` steps."""
        steps = slice(num_steps if self.is_stepped else None)
        scores_of = "step" if self.is_stepped else "run"
        return Observations.from_presence(self.values[steps], self.present[steps], scores_of=scores_of)

    def method(self, num_steps: int) -> Inference | None:
        """Return the inference for a verdict on the first ``num_steps`` steps."""
        return Betting(horizon=num_steps) if self.inference is None and self.is_stepped else self.inference

    def sufficient_counts(self, num_steps: int, min_scores: int = 20) -> list[int]:
        """Return the checkpoints with enough scores per side to choose a threshold."""
        if not self.is_stepped:
            return [num_steps]
        sides = self.present, ~self.present
        return [n for n in checkpoints(num_steps) if min(side[:n].sum() for side in sides) >= min_scores]


@dataclass(frozen=True)
class Replay:
    """A comparison without statistics: its result in words, and whether it refutes the claim."""

    sentence: str
    is_violation: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Evidence from one run: any of scores, observed noise, a replay, an observer's record and facts."""

    claim: Claim
    """The claim about what one score observes: a step or an entire training run."""
    num_steps: int
    scores: Scores | None = None
    diagnostics: Mapping[int, SupportsDiagnose] = field(default_factory=dict)
    """The diagnostics of noise and batches after each checkpoint; the last covers all steps."""
    replay: Replay | None = None
    recorder: Recorder | None = None
    """The record of an observer with default settings, which judges bound and tests together."""
    certain: tuple[Finding, ...] = ()
    """Findings without statistics: about the settings, or of a replay from the examples."""


Scenario: TypeAlias = Callable[[bool, int], Evidence]
"""Function that runs the broken training code or its correct twin with this seed."""


def noise_of(epsilon: float) -> float:
    """Return the noise multiplier of one Gaussian step with this epsilon."""
    return 1 / Gaussian().with_epsilon(epsilon, DELTA)


NOISE = noise_of(EPSILON)


@cache
def paper_claim() -> Claim:
    """Return the claim of one Gaussian step with epsilon = 1.27."""
    return Claim.gaussian(noise_multiplier=NOISE, delta=DELTA)


def checkpoints(num_steps: int) -> list[int]:
    """Return the numbers of steps after which the run is judged, ending with all of them."""
    return [*(count for count in (5, 10, 20, 50, 100, 200) if count < num_steps), num_steps]


def keep_checkpoint(
    copies: dict[int, SupportsDiagnose], record: SupportsDiagnose, num_done: int, num_steps: int
) -> None:
    """Copy the diagnostics if ``num_done`` is a checkpoint."""
    if num_done in checkpoints(num_steps):
        copies[num_done] = copy.deepcopy(record)
