"""From a plan to its observations: what is missing is computed, what is there is not.

Where a run of trials is, and how it ended.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dpaudit.errors import InputError
from dpaudit.experiments.trials._store import Store
from dpaudit.experiments.trials._task import Task
from dpaudit.experiments.trials._trial_plan import Group, TrialPlan
from dpaudit.experiments.trials.pools import Pool

if TYPE_CHECKING:  # it needs scipy, for which no worker has to wait
    from dpaudit.stats import Observations


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


def _nobody(_: object) -> None:
    """Looks on and says nothing."""


def run_trials(
    plan: TrialPlan,
    *,
    pool: Pool,
    store: Store,
    retry_failed: bool = False,
    watch: Callable[[TrialProgress], None] = _nobody,
) -> TrialsRun:
    """Run the trials that the store does not have, each group kept as soon as it ends.

    The scores do not depend on the pool, nor on the number of its workers, nor on interruptions. A trial that
    raises is kept as failed, and the others go on. An interrupt or a full disk ends the call, and the next
    one goes on from there. ``watch`` is called at the start and after each group.

    ``retry_failed`` tries trials again that have failed. A training whose chance all comes from its seed then
    has the score that it would have had. One that has other chance as well, and fails more often with some
    outcomes than with others, is observed only with those that are left: do not retry that.
    """
    done = store.scores if retry_failed else {**store.failures, **store.scores}
    missing = plan.groups_without(done)
    watched = _Watched(plan, store, missing, watch)
    watched.show()
    if missing:
        with _closing(pool.map(Task.of(plan.recipe), missing)) as results:
            for group, finished in results:
                store.write(group, finished)
                watched.count(group)
    watched.require_all()
    return TrialsRun.of(store)


@contextmanager
def _closing(results: Any) -> Iterator[Any]:
    """End the workers with the loop, however it ends: a pool of somebody else may have nothing to close."""
    try:
        yield results
    finally:
        getattr(results, "close", lambda: None)()


class _Watched:
    """Counts and tells."""

    def __init__(
        self, plan: TrialPlan, store: Store, missing: list[Group], watch: Callable[[TrialProgress], None]
    ) -> None:
        self._plan, self._store, self._watch = plan, store, watch
        self._open = {group[0].number: len(group) for group in missing}
        self._num_new = 0
        self._started = time.monotonic()

    def count(self, group: Group) -> None:
        self._num_new += self._open.pop(group[0].number, 0)
        self.show()

    def show(self) -> None:
        store = self._store
        self._watch(
            TrialProgress(
                num_trials=self._plan.num_trials,
                num_done=len(store.scores),
                num_failed=len(store.failures),
                num_new=self._num_new,
                num_left=sum(self._open.values()),
                seconds=time.monotonic() - self._started,
                scores=store.scores,
                failures=store.failures,
            )
        )

    def require_all(self) -> None:
        if self._open:
            raise InputError(f"Expected the pool to give every group back, {len(self._open)} are missing.")
