"""Local processes that may be killed."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.experiments.trials._task import Finished, Task
from dpaudit.experiments.trials._trial import Group
from dpaudit.experiments.trials.pools._worker_process import WorkerProcess, heard

__all__ = ["Processes"]


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Worker processes on this machine, one thread each.

    A worker that is killed is replaced, and its group is tried again, ``max_retries`` times.
    """

    num_workers: int | None = None
    """None: one for each core that this process may use."""
    max_retries: int = 3

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            _validate.whole("num_workers", self.num_workers)
        _validate.whole("max_retries", self.max_retries, low=0)

    def map(self, task: Task, groups: Sequence[Group]) -> Generator[tuple[Group, Finished], None, None]:
        """What became of every group, as they end."""
        crew = _Crew(task, groups, self.num_workers or _cores(), self.max_retries)
        try:
            yield from crew.results()
        finally:
            crew.dismiss()


class _Crew:
    """The workers of one ``map``, and the groups that wait for them."""

    def __init__(self, task: Task, groups: Sequence[Group], num_workers: int, max_retries: int) -> None:
        self._task, self._num_workers, self._max_retries = task, num_workers, max_retries
        self._waiting = deque(groups)
        self._deaths: Counter[int] = Counter()  # by the first trial of the group that was being worked on
        self._false_starts = 0
        self._workers: list[WorkerProcess] = []

    def results(self) -> Iterator[tuple[Group, Finished]]:
        """Keep everybody busy and pass on what they say."""
        while self._waiting or self._num_busy:
            self._hire()
            for worker, message in heard(self._workers):
                if message is None:
                    yield from self._bury(worker)
                elif "refused" in message:
                    raise InputError(message["refused"])
                elif worker.group is not None:
                    group, worker.group = worker.group, None
                    yield group, Finished.from_dict(message)

    def dismiss(self) -> None:
        """End all workers, those in the middle of something too."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    @property
    def _num_busy(self) -> int:
        return sum(worker.group is not None for worker in self._workers)

    def _hire(self) -> None:
        """As many workers as there is work for, and work for those that have none."""
        while len(self._workers) < min(self._num_workers, len(self._waiting) + self._num_busy):
            self._workers.append(WorkerProcess(self._task))
        for worker in self._workers:
            if worker.is_free and self._waiting:
                worker.give(self._waiting.popleft())

    def _bury(self, worker: WorkerProcess) -> Iterator[tuple[Group, Finished]]:
        """Another worker gets the group of a dead one, unless that has gone wrong too often."""
        self._workers.remove(worker)
        how, group = worker.end(), worker.group
        if group is None:
            self._count_false_start(worker, how)
            return
        self._deaths[group[0].number] += 1
        if (deaths := self._deaths[group[0].number]) <= self._max_retries:
            self._waiting.appendleft(group)
        else:
            yield group, Finished.failed(group, f"The worker process {how}, {deaths} times in a row.")

    def _count_false_start(self, worker: WorkerProcess, how: str) -> None:
        self._false_starts += not worker.is_ready
        if self._false_starts > self._max_retries:
            raise InputError(
                f"Expected worker processes that start, but one {how} before it was ready, "
                f"{self._false_starts} times."
            )


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
