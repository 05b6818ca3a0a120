"""Run the trials of a plan that a store does not have.

:class:`TrialProgress` is the progress of a run of trials, :class:`TrialsRun` its result.
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


def run_trials(
    plan: TrialPlan,
    *,
    pool: Pool,
    store: Store,
    retry_failed: bool = False,
    watch: Callable[[TrialProgress], None] = lambda _: None,
) -> TrialsRun:
    """Run the trials that the store does not have; keep each group as soon as it ends.

    The scores depend neither on the pool, nor on the number of its workers, nor on interruptions. A trial
    that raises is kept as failed, and the others go on. An interrupt or a full disk ends the call, and the
    next one resumes from there. ``watch`` is called at the start and after each group.

    ``retry_failed`` tries failed trials again. A training whose randomness all comes from its seed then has
    the score that it would have had. One with other randomness as well, which fails more often with some
    outcomes than with others, is observed only with those that are left: do not retry that.
    """
    done = store.scores if retry_failed else {**store.failures, **store.scores}
    missing = plan.groups_without(done)
    progress = _ProgressCounter(plan, store, missing, watch)
    progress.report()
    if missing:
        with _closing(pool.map(Task.of(plan.recipe), missing)) as results:
            for group, finished in results:
                store.write(group, finished)
                progress.count(group)
    progress.require_all()
    return TrialsRun.of(store)


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """The numbers of trials done, failed and left, and the scores so far."""

    num_trials: int
    num_done: int
    """Trials that have a score."""
    num_failed: int
    num_new: int
    """Trials that ended, with a score or not, since the run was started or resumed."""
    seconds: float
    """The time since then."""
    num_left: int
    """Trials still to be run; those of an interrupted group are run again."""
    scores: Mapping[int, float] = field(repr=False)
    failures: Mapping[int, str] = field(repr=False)

    @property
    def models_per_second(self) -> float | None:
        """The speed so far; None before the first trial has ended."""
        return self.num_new / self.seconds if self.num_new > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """The time left at the speed so far."""
        return None if self.models_per_second is None else self.num_left / self.models_per_second

    @property
    def observations(self) -> Observations | None:
        """The observations so far; None as long as one side has none."""
        return _observations(self.scores, self.failures)


@dataclass(frozen=True, kw_only=True)
class TrialsRun:
    """All trials of a finished run."""

    scores: Mapping[int, float] = field(repr=False)
    """The scores by number."""
    failures: Mapping[int, str]
    """The errors of those that failed, by number."""
    num_retried: int = 0
    """Trials that failed, were tried again on request, and have a score now."""
    remarks: tuple[str, ...] = ()
    """Damage that was found in the store."""

    @classmethod
    def of(cls, store: Store) -> TrialsRun:
        """Copy the trials of a store, in the order of their numbers."""
        return cls(
            scores=MappingProxyType(dict(sorted(store.scores.items()))),
            failures=MappingProxyType(dict(sorted(store.failures.items()))),
            num_retried=sum(store.attempts[number] > 1 for number in store.scores),
            remarks=tuple(store.remarks),
        )

    @property
    def observations(self) -> Observations | None:
        """The observations in the order of the trials' numbers; None if one side has none.

        A failed trial counts against the audit: without the canary as the highest score, with it as the
        lowest. To leave it out would not be sound, because trainings may fail more often with the canary.
        """
        return _observations(self.scores, self.failures)

    @property
    def failure_summary(self) -> str | None:
        """The number of failed trials and the error of the first; None if none failed."""
        if not self.failures:
            return None
        number, error = next(iter(self.failures.items()))
        last = error.strip().splitlines()[-1].rstrip(".") if error.strip() else "no reason is known"
        total = len(self.failures) + len(self.scores)
        return (
            f"{len(self.failures):,} of {total:,} trials failed, first trial {number}: {last}. They count "
            "against the audit, unless they are tried again: --retry-failed."
        )


@contextmanager
def _closing(results: Any) -> Iterator[Any]:
    """Close the results however the loop ends; a pool of the user may have nothing to close."""
    try:
        yield results
    finally:
        getattr(results, "close", lambda: None)()


class _ProgressCounter:
    """Count the trials that have ended, and report the progress."""

    def __init__(
        self, plan: TrialPlan, store: Store, missing: list[Group], watch: Callable[[TrialProgress], None]
    ) -> None:
        self._plan, self._store, self._watch = plan, store, watch
        self._open = {group[0].number: len(group) for group in missing}
        self._num_new = 0
        self._started = time.monotonic()

    def count(self, group: Group) -> None:
        self._num_new += self._open.pop(group[0].number, 0)
        self.report()

    def report(self) -> None:
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


def _observations(scores: Mapping[int, float], failures: Mapping[int, str]) -> Observations | None:
    """Return both sides in the order of trials; the scores of failures are the worst for an attack."""
    if not scores:
        return None
    # the score of a diverged model may be the lowest float: then the same has to do
    highest = min(math.nextafter(max(scores.values()), math.inf), sys.float_info.max)
    lowest = max(math.nextafter(min(scores.values()), -math.inf), -sys.float_info.max)
    all_scores = {**{number: lowest if number % 2 else highest for number in failures}, **scores}
    numbers = np.array(sorted(all_scores))
    values, present = np.array([all_scores[number] for number in numbers]), numbers % 2 == 1
    if present.all() or not present.any():
        return None
    from dpaudit.stats import Observations  # noqa: PLC0415

    return Observations(with_canary=values[present], without_canary=values[~present])
