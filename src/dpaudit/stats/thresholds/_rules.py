"""Threshold rules: fixed before seeing the data, chosen on a part of them, or corrected for the choice.

:class:`SameData` is the exception: the paper's practice of choosing on the counted data, which gives no
valid bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, ScoreArray
from dpaudit.errors import InputError
from dpaudit.stats._counts import StepErrors, StepScores
from dpaudit.stats._observations import Observations, chunks, is_on_disk, require_finite
from dpaudit.stats._serialization import NamedPart
from dpaudit.stats.inference import (
    Betting,
    BoundQuery,
    ClopperPearson,
    CountInference,
    Inference,
    ThresholdResult,
)
from dpaudit.stats.inference._betting import StepBets
from dpaudit.stats.inference._tails import far_rates
from dpaudit.stats.thresholds._base import (
    EmpiricalROC,
    ThresholdRule,
    as_points,
    best_bound_rates,
    least_balanced_error,
    least_error_rates,
    smooth,
    unsupported,
)
from dpaudit.stats.tradeoffs import Gaussian
from dpaudit.stats.tradeoffs._attack import Attack

if TYPE_CHECKING:
    from dpaudit.stats._power import AuditDesign

_CANDIDATES = 64  # few, so that the choice follows the shape of the scores rather than their noise


@dataclass(frozen=True)
class Fixed(ThresholdRule):
    """A threshold chosen before seeing the data; 1/2 is the midpoint of normalized white-box scores."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        _validate.finite("threshold", self.threshold)

    @property
    def label(self) -> str:
        return f"fixed {self.threshold:.4g}"

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        return inference.at_threshold(observations, self.threshold, query)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        if design.normalized and attack.rates_at is not None:
            return as_points(attack.rates_at(self.threshold))
        return super().operating_points(attack, design)


@dataclass(frozen=True)
class Optimal(ThresholdRule):
    """The best threshold for (eps, delta)-DP on normalized scores with this noise (appendix C.1).

    By the paper's condition, the log-likelihood ratio at the threshold equals the Gaussian's epsilon at
    delta, so the threshold is 1/2 + noise^2 epsilon.
    """

    noise: float

    def __post_init__(self) -> None:
        _validate.positive("noise", self.noise)

    @property
    def label(self) -> str:
        return "optimal"

    def threshold(self, delta: float) -> float:
        """Return the threshold, w in the paper."""
        if delta == 0:
            raise InputError(
                "Expected delta > 0 with Optimal(), got delta=0: its threshold is then infinite."
            )
        return 0.5 + self.noise**2 * Gaussian().epsilon(1 / self.noise, delta)

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        return inference.at_threshold(observations, self.threshold(query.delta), query)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        fixed = Fixed(self.threshold(design.query.delta))
        # this rule is meaningful for normalized scores only
        return fixed.operating_points(attack, replace(design, normalized=True))


@dataclass(frozen=True)
class HeldOut(ThresholdRule):
    """A threshold chosen on a random ``fraction`` of the data (whole steps, if any); the rest is counted.

    With betting, the first part is held out instead, because a bet may depend only on the past.
    """

    fraction: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        _validate.fraction("fraction", self.fraction)
        _validate.integer("seed", self.seed, low=0)

    @property
    def label(self) -> str:
        return "held out"

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        betting = isinstance(inference, Betting)
        absent, present, rest = self.split(observations, the_first=betting)
        best = least_balanced_error(absent, present) if betting else choose(absent, present, query)
        return inference.at_threshold(rest, best, query)

    def counted(self, size: int) -> int:
        return size - self._num_held(size)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        if isinstance(design.inference, Betting):
            return least_error_rates(attack, design.held_out)
        return best_bound_rates(attack, design.held_out, _CANDIDATES, design.query)

    def split(
        self, observations: Observations, *, the_first: bool = False
    ) -> tuple[ScoreArray, ScoreArray, Observations]:
        """Return the absent and present scores to choose on, and the observations to count."""
        if observations.is_stepped:
            observations = observations.in_memory()
        rng = None if the_first else np.random.default_rng(self.seed)
        if observations.with_steps is not None and observations.without_steps is not None:
            held = self._held_mask(rng, observations.num_steps)
            return _split(observations, held[observations.without_steps], held[observations.with_steps])
        with_held = self._held_mask(rng, len(observations.with_canary))
        stepped = observations.is_stepped
        without_held = with_held if stepped else self._held_mask(rng, len(observations.without_canary))
        return _split(observations, without_held, with_held)

    def _held_mask(self, rng: np.random.Generator | None, size: int) -> BoolArray:
        """Return a mask of the held-out indices among ``size``."""
        order = np.arange(size) if rng is None else rng.permutation(size)
        held = np.zeros(size, dtype=np.bool_)
        held[order[: self._num_held(size)]] = True
        return held

    def _num_held(self, size: int) -> int:
        if size < 2:
            raise InputError("Expected at least 2 scores (or steps) per side with HeldOut(), got 1.")
        return min(max(round(self.fraction * size), 1), size - 1)


