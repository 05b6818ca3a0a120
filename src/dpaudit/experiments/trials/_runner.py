"""From a plan to its observations: what is missing is computed, what is there is not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dpaudit.errors import InputError
from dpaudit.experiments.trials._plan import TrialPlan
from dpaudit.experiments.trials._progress import TrialProgress, TrialsRun
from dpaudit.experiments.trials._store import Store
from dpaudit.experiments.trials._task import Task
from dpaudit.experiments.trials._trial import Group
from dpaudit.experiments.trials.pools import Pool

__all__ = ["run_trials"]


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
