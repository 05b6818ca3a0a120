"""Scores of whole runs: one per canary, its log-likelihood ratio over all steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from typing import Any, ClassVar, NoReturn, final

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim, SubsampledGaussian, log_ratio_attack
from dpaudit.errors import InputError
from dpaudit.recording._claim_source import ReadClaim, TrainingInfo
from dpaudit.recording._score_log import LengthMoments, RunningMoments, check_signal, require_resumable
from dpaudit.stats import (
    RUN,
    AuditDesign,
    BestOf,
    Bound,
    Fixed,
    Guesses,
    Observations,
    Result,
    Simultaneous,
    as_flags,
    as_mask,
    audit_recorded,
    one_run_fdp_bound,
    plain_array,
)
from dpaudit.stats.tradeoffs import Attack

# Sampling faults need most of the error probability; too little noise is detected with less.
WHOLE_RUN_RULE = BestOf((Fixed(0.0), Simultaneous()), (0.8, 0.2))
_LARGEST = 1e100  # log likelihood ratio of a step: sums of larger ones would overflow
_LEAST_NOISE = 1e-3  # with less, scores reveal every draw anyway
_MANY_DRAWS = 20  # expected draws; the probability of seeing none is then two in a billion


@final
class WholeRun:
    """Scorer of whole runs: for each canary, how much more likely its scores are if it is in the data set.

    The product of a canary's likelihood ratios over all steps is the most powerful test of the composed
    mechanism, so each canary is one observation of the whole run. ``present`` is a mask of the canaries in
    the data set; the sampling of the training run draws these in a step or not.

    The score x of a step has mean 1 if the canary is in the batch, mean 0 if not, and Gaussian noise. With
    sample rate q, the likelihood ratio of the step is 1 - q + q exp((2 x - 1) / (2 noise^2)). The claimed
    numbers known before the first step determine these weights. The norm of a canary is ``reach`` times the
    clipping norm, and a canary that was drawn must score ``signal`` or more. ``finished`` receives the sample
    rate and raises if the run cannot be audited.

    By default two thresholds share the error probability of the bound. One is where presence and absence are
    equally likely under the claim, which is known before the data; it is the best one for sampling faults.
    With less noise than claimed, all scores shift and it may be useless, so the other is the best of many.
    """

    covers_sampling: ClassVar[bool] = True
    has_live_bound: ClassVar[bool] = False
    checks: ClassVar[tuple[()]] = ()
    has_tests: ClassVar[bool] = False

    def __init__(
        self,
        present: BoolArray,
        *,
        signal: float | None = None,
        reach: float = 1.0,
        finished: Callable[[float], None] | None = None,
    ) -> None:
        self.present = as_flags(present)
        self._signal, self._reach, self._finished = signal, reach, finished

    def begin(self, claims: ReadClaim, level: float, planned: int | None) -> None:
        self._planned, self.level = planned, level
        numbers = claims.params(0).known("noise_multiplier", "sample_rate")
        self.noise = _validate.noise_multiplier(numbers["noise_multiplier"]) / self._reach
        self._rate = _validate.sample_rate(numbers["sample_rate"])
        self.num_done = 0
        self.ratios: FloatArray = np.zeros(self.present.size)
        self.drawn, self.absent = RunningMoments(), RunningMoments()

    @property
    def num_canaries(self) -> int:
        return self.present.size

    def record(self, scores: Any, present: BoolArray | None, lengths: FloatArray | None) -> None:
        """Add the scores of all canaries; ``present`` are those that the sampler drew, if that is known."""
        del lengths
        step_scores = plain_array("scores", scores).astype(np.float64, copy=False)
        if step_scores.shape != self.present.shape or not np.isfinite(step_scores).all():
            raise InputError(
                f"Step {self.num_done} needs {self.present.size} finite scores, got shape "
                f"{step_scores.shape} with {int(np.isfinite(step_scores).sum())} of them finite."
            )
        # divide: log(1 - 1), where every batch includes every canary
        with np.errstate(divide="ignore", over="ignore"):
            drawn = np.clip((step_scores - 0.5) / self.noise**2, -_LARGEST, _LARGEST)
            self.ratios += np.logaddexp(np.log1p(-self._rate), np.log(self._rate) + drawn)
        self.num_done += 1
        if present is not None:
            self.drawn.add(step_scores[present])
            self.absent.add(step_scores[~present])

    def require_fair(self, *, is_over: bool) -> None:
        del is_over  # membership is one coin per canary

    def require_signal(self, claim: Claim, *, is_accepted: bool = False) -> None:
        del claim
        if is_accepted:
            return
        expected = self._rate * int(self.present.sum()) * self.num_done
        if self._signal is not None and self.drawn.count == 0 and expected > _MANY_DRAWS:
            raise InputError(
                f"The sampler drew no canary, instead of about {expected:.0f}: it does not draw from all of "
                "its data set, so it cannot be audited."
            )
        if self._finished is not None:
            self._finished(self._rate)
        if self._signal is not None:
            check_signal([LengthMoments(self.drawn, self.absent)], self._signal)

    def has_signal(self) -> bool:
        return True  # otherwise there is no audit

    def observations(self, claim: Claim | None = None) -> Observations:
        """Return one score per canary; available after the last step only, because the claim covers all."""
        num_steps = self._planned or self.num_done if claim is None else _curve(claim).num_steps
        if self.num_done < num_steps or self.num_done == 0:
            raise InputError(
                f"The whole run can be audited only after all {num_steps} steps, got {self.num_done}."
            )
        return Observations.from_presence(self.ratios, self.present, scores_of=RUN)

    def judge(
        self, observations: Observations, claim: Claim, method: dict[str, Any], *, was_shown: bool
    ) -> Result:
        del was_shown  # no bound is shown before the end
        curve, is_usual = _curve(claim), method.get("inference") is None
        usual = {"tradeoff": curve, "threshold": WHOLE_RUN_RULE if is_usual else Fixed(0.0)}
        result = audit_recorded(observations, claim=claim, **(usual | method))
        assert isinstance(result.design, AuditDesign)  # not that of guesses
        return replace(result, design=result.design.for_attack(partial(self._attack, curve.num_steps)))

    def _attack(self, num_steps: int, parameter: float) -> Attack:
        """Return the attack by these scores, which assume the claimed noise, on a run with another noise."""
        noise = max(1 / (self._reach * parameter), _LEAST_NOISE)
        return log_ratio_attack(noise, self._rate, num_steps, self.noise)

    def one_run_bound(self, claim: Claim, confidence: float) -> Bound:
        """Return a looser bound that is valid even if the canaries of the run are dependent."""
        guesses = Guesses.at_threshold(self.ratios, self.present, threshold=0.0)
        return one_run_fdp_bound(guesses, tradeoff=_curve(claim), delta=claim.delta, confidence=confidence)

    def clues(self, claim: object, facts: TrainingInfo | None) -> dict[str, Any]:
        del claim, facts
        return {}

    def bound(self, num_done: int, claim: Claim) -> NoReturn:
        del num_done, claim
        raise InputError("There is no bound before the last step with sampling=True.")

    def trajectory(self, claim: Claim) -> NoReturn:
        self.bound(self.num_done, claim)

    def state_dict(self) -> dict[str, Any]:
        moments = {"drawn": astuple(self.drawn), "absent": astuple(self.absent)}
        return {"num_done": self.num_done, "ratios": self.ratios.copy(), "present": self.present, **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ratios = np.array(state["ratios"], dtype=np.float64)
        require_resumable(len(state["present"]), self.present.size)
        if ratios.shape != self.present.shape or not np.isfinite(ratios).all():
            raise InputError(
                f"The state must have {self.present.size} finite ratios, got shape {ratios.shape}."
            )
        if not np.array_equal(as_mask(state["present"], ratios.shape), self.present):
            raise InputError(
                "The state is of a run with other canaries in its data; pass the same seed to the observer."
            )
        self.num_done, self.ratios = _validate.integer("num_done", state["num_done"], low=0), ratios
        self.drawn, self.absent = (RunningMoments(*state[side]) for side in ("drawn", "absent"))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs, which can be audited but belongs to no training run."""
        finished = None
        try:
            if self._finished is not None:
                self._finished(self._rate)
        except InputError as error:
            finished = partial(_raise, str(error))
        return {**vars(self), "_finished": finished}


def _curve(claim: Claim) -> SubsampledGaussian:
    """Return the curve of the whole run; only DP-SGD claims are tested against whole runs."""
    if claim.training is None:
        raise InputError(f"The claim must be about DP-SGD, such as Claim.dpsgd(...), got {claim}.")
    return claim.training


def _raise(message: str, *_: Any) -> None:
    raise InputError(message)
