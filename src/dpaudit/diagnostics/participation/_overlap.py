"""Whether batches depend on those before."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import any_of
from dpaudit.diagnostics._pairs import products
from dpaudit.diagnostics.participation._draws import at_least, far_from_mean
from dpaudit.diagnostics.participation._record import ParticipationRecord
from dpaudit.stats._types import FloatArray

__all__ = ["batch_overlap", "repeated_batches"]

_CANDIDATES = 32


def batch_overlap(record: ParticipationRecord) -> Check | None:
    """How many examples two consecutive batches share: almost none within a shuffled epoch.

    Given its size, a batch of Poisson sampling is a random set: its overlap with any other is
    hypergeometric, and less spread than a Binomial of the same mean (Hoeffding 1963), which is used here.
    """
    if not record.overlaps:
        return None
    sizes, seen = np.asarray(record.sizes), sum(record.overlaps)
    drawn, shares = sizes[1:], sizes[:-1] / record.num_examples

    def log_mgf(slopes: FloatArray) -> FloatArray:
        value: FloatArray = np.log1p(np.expm1(slopes)[:, None] * shares) @ drawn
        return value

    expected = float(drawn @ shares)
    ratio = seen / expected if expected > 0 else 1.0
    return Check(
        name="batch-overlap",
        p_value=far_from_mean(log_mgf, seen, float(drawn @ (shares * (1 - shares)))),
        sentence=f"Consecutive batches share {ratio:.2g} times as many examples as random ones.",
        estimate=ratio,
    )


def repeated_batches(record: ParticipationRecord) -> Check | None:
    """The two batches that share most, of all pairs: epochs in one order have the same batches again."""
    present = record.presences.rows.astype(np.float32)
    if len(present) < 2:
        return None
    steps, watched = record.presences.steps, record.watched.size
    sizes = present.sum(axis=1)
    best, pair, common = 1.0, (0, 1), 0.0
    for one, other, shared in _candidates(present, sizes):
        p_value = at_least(watched, int(sizes[one]), int(sizes[other]), int(shared))
        if p_value < best:
            best, pair, common = p_value, (one, other), shared
    most = float(min(sizes[list(pair)]))
    share = common / most if most > 0 else 0.0
    return Check(
        name="repeated-batches",
        p_value=any_of(best, len(present) * (len(present) - 1) / 2),
        sentence=f"The batches of steps {steps[pair[0]]} and {steps[pair[1]]} share {100 * share:.3g} % "
        "of the smaller one.",
        estimate=share,
    )


def _candidates(present: npt.NDArray[np.float32], sizes: FloatArray) -> Iterator[tuple[int, int, float]]:
    """Pairs that share most for their sizes, with how much; others left out can only raise a p-value."""
    for block, shared, is_earlier in products(present):
        expected = np.outer(sizes[block], sizes[: block[-1] + 1]) / present.shape[1]
        excess = np.where(is_earlier, (shared - expected) / np.sqrt(expected + 1), -np.inf).ravel()
        for place in np.argpartition(excess, -min(_CANDIDATES, excess.size))[-_CANDIDATES:]:
            later, earlier = np.unravel_index(place, shared.shape)
            if is_earlier[later, earlier]:
                yield int(earlier), int(block[later]), float(shared[later, earlier])
