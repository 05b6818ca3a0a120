"""Run the trials of a plan that are not yet in a store.

:class:`TrialProgress` describes the progress of a run of trials, :class:`TrialsRun` its result.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from dpaudit._interrupts import deferred, raise_if_requested
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments.trials._ray import Ray
from dpaudit.experiments.trials._store import Store
from dpaudit.experiments.trials._task import Task
from dpaudit.experiments.trials._trial_plan import TrialPlan
from dpaudit.experiments.trials.pools import Pool, Processes

if TYPE_CHECKING:  # needs scipy, which would slow down the start of workers
    from dpaudit.stats import Observations


def run_trials(
    plan: TrialPlan,
    *,
    pool: Pool,
    store: Store,
    retry_failed: bool = False,
    watch: Callable[[TrialProgress], None] = lambda _: None,
) -> TrialsRun:
    """Run the trials that are not in the store; write each group to the store as soon as it ends.

    The scores do not depend on the pool, the number of workers or interruptions. A trial that raises is
    stored as failed, and the others continue. A signal ends the call after the trials in progress, or after
    a few seconds, and then takes the effect that it has outside of it. A full disk or lost workers end it
    with ``IncompleteError``; they are never stored as the outcome of a trial. The next call resumes.
    ``watch`` is called at the start and after each group.

    ``retry_failed`` repeats failed trials. If all randomness of a training run comes from its seed, the
    repeated trial has the score that it would have had. Otherwise, do not retry: if some outcomes fail more
    often than others, retrying selects those that do not fail and biases the audit.
    """
    done = store.scores if retry_failed else {**store.failures, **store.scores}
    missing = plan.groups_without(done)
    left = {group[0].number: len(group) for group in missing}
    num_missing, started, versions = sum(left.values()), time.monotonic(), dict[str, str]()

    def report() -> None:
        num_left, seconds = sum(left.values()), time.monotonic() - started
        watch(
            TrialProgress(
                num_trials=plan.num_trials,
                num_done=len(store.scores),
                num_failed=len(store.failures),
                num_new=num_missing - num_left,
                num_left=num_left,
                seconds=seconds,
                scores=store.scores,
                failures=store.failures,
            )
        )

    report()
    if missing:
        # 4 seconds for trials in progress, after a signal; those that take longer are repeated
        with deferred(4.0), _closed(pool.map(Task.of(plan.recipe), missing)) as results:
            for group, finished in results:
                store.write(group, finished)
                versions |= finished.packages
                left.pop(group[0].number, None)
                report()
                if not isinstance(pool, Processes | Ray):  # these finish the groups in progress
                    raise_if_requested()
    if left:
        raise InputError(f"The pool did not return {len(left)} of its groups.")
    return TrialsRun.of(store, versions)


@contextmanager
def _closed(results: Any) -> Iterator[Any]:
    """Close the results however the loop ends; those of a user-defined pool may have no ``close``."""
    try:
        yield results
    except BrokenExecutor as error:  # of a pool based on concurrent.futures
        raise IncompleteError(f"The workers of the pool were lost: {error}") from error
    finally:
        getattr(results, "close", lambda: None)()


@dataclass(frozen=True, kw_only=True)
class TrialProgress:
    """Numbers of trials that are done, failed and left, and the scores so far."""

    num_trials: int
    num_done: int
    """Trials that have a score."""
    num_failed: int
    num_new: int
    """Trials that ended, with or without a score, since the run was started or resumed."""
    seconds: float
    """The time since the run was started or resumed."""
    num_left: int
    """Trials still to be run, including all trials of an interrupted group."""
    scores: Mapping[int, float] = field(repr=False)
    failures: Mapping[int, str] = field(repr=False)

    @property
    def models_per_second(self) -> float | None:
        """The throughput so far; None before the first trial has ended."""
        return self.num_new / self.seconds if self.num_new > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """The estimated time left; None before the first trial has ended."""
        return None if self.models_per_second is None else self.num_left / self.models_per_second

    @property
    def observations(self) -> Observations | None:
        """The observations so far; None while one side has none."""
        return _observations(self.scores, self.failures)


@dataclass(frozen=True, kw_only=True)
class TrialsRun:
    """All trials of a finished run."""

    scores: Mapping[int, float] = field(repr=False)
    """Scores by trial number."""
    failures: Mapping[int, str]
    """Errors of failed trials by trial number."""
    num_retried: int = 0
    """Trials that failed, were retried on request, and now have a score."""
    remarks: tuple[str, ...] = ()
    """Descriptions of damage found in the store."""
    packages: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Versions of the packages that the processes of the trials have imported since the last start."""

    @classmethod
    def of(cls, store: Store, packages: Mapping[str, str] | None = None) -> TrialsRun:
        """Copy the trials of a store, ordered by number."""
        return cls(
            scores=MappingProxyType(dict(sorted(store.scores.items()))),
            failures=MappingProxyType(dict(sorted(store.failures.items()))),
            num_retried=sum(store.attempts[number] > 1 for number in store.scores),
            remarks=tuple(store.remarks),
            packages=MappingProxyType(dict(packages or {})),
        )

    @property
    def observations(self) -> Observations | None:
        """The observations ordered by trial number; None if one side has none.

        A failed trial counts against the audit: it gets the lowest score if the canary is present and the
        highest if it is absent. Omitting it would be unsound, because training may fail more often with the
        canary.
        """
        return _observations(self.scores, self.failures)

    @property
    def failure_summary(self) -> str | None:
        """The number of failed trials and the error of the first; None if none failed."""
        if not self.failures:
            return None
        number, error = next(iter(self.failures.items()))
        last = error.strip().splitlines()[-1].rstrip(".") if error.strip() else "unknown reason"
        total = len(self.failures) + len(self.scores)
        return (
            f"{len(self.failures):,} of {total:,} trials failed, the first of them trial {number}: {last}. "
            "Failed trials count against the audit; use --retry-failed to repeat them."
        )


def _observations(scores: Mapping[int, float], failures: Mapping[int, str]) -> Observations | None:
    """Return both sides ordered by trial number; failures get the worst score for an attack."""
    if not scores:
        return None
    # if the score of a diverged model is already the lowest float, failures share it
    highest = min(math.nextafter(max(scores.values()), math.inf), sys.float_info.max)
    lowest = max(math.nextafter(min(scores.values()), -math.inf), -sys.float_info.max)
    all_scores = {**{number: lowest if number % 2 else highest for number in failures}, **scores}
    numbers = np.array(sorted(all_scores))
    values, present = np.array([all_scores[number] for number in numbers]), numbers % 2 == 1
    if present.all() or not present.any():
        return None
    from dpaudit.stats import Observations  # noqa: PLC0415

    return Observations(with_canary=values[present], without_canary=values[~present], scores_of="run")
