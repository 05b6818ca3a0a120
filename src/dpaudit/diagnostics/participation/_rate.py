"""Whether examples are drawn as often as claimed, and all of them alike."""

from __future__ import annotations

import numpy as np
from scipy import stats

from dpaudit.diagnostics._check import Check
from dpaudit.diagnostics._exact import RESOLUTION, any_of
from dpaudit.diagnostics.participation._record import ParticipationRecord

__all__ = ["drawn_rate", "duplicate_examples", "favoured_example", "sample_rate"]


def drawn_rate(record: ParticipationRecord) -> float:
    """How often an example was drawn, as a share of the steps."""
    return sum(record.sizes) / (record.num_steps * record.num_examples)


def sample_rate(record: ParticipationRecord, claimed: float) -> Check:
    """All participations together: Binomial. Fewer than claimed leak less, and are no finding."""
    trials = record.num_steps * record.num_examples
    rate = drawn_rate(record)
    return Check(
        name="sample-rate",
        p_value=float(stats.binom.sf(sum(record.sizes) - 1, trials, _highest(claimed))),
        sentence=f"Examples are drawn with a rate of {rate:.4g}, {rate / claimed:.4g} of the claim.",
        estimate=rate / claimed,
    )


def favoured_example(record: ParticipationRecord, claimed: float) -> Check:
    """The example that took part most often: Binomial, as for everybody else."""
    example = int(np.argmax(record.counts))
    count = int(record.counts[example])
    p_value = float(stats.binom.sf(count - 1, record.num_steps, _highest(claimed)))
    return Check(
        name="favoured-example",
        p_value=any_of(p_value, record.num_examples),
        sentence=f"Example {example} is in {count} of {record.num_steps} batches, "
        f"where {claimed * record.num_steps:.4g} are expected.",
        estimate=count / (claimed * record.num_steps),
    )


def duplicate_examples(record: ParticipationRecord) -> Check:
    """An example twice in one batch: Poisson sampling never does that, drawing with replacement does."""
    return Check(
        name="duplicate-examples",
        p_value=0.0 if record.num_repeated else 1.0,
        sentence=f"{record.num_repeated} times an example is in a batch more than once.",
        estimate=float(record.num_repeated),
    )


def _highest(claimed: float) -> float:
    """A rate is often told with few digits."""
    return min(1.0, claimed * (1 + RESOLUTION))