def choose(absent: ScoreArray, present: ScoreArray, query: BoundQuery) -> float:
    """Return the threshold with the best bound on these scores or, if all are 0, with the fewest errors."""
    if not absent.size or not present.size:
        return least_balanced_error(absent, present)
    roc = EmpiricalROC.of(Observations(with_canary=present, without_canary=absent))
    ranks = np.unique(np.linspace(0, roc.absent.size - 1, _CANDIDATES).astype(np.int64))
    values = ClopperPearson().rank(*roc.errors(ranks), roc.sizes, query)
    if not values.max() > 0:
        return least_balanced_error(roc.absent, roc.present)
    values = smooth(values)
    best = np.flatnonzero(values >= values.max())
    return _midpoint_above(roc, int(ranks[best[best.size // 2]]))


def _midpoint_above(roc: EmpiricalROC, rank: int) -> float:
    """Return the midpoint between this absent score and the next higher score of either side."""
    score = float(roc.absent[rank])
    above = [
        float(side[index])
        for side in (roc.absent, roc.present)
        if (index := int(np.searchsorted(side, score, side="right"))) < side.size
    ]
    return (score + min(above)) / 2 if above else score


def _split(
    observations: Observations, without_held: BoolArray, with_held: BoolArray
) -> tuple[ScoreArray, ScoreArray, Observations]:
    """Separate the held-out scores from the rest, renumbering the steps of the rest, if any."""
    absent, absent_rest = _split_side("without_canary", observations.without_canary, without_held)
    present, present_rest = _split_side("with_canary", observations.with_canary, with_held)
    rest: dict[str, Any] = {"with_canary": present_rest, "without_canary": absent_rest}
    rest |= {"with_ids": None, "without_ids": None}  # counts need none
    if observations.with_steps is not None and observations.without_steps is not None:
        if with_held.all() or without_held.all():
            raise InputError(
                "Expected enough steps for HeldOut() to leave scores to count on both sides, got too few."
            )
        steps_left = observations.with_steps[~with_held], observations.without_steps[~without_held]
        steps = np.unique(np.concatenate(steps_left), return_inverse=True)[1]
        rest |= {"with_steps": steps[: steps_left[0].size], "without_steps": steps[steps_left[0].size :]}
    return absent.reshape(-1), present.reshape(-1), replace(observations, **rest)


def _split_side(name: str, scores: ScoreArray, held: BoolArray) -> tuple[ScoreArray, ScoreArray]:
    """Return the scores that are held out, and the rest; of a file, no further copy is in memory."""
    if not is_on_disk(scores):
        return scores[held], scores[~held]
    number = np.count_nonzero(held)
    halves = np.empty(number, scores.dtype), np.empty(scores.size - number, scores.dtype)
    ends = [0, 0]
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        mask = held[start : start + piece.size]
        for index, chosen in enumerate((piece[mask], piece[~mask])):
            halves[index][ends[index] : ends[index] + chosen.size] = chosen
            ends[index] += chosen.size
    return halves


@dataclass(frozen=True)
class Predictable(ThresholdRule):
    """For betting, one threshold per step, which minimizes the balanced error of the earlier steps.

    No bet is placed on the first step, which has no earlier steps.
    """

    @property
    def label(self) -> str:
        return "predictable"

    def counted(self, size: int) -> int:
        return max(size - 1, 1)

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, Betting):
            raise unsupported(self, inference, Betting)
        steps = StepScores.of(observations)
        if steps.num_steps < 2:
            raise InputError(f"Expected at least 2 steps with {self!r}, got {steps.num_steps}.")
        threshold, errors, bets = predictable_bets(steps, inference, query)
        if not errors.num_absent.any() or not errors.num_present.any():
            raise InputError(
                f"Expected scores with and without the canary after the first step with {self!r}, which "
                "chooses thresholds on earlier steps; record more steps."
            )
        return ThresholdResult(bets.parameter(), threshold, errors.total(), p_value=bets.p_value)


def predictable_bets(
    steps: StepScores, betting: Betting, query: BoundQuery
) -> tuple[float, StepErrors, StepBets]:
    """Bet on all steps but the first, at thresholds from earlier steps; return the last one, too."""
    rates = [far.rate for far in betting.far_guesses(query)]
    thresholds, intervals = _from_earlier_steps(steps, rates)
    errors = steps.errors(thresholds)
    far = [(right[1:], wrong[1:]) for right, wrong in far_rates(steps, errors, intervals)]
    counted = errors.after_first()
    return float(thresholds[-1]), counted, betting.place(counted, query, far)


def _from_earlier_steps(
    steps: StepScores, rates: list[float]
) -> tuple[FloatArray, list[tuple[FloatArray, FloatArray]]]:
    """Return a threshold for each step, and for each rate an interval that few scores of either side leave.

    Absent scores are above its high end at this rate, and present scores below its low end. Both are
    infinite as long as there are too few scores to know.
    """
    thresholds = np.zeros(steps.num_steps)
    intervals = [(np.full(steps.num_steps, -np.inf), np.full(steps.num_steps, np.inf)) for _ in rates]
    step = 1
    while step < steps.num_steps:
        # choose again once there are 1.3 times as many past steps
        until = max(step + 1, int(step * 1.3))
        absent, present = steps.before(step)
        thresholds[step:until] = least_balanced_error(absent, present)
        for rate, (low, high) in zip(rates, intervals, strict=True):
            if rate * min(absent.size, present.size) >= 1:
                low[step:until] = np.quantile(present, rate)
                high[step:until] = np.quantile(absent, 1 - rate)
        step = until
    return thresholds, intervals


@dataclass(frozen=True)
class SameData(ThresholdRule):
    """The maximum over all thresholds on the counted data.

    In simulations with the paper's posterior, a quarter to a half of such bounds were too high, and all of
    them where there was no leak; with Clopper-Pearson, up to an eighth.
    """

    valid: ClassVar[bool] = False

    @property
    def label(self) -> str:
        return "same data"

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, CountInference):
            raise unsupported(self, inference, CountInference)
        roc = EmpiricalROC.of(observations)
        ranks = [roc.best(inference, query)]
        if not inference.rank_is_bound:  # an approximation, which may err in the tails: evaluate others too
            others = np.linspace(0, roc.absent.size - 1, 32).astype(np.int64)
            ranks += np.unique(others).tolist()
        results = [_at_rank(roc, rank, inference, query) for rank in ranks]
        return max(results, key=lambda result: result.parameter)


def _at_rank(roc: EmpiricalROC, rank: int, inference: CountInference, query: BoundQuery) -> ThresholdResult:
    (fp,), (fn,) = roc.errors(np.asarray([rank]))
    counts = replace(roc.sizes, false_positives=int(fp), false_negatives=int(fn))
    return ThresholdResult(inference.parameter(counts, query), float(roc.absent[rank]), counts)


@dataclass(frozen=True, repr=False)
class BestOf(ThresholdRule):
    """The largest bound of several rules that share the error probability: a union bound.

    The first rule is the main one, whose power is stated. ``chosen`` is the rule with the largest bound, in
    results.

    >>> BestOf((Fixed(0.5), HeldOut()), (0.9, 0.1)).label
    'best of fixed 0.5, held out'
    """

    rules: tuple[ThresholdRule | NamedPart, ...]
    shares: tuple[float, ...]
    chosen: ThresholdRule | NamedPart | None = None

    def __post_init__(self) -> None:
        if not self.rules or len(self.rules) != len(self.shares):
            raise InputError(
                f"Expected one share of the error for each rule in BestOf(), got {len(self.rules)} rules and "
                f"{len(self.shares)} shares."
            )
        if min(self.shares) <= 0 or sum(self.shares) > 1 + 1e-9:
            raise InputError(f"Expected positive shares that sum to at most 1, got shares={self.shares}.")
        for rule in self.rules:
            if isinstance(rule, ThresholdRule) and not rule.valid:
                raise InputError(f"Expected rules with a known error rate in BestOf(), got {rule!r}.")

    def __repr__(self) -> str:
        if self.chosen is None:
            return f"BestOf(rules={self.rules!r}, shares={self.shares!r})"
        shared = zip(self.rules, self.shares, strict=True)
        shares = " and ".join(f"{rule!r} with {share:g} of the error" for rule, share in shared)
        return f"{self.chosen!r}, the better of {shares}"

    @property
    def label(self) -> str:
        if self.chosen is None:
            return "best of " + ", ".join(rule.label for rule in self.rules)
        return self.chosen.label

    @property
    def known_rules(self) -> list[ThresholdRule]:
        """All rules; one that was read from a file and is not known raises an ``InputError``."""
        return [_known(rule) for rule in self.rules]

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        rules = self.known_rules
        results = [
            rule.apply(observations, inference, replace(query, error_rate=share * query.error_rate))
            for rule, share in zip(rules, self.shares, strict=True)
        ]
        best = max(range(len(results)), key=lambda index: results[index].parameter)
        p_value = partial(self._p_value, results)
        return replace(results[best], rule=replace(self, chosen=rules[best]), p_value=p_value)

    def _p_value(self, results: Sequence[ThresholdResult], claimed: float) -> float:
        """Return the smallest p-value of the rules, each divided by its share of the error."""
        shared = zip(results, self.shares, strict=True)
        p_values = (result.p_value(claimed) / share for result, share in shared if result.p_value is not None)
        return min([1.0, *p_values])


def _known(rule: ThresholdRule | NamedPart) -> ThresholdRule:
    if isinstance(rule, NamedPart):
        raise InputError(f"Expected a rule that chooses a threshold, such as Fixed(0.5), got {rule!r}.")
    return rule
