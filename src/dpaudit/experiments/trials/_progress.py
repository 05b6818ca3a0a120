"""Where a run of trials is, and how it ended."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # it needs scipy, for which no worker has to wait
    from dpaudit.experiments.trials._store import Store
    from dpaudit.stats import Observations

__all__ = ["TrialProgress", "TrialsRun", "observed"]


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """Trials done, failed and to come; the observations so far are made when they are asked for."""

    num_trials: int
    num_done: int
    """Trials that have a score."""
    num_failed: int
    num_new: int
    """Trials that ended, with a score or not, since the run was started or started again."""
    seconds: float
    """Since then."""
    num_left: int
    """Trials that this start has still to make; those of a broken-off group are made again."""
    scores: Mapping[int, float] = field(repr=False)
    failures: Mapping[int, str] = field(repr=False)

    @property
    def models_per_second(self) -> float | None:
        """None as long as there is none."""
        return self.num_new / self.seconds if self.num_new > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far."""
        return None if self.models_per_second is None else self.num_left / self.models_per_second

    @property
    def observations(self) -> Observations | None:
        """Those so far; None as long as one side has none."""
        return observed(self.scores, self.failures)


@dataclass(frozen=True, kw_only=True)
class TrialsRun:
    """All trials of a run that has come to its end."""

    scores: Mapping[int, float] = field(repr=False)
    """By number."""
    failures: Mapping[int, str]
    """The errors of those that failed, by number."""
    num_retried: int = 0
    """Trials that failed, were tried again because somebody asked for it, and have a score now."""
    remarks: tuple[str, ...] = ()
    """What was wrong with the store."""

    @classmethod
    def of(cls, store: Store) -> TrialsRun:
        """A copy of what a store knows, in the order of the numbers."""
        return cls(
            scores=MappingProxyType(dict(sorted(store.scores.items()))),
            failures=MappingProxyType(dict(sorted(store.failures.items()))),
            num_retried=sum(store.attempts[number] > 1 for number in store.scores),
            remarks=tuple(store.remarks),
        )

    @property
    def observations(self) -> Observations | None:
        """In the order of the trials' numbers; None if one side has none.

        A trial that failed counts against the audit: without the canary as the highest score, with it as the
        lowest. To leave it out would not be sound, because trainings may fail more often with the canary.
        """
        return observed(self.scores, self.failures)

    @property
    def failure_summary(self) -> str | None:
        """How many failed and why the first did; None if none did."""
        if not self.failures:
            return None
        number, error = next(iter(self.failures.items()))
        last = error.strip().splitlines()[-1].rstrip(".") if error.strip() else "no reason is known"
        total = len(self.failures) + len(self.scores)
        return (
            f"{len(self.failures):,} of {total:,} trials failed, first trial {number}: {last}. They count "
            "against the audit, unless they are tried again: --retry-failed."
        )


def observed(scores: Mapping[int, float], failures: Mapping[int, str]) -> Observations | None:
    """Both sides by trial number, with failures placed where they help no attack."""
    if not scores:
        return None
    # a model that diverged may have the very lowest number: beside it is near enough
    highest = min(math.nextafter(max(scores.values()), math.inf), sys.float_info.max)
    lowest = max(math.nextafter(min(scores.values()), -math.inf), -sys.float_info.max)
    placed = {number: lowest if number % 2 else highest for number in failures}
    everything = {**placed, **scores}
    numbers = np.array(sorted(everything))
    values, present = np.array([everything[number] for number in numbers]), numbers % 2 == 1
    if present.all() or not present.any():
        return None
    from dpaudit.stats import Observations  # noqa: PLC0415

    return Observations(with_canary=values[present], without_canary=values[~present])
