"""Whether batch sizes and participations vary as those of Poisson sampling do.

Two Binomial numbers of the same rate, given their sum, are hypergeometric: the rate plays no part. So
things are compared in pairs, and the test is exact whatever the rate is.
"""

from __future__ import annotations

import numpy as np

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import chance, uniform
from dpaudit.diagnostics.participation._draws import places
from dpaudit.diagnostics.participation._rate import drawn_rate
from dpaudit.diagnostics.participation._record import ParticipationRecord
from dpaudit.stats._types import IntArray

__all__ = ["batch_sizes", "participation_counts"]

_MOST = 2**15


def batch_sizes(record: ParticipationRecord) -> Check | None:
    """Batch sizes: fixed ones do not vary at all."""
    return _spread(record, "batch-sizes", "Batch sizes vary", np.asarray(record.sizes), record.num_examples)


def participation_counts(record: ParticipationRecord) -> Check | None:
    """How often each example took part: equally often in shuffled epochs."""
    order = chance(4).permutation(record.num_examples)
    text = "The numbers of batches that examples are in vary"
    return _spread(record, "participation-counts", text, record.counts[order], record.num_steps)


def _spread(record: ParticipationRecord, name: str, text: str, counts: IntArray, trials: int) -> Check | None:
    pairs = counts[: counts.size // 2 * 2].reshape(-1, 2)[:_MOST]
    if len(pairs) == 0:
        return None
    coins = chance(5).random(len(pairs))
    sums = pairs.sum(axis=1)
    where = places(2 * trials, sums, np.full(len(pairs), trials), pairs[:, 0], coins)
    rate = drawn_rate(record)
    expected = np.sqrt(trials * rate * (1 - rate))
    # half the mean squared difference of a pair is the variance of both
    ratio = (
        float(np.sqrt(0.5 * ((pairs[:, 0] - pairs[:, 1]) ** 2).mean()) / expected) if expected > 0 else 1.0
    )
    return Check(
        name=name,
        p_value=uniform(np.abs(2 * where - 1)),
        sentence=f"{text} {ratio:.2g} times as much as those of Poisson sampling.",
        estimate=ratio,
    )
