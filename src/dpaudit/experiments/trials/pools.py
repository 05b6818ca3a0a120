"""Pools that run groups of trials in this process, in local worker processes or on Ray, behind one ``map``.

``concurrent.futures`` is not used for local processes: there a killed worker breaks all pending groups,
workers outlive a killed driver, and each worker runs the caller's script again. ``worker_main`` is the entry
point of a worker.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Protocol

from dpaudit import _validate
from dpaudit._interrupts import requested
from dpaudit.errors import IncompleteError
from dpaudit.experiments.trials._task import Finished, Task, named, perform
from dpaudit.experiments.trials._trial_plan import Group, Recipe, Trial
from dpaudit.experiments.trials._worker import WorkerChannel, WorkerProcess, poll, raise_reported

__all__ = ["Pool", "Processes", "Serial"]


class Pool(Protocol):
    """Any object with this ``map`` method.

    ``map`` yields the value of ``task(group)`` for every group, once each and in any order. The task can be
    pickled and called in any process. Errors of individual training runs are part of its return value; it
    raises only for errors that would occur in every group, such as a function that cannot be imported, and
    ``IncompleteError`` for faults of the machine. If the iterable that ``map`` returns has a ``close``
    method, as generators do, it is called at the end and after an interrupt.

    A custom pool, based on the standard library::

        class Spawned:
            def map(self, task, groups):
                with multiprocessing.get_context("spawn").Pool(4) as pool:
                    yield from pool.imap_unordered(task, groups)
    """

    def map(self, task: Task, groups: Sequence[Group]) -> Iterable[tuple[Group, Finished]]:
        """Yield every group with its result."""
        ...


@dataclass(frozen=True)
class Serial:
    """Pool without worker processes, for few trials and for debugging a training function."""

    def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
        """Yield every group with its result, in the order given."""
        scorer = task.build()
        for group in groups:
            yield group, perform(scorer, group, is_own=task.recipe.is_own)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Pool of single-threaded worker processes on this machine.

    A worker that is killed is replaced, and its group is retried by another one up to ``max_retries`` times.
    If that does not help, the other groups are finished, and ``IncompleteError`` is raised. After a signal,
    the groups in progress are finished.
    """

    num_workers: int | None = None
    """Number of workers; None means one per core available to this process."""
    max_retries: int = 3

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            _validate.integer("num_workers", self.num_workers)
        _validate.integer("max_retries", self.max_retries, low=0)

    def map(self, task: Task, groups: Sequence[Group]) -> Generator[tuple[Group, Finished], None, None]:
        """Yield every group with its result, in order of completion."""
        workers = _WorkerGroup(task, groups, self.num_workers or _cores(), self.max_retries)
        try:
            yield from workers.results()
        finally:
            workers.shutdown()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every platform
        return os.cpu_count() or 1


class _WorkerGroup:
    """Workers of one ``map`` call, and the groups of trials that are waiting for them."""

    def __init__(self, task: Task, groups: Sequence[Group], num_workers: int, max_retries: int) -> None:
        self._task, self._num_workers, self._max_retries = task, num_workers, max_retries
        self._waiting = deque(groups)
        self._deaths: Counter[int] = Counter()  # keyed by the first trial of the worker's group
        self._given_up: list[str] = []  # groups that lost their workers too often since the last result
        self._first_given_up: str | None = None
        self._false_starts = 0
        self._workers: dict[WorkerProcess, _Assignment] = {}

    def results(self) -> Iterator[tuple[Group, Finished]]:
        """Keep all workers busy and yield their results."""
        while self._waiting or self._num_busy:
            self._assign()
            for worker, message in poll(list(self._workers)):
                if message is None or "lost" in message:
                    self._handle_exit(worker, (message or {}).get("lost"))
                elif "ready" in message:
                    self._workers[worker].is_ready = True
                else:
                    raise_reported(message)
                    yield self._handle_result(worker, Finished(**message))
        if self._first_given_up is not None and requested() is None:
            raise IncompleteError(self._first_given_up)

    def shutdown(self) -> None:
        """End all workers, including those in the middle of a group."""
        for worker, state in self._workers.items():
            if state.is_free:
                worker.send({"stop": True})
        for worker, state in self._workers.items():
            worker.end(5.0 if state.is_free else 0.0)  # seconds to exit
        self._workers.clear()

    @property
    def _num_busy(self) -> int:
        return sum(state.group is not None for state in self._workers.values())

    def _assign(self) -> None:
        """Start as many workers as there are groups for, and assign a group to each free worker.

        After a signal, only the groups in progress are finished.
        """
        if requested() is not None:
            self._waiting.clear()
        while len(self._workers) < min(self._num_workers, len(self._waiting) + self._num_busy):
            worker = WorkerProcess(f"{__name__}:worker_main", self._task.search_path)
            worker.send({"recipe": self._task.recipe.to_json()})
            self._workers[worker] = _Assignment()
        for worker, state in self._workers.items():
            if state.is_free and self._waiting:
                state.group = self._waiting.popleft()
                worker.send({"group": [astuple(trial) for trial in state.group]})

    def _handle_result(self, worker: WorkerProcess, finished: Finished) -> tuple[Group, Finished]:
        state = self._workers[worker]
        group, state.group = state.group, None
        assert group is not None  # a worker replies to a group only
        self._given_up.clear()
        return group, finished

    def _handle_exit(self, worker: WorkerProcess, fault: str | None) -> None:
        """Retry the group of a lost worker in another one, or give it up after too many retries.

        Its trials are not stored as failed: they may succeed on a machine in order.
        """
        state = self._workers.pop(worker)
        ended, group = worker.end(0.0), state.group
        how = f"worker process {ended}" if fault is None else f"worker process reported: {fault.rstrip('.')}"
        if group is None:
            self._count_false_start(state, how)
            return
        self._deaths[group[0].number] += 1
        if (deaths := self._deaths[group[0].number]) <= self._max_retries:
            self._waiting.appendleft(group)
            return
        self._given_up.append(f"{named(group)} could not be completed: the {how}, {deaths} times in a row.")
        self._first_given_up = self._first_given_up or self._given_up[0]
        if len(self._given_up) > 1:  # in succession: the machine fails, not one group
            raise IncompleteError(self._first_given_up)

    def _count_false_start(self, state: _Assignment, how: str) -> None:
        self._false_starts += not state.is_ready
        if self._false_starts > self._max_retries:
            raise IncompleteError(
                f"Worker processes could not start: a {how} before it was ready, {self._false_starts} times."
            )


@dataclass
class _Assignment:
    """What a worker is doing: starting, waiting, or processing a group."""

    group: Group | None = None
    is_ready: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the worker is ready for a group."""
        return self.is_ready and self.group is None


def worker_main(descriptor: int) -> None:
    """Score groups for the driver at the other end of this socket until it requests a stop."""
    channel = WorkerChannel(descriptor)
    task = Task(Recipe.from_json(channel.next()["recipe"]))
    with channel.reporting():
        scorer = task.build()
        channel.send({"ready": True})
        while "stop" not in (request := channel.next()):
            group = tuple(Trial(*values) for values in request["group"])
            channel.send(asdict(perform(scorer, group, is_own=task.recipe.is_own)))
