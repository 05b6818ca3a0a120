"""Threshold rules that choose on scores: on a part that is held out, on earlier steps, on the counted scores.

:class:`SameData` is the paper's practice of choosing on the counted data, which gives no valid bound.

A threshold chosen on scores varies with them. For the power of an audit, its distribution is simulated with
the scores of an :class:`Attack`; the probability of refuting a claim is then computed at each simulated
threshold. The random numbers are the same in every call: power is a function of the design and the leak.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.errors import InputError
from dpaudit.stats._counts import ErrorCounts, StepErrors, StepScores
from dpaudit.stats._observations import CoinSteps, Observations
from dpaudit.stats.inference import (
    Betting,
    BoundQuery,
    ClopperPearson,
    CountInference,
    Inference,
    StepBets,
    ThresholdResult,
    far_rates,
)
from dpaudit.stats.thresholds._order_statistics import simulated_roc
from dpaudit.stats.thresholds._rules import ThresholdRule, unsupported
from dpaudit.stats.tradeoffs import Attack

if TYPE_CHECKING:
    from dpaudit.stats._power import AuditDesign

# an assumption, which docs/verdicts.md explains
_SAME_DATA = "the error rate is unknown: the threshold was chosen on the counted data"
_CANDIDATES = 64  # few, so that the choice follows the shape of the scores rather than their noise
_RUNS = 64  # the power at a simulated threshold varies little
_NEAR = 0.01  # relative distance of the points that determine the slope of a curve
_SPLIT = 8  # parts into which a block that may contain the best threshold is split


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

    label = "held out"

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
        observations = observations.in_memory()
        rng = None if the_first else np.random.default_rng(self.seed)
        if (steps := observations.steps) is not None:
            held = self._held_mask(rng, observations.num_steps)
            return _split(observations, held[steps.without_canary], held[steps.with_canary])
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
            raise InputError("HeldOut() needs at least 2 scores (or steps) per side, got 1.")
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
    absent, present = observations.without_canary, observations.with_canary
    rest: dict[str, Any] = {"with_canary": present[~with_held], "without_canary": absent[~without_held]}
    rest |= {"with_ids": None, "without_ids": None}  # counts need none
    if observations.steps is not None:
        if with_held.all() or without_held.all():
            raise InputError("HeldOut() leaves no scores to count on one side; record more steps.")
        left = observations.steps.with_canary[~with_held], observations.steps.without_canary[~without_held]
        steps = np.unique(np.concatenate(left), return_inverse=True)[1]
        rest["steps"] = CoinSteps(steps[: left[0].size], steps[left[0].size :])
    held = absent[without_held].reshape(-1), present[with_held].reshape(-1)
    return *held, replace(observations, **rest)


@dataclass(frozen=True)
class Predictable(ThresholdRule):
    """For betting, one threshold per step, which minimizes the balanced error of the earlier steps.

    No bet is placed on the first step, which has no earlier steps.
    """

    label = "predictable"

    def counted(self, size: int) -> int:
        return max(size - 1, 1)

    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        if not isinstance(inference, Betting):
            raise unsupported(self, inference, Betting)
        steps = StepScores.of(observations)
        if steps.num_steps < 2:
            raise InputError(f"{self!r} needs at least 2 steps, got {steps.num_steps}.")
        threshold, errors, bets = predictable_bets(steps, inference, query)
        if not errors.num_absent.any() or not errors.num_present.any():
            raise InputError(
                f"{self!r}, which chooses thresholds on earlier steps, needs scores with and without the "
                "canary after the first step; record more steps."
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
    assumption: ClassVar[str | None] = _SAME_DATA

    label = "same data"

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


def least_balanced_error(absent: ScoreArray, present: ScoreArray) -> float:
    """Return the best of a few quantiles of all scores, smoothed so that the choice does not follow noise."""
    if not absent.size or not present.size:
        return 0.0
    scores = np.concatenate([absent, present])
    candidates = np.quantile(scores, np.linspace(0, 1, num_candidates(scores.size) + 2)[1:-1])
    fp = 1 - np.searchsorted(np.sort(absent), candidates, side="right") / absent.size
    fn = np.searchsorted(np.sort(present), candidates, side="right") / present.size
    errors = smooth(fp + fn)
    return float(candidates[int(errors.argmin())])


def num_candidates(num_scores: int) -> int:
    """Return the number of quantiles to compare: odd, to include the median."""
    return int(np.clip(np.sqrt(num_scores), 1, 65)) // 2 * 2 + 1


def smooth(values: FloatArray) -> FloatArray:
    """Return a moving average over a sixth of the values, to stabilize the extremum of a noisy curve."""
    half = values.size // 12
    if half == 0:
        return values
    padded = np.pad(values, half, mode="edge")
    return np.convolve(padded, np.full(2 * half + 1, 1 / (2 * half + 1)), mode="valid")


@dataclass(frozen=True)
class EmpiricalROC:
    """The errors with each absent score as the threshold; no other threshold can be better.

    (Between two absent scores, a higher threshold only adds false negatives.)
    """

    absent: ScoreArray
    present: ScoreArray
    sizes: ErrorCounts

    @classmethod
    def of(cls, observations: Observations) -> EmpiricalROC:
        """Sort both sides once."""
        observations = observations.in_memory()
        absent, present = (
            np.sort(side, axis=None) for side in (observations.without_canary, observations.with_canary)
        )
        return cls(absent, present, ErrorCounts.perfect(absent.size, present.size))

    def errors(self, ranks: IntArray) -> tuple[IntArray, IntArray]:
        """Return false positives and false negatives at the absent scores of these ranks."""
        thresholds = self.absent[ranks]
        return (
            self.absent.size - np.searchsorted(self.absent, thresholds, side="right"),
            np.searchsorted(self.present, thresholds, side="right"),
        )

    def best(self, inference: CountInference, query: BoundQuery) -> int:
        """Return the rank of the best threshold, by branch and bound.

        Along the curve, false positives decrease and false negatives increase, so a block of thresholds is
        no better than the fewest of both at its ends. Blocks that cannot beat the best are dropped.
        """
        best, highest = self.absent.size - 1, -np.inf
        ranks = np.unique(np.linspace(0, self.absent.size - 1, 256).astype(np.int64))
        starts, ends = ranks[:-1], ranks[1:]
        while ranks.size:
            limits = inference.limit(*self.errors(ranks), self.sizes, query)
            for chosen in (limits == limits.max(), limits > highest):
                # the first choice, which is small, raises the bar for the second; ``rank`` is costly
                candidates = ranks[chosen & (limits > highest)]
                if candidates.size:
                    values = inference.rank(*self.errors(candidates), self.sizes, query)
                    top = int(values.argmax())
                    if values[top] > highest:
                        best, highest = int(candidates[top]), float(values[top])
            fewest = self.errors(ends)[0], self.errors(starts)[1]
            is_open = (inference.limit(*fewest, self.sizes, query) > highest) & (ends - starts > 1)
            # short blocks repeat an end
            lengths = (ends - starts)[is_open, None]
            cuts = starts[is_open, None] + lengths * np.arange(_SPLIT + 1) // _SPLIT
            starts, ends = cuts[:, :-1].reshape(-1), cuts[:, 1:].reshape(-1)
            ranks = np.unique(cuts[:, 1:-1])
        return best


def best_bound_rates(
    attack: Attack, sizes: tuple[int, int], num_ranks: int, query: BoundQuery
) -> tuple[FloatArray, FloatArray]:
    """Simulate the rates at the threshold with the best bound on ``sizes`` absent and present scores."""
    rng = np.random.default_rng(0)
    above = np.unique(np.linspace(0, sizes[0] - 1, num_ranks).astype(np.int64))
    fpr, misses = simulated_roc(attack, above, sizes, _RUNS, rng)
    values = ClopperPearson().limit(above[None, :], misses, ErrorCounts.perfect(*sizes), query)
    best = np.asarray([row.argmax() for row in map(smooth, values)])
    chosen = fpr[np.arange(_RUNS), best]
    # the threshold is halfway to the next higher score of either side
    slope = (attack.fnr(chosen * (1 - _NEAR)) - attack.fnr(chosen)) / (_NEAR * chosen)
    gaps = rng.exponential(size=_RUNS) / (sizes[0] + sizes[1] * np.maximum(slope, 0.0))
    chosen = np.maximum(chosen - gaps / 2, chosen / 2)
    has_bound = values.max(axis=1) > 0
    if not has_bound.all():
        chosen = np.where(has_bound, chosen, least_error_rates(attack, sizes)[0])
    return chosen, attack.fnr(chosen)


def least_error_rates(attack: Attack, sizes: tuple[int, int]) -> tuple[FloatArray, FloatArray]:
    """Simulate the rates at the threshold of :func:`least_balanced_error` on absent and present scores."""
    rng = np.random.default_rng(1)
    # the choice on few scores is made on simulated scores themselves
    choose = _on_scores if sum(sizes) <= 2048 else _on_counts
    return attack.rates(choose(attack, sizes, rng))


def _on_scores(attack: Attack, sizes: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    absent = rng.standard_normal((_RUNS, sizes[0]))
    present = attack.present_scores(rng.random((_RUNS, sizes[1])))
    return np.asarray([least_balanced_error(*pair) for pair in zip(absent, present, strict=True)])


def _on_counts(attack: Attack, sizes: tuple[int, int], rng: np.random.Generator) -> FloatArray:
    """Choose among the expected quantiles: those of many scores hardly vary, unlike the errors."""
    levels = np.linspace(0, 1, num_candidates(sum(sizes)) + 2)[1:-1]
    candidates = attack.pooled_quantiles(levels, sizes[1] / sum(sizes))
    below = special.ndtr(candidates), attack.rates(candidates)[1]
    shares = [
        np.cumsum(rng.multinomial(size, _cells(probability), _RUNS), axis=1)[:, :-1] / size
        for size, probability in zip(sizes, below, strict=True)
    ]
    return np.asarray([candidates[int(smooth(row).argmin())] for row in shares[1] - shares[0]])


def _cells(below: FloatArray) -> FloatArray:
    """Return the probabilities of the cells between candidates."""
    cells = np.maximum(np.diff(np.concatenate([[0.0], below, [1.0]])), 0.0)
    return np.asarray(cells / cells.sum())


def step_rates(attack: Attack, sizes: tuple[int, int], num_steps: int) -> tuple[FloatArray, FloatArray]:
    """Return the mean rates in each step if its threshold is chosen on all earlier steps and one before.

    ``sizes`` are the numbers of absent and present scores per step.
    """
    # rates are interpolated between a few numbers of past steps
    past = np.unique(np.geomspace(1, num_steps, 7).astype(np.int64))
    rates = [least_error_rates(attack, (int(n) * sizes[0], int(n) * sizes[1])) for n in past]
    means = np.asarray([[float(side.mean()) for side in pair] for pair in rates])
    numbers = np.log(np.arange(1, num_steps + 1))
    fpr, fnr = (np.interp(numbers, np.log(past), column) for column in means.T)
    return fpr, fnr
