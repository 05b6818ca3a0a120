"""The interface of threshold rules, the search for a threshold among scores, and where it ends up.

A threshold chosen on scores varies with them. For the power of an audit, its distribution is simulated with
the scores of an :class:`Attack`; the probability of refuting a claim is then computed at each simulated
threshold. The random numbers are the same in every call: power is a function of the design and the leak.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from scipy import special

from dpaudit._types import BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.errors import InputError
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats._observations import Observations, is_on_disk, loaded
from dpaudit.stats._serialization import Serializable
from dpaudit.stats.inference import (
    BoundQuery,
    ClopperPearson,
    CountInference,
    ExactInference,
    Inference,
    ThresholdResult,
)
from dpaudit.stats.tradeoffs._attack import Attack

if TYPE_CHECKING:
    from dpaudit.stats._power import AuditDesign

_RUNS = 64  # the power at a simulated threshold varies little
_NEAR = 0.01  # relative distance of the points that determine the slope of a curve
_SPLIT = 8  # parts into which a block that may contain the best threshold is split


class ThresholdRule(Serializable, ABC):
    """A rule for the threshold above which a score is called "present", and for the scores to count."""

    # Whether a bound under this rule has a known error rate.
    valid: ClassVar[bool] = True

    @abstractmethod
    def apply(self, observations: Observations, inference: Inference, query: BoundQuery) -> ThresholdResult:
        """Choose the threshold, count errors and return the result of the inference."""

    def counted(self, size: int) -> int:
        """Return how many of ``size`` scores per side, or of ``size`` shared steps, are counted."""
        return size

    def error(self, error: float, num_absent: int) -> float:
        """Return the share of ``error`` available to one threshold."""
        del num_absent
        return error

    def largest_bound(self, inference: ExactInference, counts: ErrorCounts, query: BoundQuery) -> float:
        """Return the bound of an attack without errors; ``query`` has the error rate of one threshold."""
        return inference.parameter(counts, query)

    def operating_points(self, attack: Attack, design: AuditDesign) -> tuple[FloatArray, FloatArray]:
        """Return equally likely pairs of fpr and fnr at which the rule may put the threshold.

        The default is the point with the smallest balanced error.
        """
        del design
        return as_points(attack.balanced())

    def refuting_limits(
        self, claimed: float, sizes: ErrorCounts, inference: ExactInference, query: BoundQuery
    ) -> tuple[IntArray, ...]:
        """Return the most errors with which each threshold of a rule with several refutes ``claimed``.

        The result is empty if the rule has one threshold. ``query`` has the error rate of one of several.
        """
        del claimed, sizes, inference, query
        return ()

    def detection_rate(self, attack: Attack, limits: tuple[IntArray, ...], sizes: ErrorCounts) -> float:
        """Return how often any of several thresholds refutes, given :meth:`refuting_limits`."""
        raise NotImplementedError  # only called if there are limits


def as_points(rates: tuple[float, float]) -> tuple[FloatArray, FloatArray]:
    """Return a single point."""
    return np.asarray(rates[:1]), np.asarray(rates[1:])


def unsupported(rule: ThresholdRule, inference: Inference, *expected: type) -> InputError:
    """Return the error for an inference that the rule does not support."""
    names = " or ".join(kind.__name__ for kind in expected)
    return InputError(f"Expected inference of type {names} with {rule!r}, got {inference!r}.")


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
        absent = _sorted("without_canary", observations.without_canary)
        present = _sorted("with_canary", observations.with_canary)
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
        search = _ThresholdSearch(self, inference, query)
        ranks = np.unique(np.linspace(0, self.absent.size - 1, 256).astype(np.int64))
        starts, ends = ranks[:-1], ranks[1:]
        search.evaluate(ranks)
        while starts.size:
            keep = search.may_improve(ends, starts) & (ends - starts > 1)
            cuts = _cut(starts[keep], ends[keep])
            starts, ends = cuts[:, :-1].reshape(-1), cuts[:, 1:].reshape(-1)
            search.evaluate(np.unique(cuts[:, 1:-1]))
        return search.best


def _sorted(name: str, scores: ScoreArray) -> ScoreArray:
    if not is_on_disk(scores):
        return np.sort(scores, axis=None)
    flat = loaded(name, scores).reshape(-1)
    flat.sort()  # in place: there may be many
    return flat


class _ThresholdSearch:
    """A search that keeps the rank of the best threshold so far."""

    def __init__(self, roc: EmpiricalROC, inference: CountInference, query: BoundQuery) -> None:
        self._roc, self._inference, self._query = roc, inference, query
        self.best, self._value = roc.absent.size - 1, -np.inf

    def evaluate(self, ranks: IntArray) -> None:
        """Update the best threshold from these ranks, calling the costly ``rank`` for few of them."""
        if not ranks.size:
            return
        limits = self._inference.limit(*self._roc.errors(ranks), self._roc.sizes, self._query)
        for chosen in (limits == limits.max(), limits > self._value):
            # the first choice, which is small, raises the bar for the second
            self._take_best(ranks[chosen & (limits > self._value)])

    def _take_best(self, ranks: IntArray) -> None:
        if not ranks.size:
            return
        values = self._inference.rank(*self._roc.errors(ranks), self._roc.sizes, self._query)
        top = int(values.argmax())
        if values[top] > self._value:
            self.best, self._value = int(ranks[top]), float(values[top])

    def may_improve(self, fewest_fp: IntArray, fewest_fn: IntArray) -> BoolArray:
        """Return whether a block with these ends may contain a better threshold."""
        fp, fn = self._roc.errors(fewest_fp)[0], self._roc.errors(fewest_fn)[1]
        limits = self._inference.limit(fp, fn, self._roc.sizes, self._query)
        return np.asarray(limits > self._value)


def _cut(starts: IntArray, ends: IntArray) -> IntArray:
    """Return the ends of the parts of each block, one row per block; short blocks repeat an end."""
    shares = np.arange(_SPLIT + 1)
    return starts[:, None] + (ends - starts)[:, None] * shares // _SPLIT


def simulated_roc(
    attack: Attack, above: IntArray, sizes: tuple[int, int], runs: int, rng: np.random.Generator
) -> tuple[FloatArray, IntArray]:
    """Draw the fpr and the false negatives at absent scores of given ranks; arrays are runs x ranks.

    ``above`` is how many of the ``sizes[0]`` absent scores are higher, in ascending order: the fpr at that
    score is an order statistic of uniform numbers, whatever the distribution of scores.
    """
    gaps = np.diff(np.concatenate([[-1], above, [sizes[0]]]))
    spacings = np.cumsum(rng.gamma(gaps, size=(runs, gaps.size)), axis=1)
    fpr = spacings[:, :-1] / spacings[:, -1:]
    fnr = np.minimum.accumulate(np.clip(attack.fnr(fpr), 0.0, 1.0), axis=1)
    before = np.concatenate([np.ones((runs, 1)), fnr[:, :-1]], axis=1)
    detected = np.clip(1 - fnr / np.maximum(before, 1e-300), 0.0, 1.0)
    misses = np.empty(fnr.shape, dtype=np.int64)
    left = np.full(runs, sizes[1])
    for column in range(above.size):
        left = left - rng.binomial(left, detected[:, column])
        misses[:, column] = left
    return fpr, misses


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
