"""The analysis of a run from its stored scores, with the methods that its config implies.

:class:`StoredScores` reads the scores; :func:`analyze` computes all bounds and the verdict from them, as the
run did at its end. Needs neither torch nor the data of the run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpaudit import canaries
from dpaudit._io import read_array
from dpaudit._provenance import digest
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.diagnostics._diagnosis import share_error
from dpaudit.errors import InputError
from dpaudit.experiments._black_box_analysis import ManyRunsAnalysis, OneRunAnalysis, claim_values, no_claim
from dpaudit.methods import MethodComparison, examine
from dpaudit.recording._whole_run import WHOLE_RUN_RULE
from dpaudit.stats import (
    SCHEMA_VERSION,
    Betting,
    Bound,
    Guesses,
    Observations,
    Result,
    audit_recorded,
    audit_untuned,
    one_run_fdp_bound,
    split_by_coins,
)

RESULT_SCHEMA: Final = SCHEMA_VERSION
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
_CANARIES: Final[Mapping[str, Callable[..., canaries.GradientCanary]]] = {
    "dirac": canaries.Dirac,
    "constant": canaries.Constant,
    "mixed": canaries.Mixed,
    "mixture": canaries.Mixture,
    "random-direction": canaries.RandomDirection,
}
_BLACK_BOX, _INPUT = "black-box", "input"
_analyses: dict[str, RunAnalysis] = {}


def method_names(
    requested: Collection[str] | None, *, is_coupled: bool, stopped_early: bool
) -> Collection[str] | None:
    """Return the methods, besides that of the verdict, whose bounds are valid; None if all are."""
    if stopped_early:  # the others assume a fixed number of observations
        return ()
    if is_coupled:
        betting = "f-DP(betting)"
        return () if requested is not None and betting not in requested else (betting,)
    return requested


@dataclass(frozen=True, eq=False)
class StoredScores:
    """The scores of a run, as its bounds counted them, and the claim; ``audit`` is a table of its config."""

    arrays: Mapping[str, np.ndarray]
    values: Mapping[str, Any]
    audit: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path, values: Mapping[str, Any], audit: Mapping[str, Any]) -> StoredScores:
        """Read the scores of a run with this result."""
        expected = SCORES_OF_MODES.get(str(values.get("mode")))
        if expected is None:
            raise InputError(f"Expected mode to be one of {', '.join(SCORES_OF_MODES)}.")
        stored = {name: read_array(folder / f"{name}.npy", kinds) for name, kinds in SCORE_FILES.items()}
        for name, array in stored.items():
            if array is None and name in expected:
                raise InputError(
                    f"Expected {folder / name}.npy, from which the numbers of the run follow, but it is "
                    "missing; restore it."
                )
            if array is not None and name not in expected:
                raise InputError(
                    f"Expected no {folder / name}.npy in a run of mode {values['mode']}; remove it."
                )
        arrays = {name: array for name, array in stored.items() if array is not None}
        return cls(arrays, values, audit)

    @cached_property
    def digest(self) -> str:
        """Digest of everything that a bound depends on besides its method."""
        hasher = hashlib.sha256()
        for name, array in self.arrays.items():
            hasher.update(f"{name} {array.dtype.str} {array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).data)
        keys = "mode", "threat_model", "noise_multiplier", "sample_rate", "num_steps", "delta"
        return hasher.hexdigest() + digest([self.canary, [self.values.get(key) for key in keys]])

    @property
    def canary(self) -> Mapping[str, Any]:
        """The table of the canary, which decides what scores count; empty if it is not known."""
        return self.values.get("canary") or self.audit.get("canary") or {}

    @property
    def are_guessed(self) -> bool:
        """Whether there is one score per canary of a final model, and presence is guessed from them."""
        return "scores" in self.arrays and self.values.get("threat_model") == _BLACK_BOX

    @property
    def is_coupled(self) -> bool:
        """Whether a score depends on which other canaries were present."""
        return self.are_subtracted and bool(self.arrays["scores"].shape[1] > 1)

    @property
    def are_subtracted(self) -> bool:
        """Whether the contributions of other canaries, which may overlap, are subtracted from a score."""
        return (self.values["threat_model"], self.values["mode"]) == (_INPUT, "one-run")

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

    @cached_property
    def _gradients(self) -> canaries.GradientCanary | None:
        """The gradient canary whose short variants do not count, if there is one."""
        kind = _CANARIES.get(str(self.canary.get("kind")))
        if kind is None or self.values["mode"] == "paper":
            return None
        return kind(**{name: value for name, value in self.canary.items() if name != "kind"})

    def num_counted(self, num_steps: int) -> int:
        """Return how many of the first steps count for the bound."""
        if not 0 < num_steps <= 10_000_000:  # more are not planned by any run
            raise InputError(f"Expected a number of steps in [1, 10,000,000], got {num_steps!s:.40}.")
        canary = self._gradients
        return num_steps if canary is None else sum(map(canary.is_counted, range(num_steps)))

    @cached_property
    def observations(self) -> Observations:
        """The scores that count for the bound."""
        if "with_canary" in self.arrays:
            present, absent = self.arrays["with_canary"], self.arrays["without_canary"]
            return Observations(with_canary=present, without_canary=absent, scores_of="run")
        present = self.arrays["present"]
        if "log_likelihood_ratios" in self.arrays:
            return Observations.from_presence(self.arrays["log_likelihood_ratios"], present, scores_of="run")
        scores = self.arrays["scores"]
        if scores.ndim != 2:
            raise InputError(f"Expected scores of steps x canaries, got shape {scores.shape}.")
        if self.values["mode"] == "paper":
            return Observations.from_presence(scores, present, normalized=True, paired=True, scores_of="step")
        # as in the score log of a recorder
        if (canary := self._gradients) is not None:
            steps = [index for index in range(len(scores)) if canary.is_counted(index)]
            width = scores.shape[1] - canary.num_excluded(scores.shape[1])
            scores, present = scores[steps, :width], present[steps, :width]
        Observations.from_presence(scores, present)  # raises unless coins are fair and scores finite
        return split_by_coins(scores, present, normalized=True, coupled=self.is_coupled)

    def guesses(self, count: int | None) -> Guesses:
        """Return the guesses on canaries of one run; ``count`` of them, or all."""
        present = self.arrays["present"]
        if "log_likelihood_ratios" in self.arrays:
            return Guesses.at_threshold(self.arrays["log_likelihood_ratios"], present, threshold=0.0)
        return Guesses.from_scores(self.arrays["scores"], present, num_guesses=count or present.size)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunAnalysis:
    """Verdict and bounds that follow from scores and config; ``tests`` is the confidence of tests, if any."""

    claim: Mapping[str, Any]
    bound: Bound
    refutes: bool | None
    confidence: float
    methods: Sequence[Mapping[str, Any]]
    shapes: Mapping[str, Sequence[int]]
    result: Result | None = None
    tests: float | None = None
    is_reversed: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers of this mode."""

    @classmethod
    def of(cls, comparison: MethodComparison, result: Result, **options: Any) -> RunAnalysis:
        """Return the analysis with this verdict and the bounds of all methods."""
        shown = result.claim
        claim = claim_values(shown.summary, shown.epsilon, shown.delta, result.hypothesis.parameter)
        claim["parts"] = [source.to_dict() for source in shown.parts]
        common = _compared(comparison)
        return cls(
            claim=claim, bound=result.bound, refutes=bool(result.refuted), result=result, **common, **options
        )


