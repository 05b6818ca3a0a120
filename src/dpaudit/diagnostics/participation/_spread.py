"""Whether batch sizes and participations vary as those of Poisson sampling do.

Two Binomial numbers of the same rate, given their sum, are hypergeometric: the rate plays no part. So
things are compared in pairs, by their squared difference, and the test is valid whatever the rate is.
"""

from __future__ import annotations

import math

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import chance
from dpaudit.diagnostics.participation._draws import far_from_mean, hypergeometric
from dpaudit.diagnostics.participation._record import ParticipationRecord
from dpaudit.stats._types import FloatArray, IntArray

__all__ = ["batch_sizes", "participation_counts"]

_MOST = 2**15


def batch_sizes(record: ParticipationRecord) -> Check | None:
    """Batch sizes: fixed ones do not vary at all."""
    return _spread("batch-sizes", "Batch sizes vary", np.asarray(record.sizes), record.num_examples)


def participation_counts(record: ParticipationRecord) -> Check | None:
    """How often each example took part: equally often in shuffled epochs."""
    order = chance(4).permutation(record.num_examples)
    text = "The participations of examples vary"
    return _spread("participation-counts", text, record.counts[order], record.num_steps)


def _spread(name: str, text: str, counts: IntArray, trials: int) -> Check | None:
    pairs = counts[: counts.size // 2 * 2].reshape(-1, 2)[:_MOST]
    if len(pairs) == 0:
        return None
    sums, how_often = np.unique(pairs.sum(axis=1), return_counts=True)
    seen = float(((pairs[:, 0] - pairs[:, 1]) ** 2).sum())
    squares, chances = zip(*(_squared_difference(int(total), trials) for total in sums), strict=True)
    means = np.array([row @ weight for row, weight in zip(squares, chances, strict=True)])
    seconds = np.array([row**2 @ weight for row, weight in zip(squares, chances, strict=True)])

    def log_mgf(slopes: FloatArray) -> FloatArray:
        parts = [_log_mgf(slopes, row, weight) for row, weight in zip(squares, chances, strict=True)]
        value: FloatArray = np.asarray(parts).T @ how_often.astype(np.float64)
        return value

    expected = float(how_often @ means)
    ratio = math.sqrt(seen / expected) if expected > 0 else 1.0
    return Check(
        name=name,
        p_value=far_from_mean(log_mgf, seen, float(how_often @ (seconds - means**2))),
        sentence=f"{text} {ratio:.2g} times as much as those of Poisson sampling.",
        estimate=ratio,
    )


def _squared_difference(total: int, trials: int) -> tuple[FloatArray, FloatArray]:
    """Of two Binomial numbers with this sum: the values, and how likely each is."""
    values, chances = hypergeometric(2 * trials, total, trials)
    squares: FloatArray = ((2 * values - total) ** 2).astype(np.float64)
    return squares, chances


def _log_mgf(slopes: FloatArray, values: FloatArray, chances: FloatArray) -> FloatArray:
    """The logarithm of the mean of exp(slope x value)."""
    logs = slopes[:, None] * values + np.log(chances)
    top = logs.max(axis=1)
    result: FloatArray = top + np.log(np.exp(logs - top[:, None]).sum(axis=1))
    return result
