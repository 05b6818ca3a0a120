"""Whether there is as much noise as claimed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import stats

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import below_claim
from dpaudit.diagnostics.noise._record import NoiseRecord

__all__ = ["Amount", "amount", "noise_variance"]


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The noise over the claim; the interval holds at ``confidence`` if all noise is independent."""

    ratio: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return (
            f"{self.ratio:.4g} of the claim ({100 * self.confidence:g} % interval "
            f"{self.low:.4g} to {self.high:.4g})"
        )


def amount(record: NoiseRecord, confidence: float) -> Amount:
    """How much noise there is."""
    tail = (1 - confidence) / 2
    low, high = (record.energy / float(stats.chi2.isf(q, record.count)) for q in (tail, 1 - tail))
    return Amount(
        ratio=math.sqrt(record.energy / record.count),
        low=math.sqrt(low),
        high=math.sqrt(high),
        confidence=confidence,
    )


def noise_variance(record: NoiseRecord, confidence: float) -> Check:
    """All noise together."""
    found = amount(record, confidence)
    return Check(
        name="noise-variance",
        p_value=float(below_claim(record.energy, record.count, record.resolution)),
        sentence="There is no noise at all." if found.high == 0 else f"The noise is {found}.",
        estimate=found.ratio,
    )