def _compared(comparison: MethodComparison) -> dict[str, Any]:
    sides = comparison.observations.with_canary, comparison.observations.without_canary
    return {
        "confidence": comparison.confidence,
        "methods": [row.to_dict() for row in comparison.rows],
        "shapes": {"with_canary": list(sides[0].shape), "without_canary": list(sides[1].shape)},
        "is_reversed": comparison.is_reversed,
    }


def analyze(scores: StoredScores) -> RunAnalysis:
    """Compute bounds and verdict as the run did; the latest results are kept in memory."""
    outcome = scores.values.get("stopped_early"), scores.values.get("num_failed")
    key = digest([scores.digest, scores.audit, outcome])
    if key not in _analyses:
        if len(_analyses) >= 256:
            _analyses.clear()
        _analyses[key] = _analyze(scores)
    return _analyses[key]


def _analyze(scores: StoredScores) -> RunAnalysis:
    if scores.values["mode"] == "many-runs":
        return _many_runs(scores)
    if scores.claim is None:
        raise InputError("Expected noise_multiplier to be positive, got 0.")
    if scores.are_guessed:
        return _final_model(scores, scores.claim)
    if scores.values["mode"] == "end-to-end":
        return _whole_run(scores, scores.claim)
    return _steps(scores, scores.claim)


