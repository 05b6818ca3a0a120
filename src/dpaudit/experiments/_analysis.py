"""The analysis of a run: bounds of all methods, verdict and power, from its scores and its config.

:class:`RunScores` holds the scores, :func:`compare` audits them with the methods that the config implies, and
:func:`plain_values` returns what ``result.json`` says of it. A run uses them at its end, and ``_recompute``
when it is checked. Needs neither torch nor pydantic, nor the data of the run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpaudit import canaries, stats
from dpaudit._io import read_array
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.diagnostics import share_error
from dpaudit.errors import InputError
from dpaudit.methods import MethodComparison, NamedBound, examine
from dpaudit.recording import WHOLE_RUN_RULE
from dpaudit.stats.inference import BoundQuery

RESULT_SCHEMA: Final = stats.SCHEMA_VERSION
"""The version of the schema of ``result.json``."""
SCORE_FILES: Final = {
    "scores": "f",
    "present": "b",
    "with_canary": "f",
    "without_canary": "f",
    "log_likelihood_ratios": "f",
}
"""The files of scores and presence, with their dtype kinds."""
RETRIED: Final = "all randomness of a training run comes from its seed: "
"""How the assumption begins under which failed training runs may be repeated."""
SCORES_OF_MODES: Final = {
    "one-run": ("scores", "present"),
    "paper": ("scores", "present"),
    "end-to-end": ("log_likelihood_ratios", "present"),
    "many-runs": ("with_canary", "without_canary"),
}
"""The arrays that a run of each mode writes at its end."""
GRADIENT_CANARIES: Final[Mapping[str, Callable[..., canaries.GradientCanary]]] = {
    "dirac": canaries.Dirac,
    "constant": canaries.Constant,
    "mixture": canaries.Mixture,
    "random-direction": canaries.RandomDirection,
}
THRESHOLD_RULES: Final[Mapping[str | None, stats.ThresholdRule | None]] = {
    None: None,  # the number of scores determines the rule; all choices are sound
    "simultaneous": stats.Simultaneous(),
    "held-out": stats.HeldOut(),
}
"""The values of ``audit.threshold``."""


@dataclass(frozen=True, eq=False)
class RunScores:
    """The scores of a run, its claim, and what decides how they are audited.

    ``arrays`` are those of the files, ``values`` the numbers of ``result.json`` on the training run, and
    ``audit`` is the table of the config.
    """

    arrays: Mapping[str, np.ndarray]
    values: Mapping[str, Any]
    audit: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, values: Mapping[str, Any], audit: Mapping[str, Any]) -> RunScores:
        """Read the scores of a run with this result; raise unless they can be counted."""
        expected = SCORES_OF_MODES.get(str(values.get("mode")))
        if expected is None:
            raise InputError(f"mode must be one of {', '.join(SCORES_OF_MODES)}.")
        arrays = {}
        for name, kinds in SCORE_FILES.items():
            array = read_array(folder / f"{name}.npy", kinds)
            if array is None and name in expected:
                raise InputError(
                    f"{folder / name}.npy, from which the numbers of the run follow, is missing; restore it."
                )
            if array is not None and name not in expected:
                raise InputError(
                    f"{folder / name}.npy does not belong to a run of mode {values['mode']}; remove it."
                )
            if array is not None:
                arrays[name] = array
        scores = cls(arrays, values, audit)
        try:
            _ = scores.observations
        except InputError as error:
            raise InputError(f"The observations in {folder} are damaged. {error}") from error
        return scores

    @property
    def are_guessed(self) -> bool:
        """Whether there is one score per canary of a final model, and presence is guessed from them."""
        return "scores" in self.arrays and self.values.get("threat_model") == "black-box"

    @property
    def is_coupled(self) -> bool:
        """Whether a score depends on which other canaries were present."""
        return self.are_subtracted and bool(self.arrays["scores"].shape[1] > 1)

    @property
    def are_subtracted(self) -> bool:
        """Whether the contributions of other canaries, which may overlap, are subtracted from a score."""
        return (self.values["threat_model"], self.values["mode"]) == ("input", "one-run")

    @cached_property
    def claim(self) -> Claim | None:
        """The claim; None for a run without noise, which claims nothing."""
        if not self.values["noise_multiplier"]:
            return None
        return Claim.dpsgd(
            noise_multiplier=self.values["noise_multiplier"],
            sample_rate=self.values["sample_rate"],
            num_steps=self.values["num_steps"],
            delta=self.values["delta"],
        )

    @property
    def curve(self) -> stats.TradeOff:
        """The trade-off curve of the whole training run; without a claim, that of (epsilon, delta)-DP."""
        if self.claim is None:
            return stats.ApproximateDP(self.values["delta"])
        assert self.claim.training is not None  # of a claim about DP-SGD
        return self.claim.training

    @cached_property
    def _gradients(self) -> canaries.GradientCanary | None:
        """The gradient canary whose short variants do not count, if there is one."""
        table = self.audit.get("canary") or {}
        kind = GRADIENT_CANARIES.get(str(table.get("kind")))
        if kind is None or self.values["mode"] == "paper":
            return None
        return kind(**{name: value for name, value in table.items() if name != "kind"})

    def num_counted(self, num_steps: int) -> int:
        """Return how many of the first steps count for the bound."""
        if not 0 < num_steps <= 10_000_000:  # more are not planned by any run
            raise InputError(f"The number of steps must be between 1 and 10,000,000, got {num_steps!s:.40}.")
        canary = self._gradients
        return num_steps if canary is None else sum(map(canary.is_counted, range(num_steps)))

    @cached_property
    def observations(self) -> stats.Observations:
        """The scores that count for the bound."""
        if "with_canary" in self.arrays:
            present, absent = self.arrays["with_canary"], self.arrays["without_canary"]
            return stats.Observations(with_canary=present, without_canary=absent, scores_of=stats.RUN)
        present = self.arrays["present"]
        if "log_likelihood_ratios" in self.arrays:
            return stats.Observations.from_presence(
                self.arrays["log_likelihood_ratios"], present, scores_of=stats.RUN
            )
        scores = self.arrays["scores"]
        if self.are_guessed:
            return stats.Observations.from_presence(scores, present, scores_of=stats.ONE_RUN)
        if scores.ndim != 2:
            raise InputError(f"Scores must be steps x canaries, got shape {scores.shape}.")
        if self.values["mode"] == "paper":
            return stats.Observations.from_presence(
                scores, present, normalized=True, paired=True, scores_of=stats.STEP
            )
        # as in the score log of a recorder
        if (canary := self._gradients) is not None:
            steps = [index for index in range(len(scores)) if canary.is_counted(index)]
            width = scores.shape[1] - canary.num_excluded(scores.shape[1])
            scores, present = scores[steps, :width], present[steps, :width]
        stats.Observations.from_presence(scores, present)  # raises unless coins are fair and scores finite
        return stats.split_by_coins(scores, present, normalized=True, coupled=self.is_coupled)

    @cached_property
    def guesses(self) -> stats.Guesses:
        """The guesses on canaries of one run: by log-likelihood ratios, or as many as the config fixed."""
        present = self.arrays["present"]
        if "log_likelihood_ratios" in self.arrays:
            return stats.Guesses.at_threshold(self.arrays["log_likelihood_ratios"], present, threshold=0.0)
        count = self.audit.get("num_guesses") or present.size
        return stats.Guesses.from_scores(self.arrays["scores"], present, num_guesses=count)

    @cached_property
    def flawless(self) -> RunScores:
        """The same with the scores of an attack that errs only on failed trials.

        A failed trial has the number next to the lowest score if the canary is present, and next to the
        highest if it is absent. Raise if they are not as many as the result says.
        """
        present, absent = self.arrays["with_canary"], self.arrays["without_canary"]
        lost, gained = np.zeros(present.shape, bool), np.zeros(absent.shape, bool)
        if num_failed := self.values["num_failed"]:
            every, most = np.concatenate([present, absent]), sys.float_info.max
            low, high = every.min(), every.max()
            # a diverged model may have the lowest number that there is, which failed trials then share
            lost = (present == low) & (low == -most or np.nextafter(low, most) in every)
            gained = (absent == high) & (high == most or np.nextafter(high, -most) in every)
            count = int(lost.sum() + gained.sum())
            if count != num_failed and -most < low and high < most:
                raise InputError(f"num_failed must be {count}, as the scores show, got {num_failed!s:.20}.")
        arrays = {"with_canary": np.where(lost, -1.0, 1.0), "without_canary": np.where(gained, 2.0, 0.0)}
        return replace(self, arrays=arrays)


def compare(scores: RunScores, result: stats.Result | None = None) -> MethodComparison:
    """Return the bounds of all methods, and the verdict if there is a claim.

    ``result`` is the audit of a recorder, with its tests; without it, the same method audits the claim.
    """
    if scores.values["mode"] == "many-runs":
        return _compare_runs(scores)
    if scores.claim is None:
        raise InputError("noise_multiplier must be positive, got 0.")
    if scores.are_guessed:
        return _compare_guesses(scores, scores.claim)
    result = _audit(scores, scores.claim) if result is None else result
    is_whole_run = scores.values["mode"] == "end-to-end"
    return examine(
        scores.observations,
        delta=scores.values["delta"],
        confidence=result.bound.confidence,
        claim=scores.claim,
        tradeoff=scores.curve if is_whole_run else _curve_of_step(scores),
        threshold=0.0 if is_whole_run else None,
        names=_method_names(scores),
        result=result,
    )


def _audit(scores: RunScores, claim: Claim) -> stats.Result:
    """Audit scores as the recorder of the run did; its tests have a share of the error."""
    level, _ = confidences(scores)
    if scores.values["mode"] == "end-to-end":
        return stats.audit_recorded(
            scores.observations,
            claim=claim,
            confidence=level,
            tradeoff=scores.curve,
            threshold=WHOLE_RUN_RULE,
        )
    curve = _curve_of_step(scores)
    bets = stats.Betting(  # those of the live bound
        horizon=scores.num_counted(scores.audit.get("first_steps") or scores.values["num_steps"]),
        expected=claim.hypothesis(curve).parameter,
        stop_loss=not scores.are_subtracted,
    )
    return stats.audit_untuned(
        scores.observations, claim=claim, confidence=level, tradeoff=curve, inference=bets
    )


def confidences(scores: RunScores) -> tuple[float, float]:
    """Return the confidences of the bound and of the tests of a recorded run."""
    return share_error(1 - scores.audit["confidence"], has_bound=True, has_tests=True)


def _curve_of_step(scores: RunScores) -> stats.TradeOff | None:
    """Return the trade-off curve of one observation; None if it is that of a step with the canary."""
    rate = scores.audit.get("canary_rate", 1.0)
    return None if rate == 1 else SubsampledGaussian(rate, 1)


def _method_names(scores: RunScores) -> Collection[str] | None:
    """Return the methods, besides that of the verdict, whose bounds are valid; None if all are."""
    requested: Collection[str] | None = scores.audit["methods"]
    if scores.values.get("stopped_early") is True:  # the others assume a fixed number of observations
        return ()
    if scores.is_coupled:
        betting = "f-DP(betting)"
        return () if requested is not None and betting not in requested else (betting,)
    return requested


def _compare_guesses(scores: RunScores, claim: Claim) -> MethodComparison:
    """Return two bounds that are valid for canaries in the same training run, and the verdict of the first.

    It assumes the trade-off curve of the claimed training (Mahloujifar et al. 2024); the second makes no
    assumption about the mechanism (Steinke et al. 2023).
    """
    guesses, curve, confidence = scores.guesses, scores.curve, scores.audit["confidence"]
    bound = stats.one_run_fdp_bound(guesses, tradeoff=curve, delta=claim.delta, confidence=confidence)
    universal = stats.one_run_bound(guesses, delta=claim.delta, confidence=confidence)
    result = stats.Result(
        claim=claim,
        bound=bound,
        hypothesis=claim.hypothesis(curve),
        design=stats.GuessDesign(guesses, curve, claim.delta, 1 - confidence),
        bound_p_value=partial(stats.guessed_p_value, guesses, curve),
        observations=scores.observations,
        no_estimate="The scores of one run may be dependent.",
    )
    rows = NamedBound("f-DP(one-run)", bound, None), NamedBound("(eps,delta)(one-run)", universal, None)
    return MethodComparison(scores.observations, claim.delta, confidence, rows, result)


def bound_of_runs(scores: RunScores) -> stats.Bound:
    """Return the bound from one score per training run, on which the verdict is based."""
    inference, rule = _method_of_runs(scores)
    return stats.lower_bound(
        scores.observations,
        delta=scores.values["delta"],
        confidence=scores.audit["confidence"],
        tradeoff=scores.curve,
        inference=inference,
        threshold=rule,
    )


def _method_of_runs(scores: RunScores) -> tuple[Any, stats.ThresholdRule]:
    return stats.default_method(
        scores.observations, scores.curve, None, THRESHOLD_RULES[scores.audit.get("threshold")]
    )


def _compare_runs(scores: RunScores) -> MethodComparison:
    """Return the bounds from one score per training run, and the verdict if there is a claim.

    A score is an observation of a whole training run, so its trade-off curve is composed over all steps.
    The audit is blind if not even an attack that errs only on failed trials could have refuted the claim.
    """
    claim, result, confidence = scores.claim, None, scores.audit["confidence"]
    if claim is not None:
        rule = THRESHOLD_RULES[scores.audit.get("threshold")]
        result = stats.audit_recorded(
            scores.observations, claim=claim, confidence=confidence, tradeoff=scores.curve, threshold=rule
        )
        # each score is of a whole training run, made here
        result = replace(result, not_covered=())
        if scores.values["num_failed"] and not result.refuted:
            is_blind = bound_of_runs(scores.flawless).parameter <= result.hypothesis.parameter
            result = replace(result, is_blind=is_blind)
    return examine(
        scores.observations,
        delta=scores.values["delta"],
        confidence=confidence,
        claim=claim,
        tradeoff=None if claim is None else scores.curve,
        names=scores.audit["methods"],
        result=result,
    )


def largest_epsilon(scores: RunScores) -> float:
    """Return the epsilon that the same method would report for an attack that errs only on failed trials."""
    if scores.values["num_failed"]:
        return bound_of_runs(scores.flawless).epsilon
    query = BoundQuery(scores.curve, scores.values["delta"], 1 - scores.audit["confidence"])
    perfect = stats.AuditDesign.of(scores.observations, *_method_of_runs(scores), query).max_refutable
    return scores.curve.epsilon(perfect, scores.values["delta"])


def plain_values(scores: RunScores, comparison: MethodComparison) -> dict[str, Any]:
    """Return verdict, bounds and power of a run as plain values."""
    values = comparison.to_dict()
    values["notes"] += _notes(scores, comparison)
    if scores.are_guessed:
        for key in ("refuted", "diagnosis", "estimate", "likely_causes", "scores_of"):
            del values[key]
        del values["claim"]["parts"]
    elif scores.values["mode"] == "end-to-end":
        looser = stats.one_run_fdp_bound(
            scores.guesses,
            tradeoff=scores.curve,
            delta=scores.values["delta"],
            confidence=scores.audit["confidence"],
        )
        values["one_run_bound"] = looser.to_dict()
    elif comparison.result is None:
        delta = scores.values["delta"]
        text = f"clipping without noise: no privacy, epsilon = inf at delta = {delta:g}"
        nothing = {
            "summary": text,
            "epsilon": stats.plain(math.inf),
            "delta": delta,
            "parameter": stats.plain(math.inf),
        }
        values |= {"claim": nothing, "bound": bound_of_runs(scores).to_dict()}
    if scores.values.get("stopped_early") is True:
        values["estimate"] = None
    return values


def _notes(scores: RunScores, comparison: MethodComparison) -> list[str]:
    """Return sentences on what the bounds alone do not show."""
    if comparison.result is None:
        return [
            "Without noise nothing is claimed and nothing can be refuted: the bound is a lower bound on the "
            "privacy loss."
        ]
    if comparison.result.is_blind:
        return [
            "Too many trials failed: even an attack without a single error on the others could not have "
            "refuted the claim."
        ]
    if scores.values.get("num_failed") and not comparison.result.refuted:
        return ["The stated power assumes that no trial fails."]
    if scores.values.get("stopped_early") is True:
        return [
            "The run was stopped at its first violation. The bound behind the verdict accounts for this; "
            "bounds from counts, estimates and tests of the noise do not and are omitted."
        ]
    if scores.is_coupled:
        return [
            "Gradients of input canaries overlap: a score depends on which other canaries were present. The "
            "bound behind the verdict accounts for this; bounds from counts do not and are omitted."
        ]
    return []
