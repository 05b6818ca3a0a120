"""Where a rule puts the threshold, simulated: an audit has the power of the thresholds that it uses.

A threshold chosen on scores varies with them. Its distribution is simulated with the scores of an
:class:`Attack`; the probability of refuting a claim is then computed exactly at each simulated threshold. The
random numbers are the same in every call, so that power is a function of the design and the leak.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray
from dpaudit.stats._counts import ErrorCounts
from dpaudit.stats.inference import BoundQuery, ClopperPearson
from dpaudit.stats.thresholds._base import least_balanced_error, num_candidates, smooth
from dpaudit.stats.tradeoffs._attack import Attack

_RUNS = 64  # the power at a simulated threshold varies little
_NEAR = 0.01  # relative distance of the points that determine the slope of a curve


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
    found = np.clip(1 - fnr / np.maximum(before, 1e-300), 0.0, 1.0)
    misses = np.empty(fnr.shape, dtype=np.int64)
    left = np.full(runs, sizes[1])
    for column in range(above.size):
        left = left - rng.binomial(left, found[:, column])
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