def _steps(scores: StoredScores, claim: Claim) -> RunAnalysis:
    """Return the analysis of an audit of steps, whose verdict rests on the bets of the live bound."""
    table, values = scores.audit, scores.values
    rate = table.get("canary_rate", 1.0)
    curve = None if rate == 1 else SubsampledGaussian(rate, 1)
    level, tests = share_error(1 - table["confidence"], has_bound=True, has_tests=True)
    bets = Betting(
        horizon=scores.num_counted(table.get("first_steps") or values["num_steps"]),
        expected=claim.hypothesis(curve).parameter,
        stop_loss=not scores.are_subtracted,
    )
    result = audit_untuned(scores.observations, claim=claim, confidence=level, tradeoff=curve, inference=bets)
    names = method_names(
        table["methods"], is_coupled=scores.is_coupled, stopped_early=values.get("stopped_early") is True
    )
    comparison = _examined(scores, claim, level, tradeoff=curve, names=names, result=result)
    return RunAnalysis.of(comparison, result, tests=tests)


def _whole_run(scores: StoredScores, claim: Claim) -> RunAnalysis:
    """Return the analysis of an end-to-end audit, with its bound for dependent canaries."""
    table, curve = scores.audit, claim.training
    assert curve is not None  # of a claim about DP-SGD
    level, tests = share_error(1 - table["confidence"], has_bound=True, has_tests=True)
    result = audit_recorded(
        scores.observations, claim=claim, confidence=level, tradeoff=curve, threshold=WHOLE_RUN_RULE
    )
    comparison = _examined(
        scores, claim, level, tradeoff=curve, threshold=0.0, names=table["methods"], result=result
    )
    looser = one_run_fdp_bound(
        scores.guesses(None), tradeoff=curve, delta=claim.delta, confidence=table["confidence"]
    )
    return RunAnalysis.of(comparison, result, tests=tests, more={"one_run_bound": looser.to_dict()})


def _examined(scores: StoredScores, claim: Claim | None, level: float, **options: Any) -> MethodComparison:
    delta = scores.values["delta"]
    return examine(scores.observations, delta=delta, confidence=level, claim=claim, **options)


def _final_model(scores: StoredScores, claim: Claim) -> RunAnalysis:
    """Return the analysis of a final model, with guesses on all of its canaries."""
    guesses = scores.guesses(scores.audit.get("num_guesses"))
    assert claim.training is not None  # of a claim about DP-SGD
    analysis = OneRunAnalysis(
        noise_multiplier=scores.values["noise_multiplier"],
        curve=claim.training,
        delta=claim.delta,
        confidence=scores.audit["confidence"],
    )
    bound, values = analysis.bound(guesses), analysis.recomputable(guesses)
    num_present = int(scores.arrays["present"].sum())
    return RunAnalysis(
        claim=values["claim"],
        bound=bound,
        refutes=bound.parameter > analysis.claimed,
        confidence=analysis.confidence,
        more={"p_value": values["p_value"]},
        methods=values["methods"],
        shapes={"with_canary": [num_present], "without_canary": [guesses.num_canaries - num_present]},
    )


def _many_runs(scores: StoredScores) -> RunAnalysis:
    """Return the analysis of one score per training run; failed ones count as errors."""
    analysis = ManyRunsAnalysis(
        claim=scores.claim,
        delta=scores.values["delta"],
        confidence=scores.audit["confidence"],
        threshold=scores.audit.get("threshold"),
        methods=scores.audit["methods"],
    )
    has_failures = scores.claim is not None and scores.values.get("num_failed")
    comparison = analysis.compare(scores.observations, _flawless(scores) if has_failures else None)
    if comparison.result is not None:
        return RunAnalysis.of(comparison, comparison.result)
    bound, claim = analysis.bound(scores.observations), no_claim(analysis.delta)
    return RunAnalysis(claim=claim, bound=bound, refutes=None, **_compared(comparison))


def _flawless(scores: StoredScores) -> Observations:
    """Return the scores of an attack that errs only on failed trials; raise if their number differs.

    A failed trial has the number next to the lowest score if the canary is present, and next to the highest
    if it is absent.
    """
    present, absent = scores.arrays["with_canary"], scores.arrays["without_canary"]
    every = np.concatenate([present, absent])
    low, high, most = every.min(), every.max(), sys.float_info.max
    lost = (present == low) & (np.nextafter(low, most) in every)
    gained = (absent == high) & (np.nextafter(high, -most) in every)
    count = int(lost.sum() + gained.sum())
    # the score of a diverged model may be the lowest number that there is
    if count != scores.values["num_failed"] and -most < low and high < most:
        raise InputError(
            f"Expected num_failed={scores.values['num_failed']!s:.20} to be {count}, as the scores show."
        )
    return Observations(with_canary=np.where(lost, -1.0, 1.0), without_canary=np.where(gained, 2.0, 0.0))
