"""Who makes the trials: this process, processes on this machine, or a Ray cluster, behind one ``map``.

The one seam between trials and whoever makes them. One group after another, in this process. Local processes
that may be killed. A worker process, seen from the driver.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from multiprocessing import connection
from typing import Any, Protocol

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.experiments.trials._ray import Ray
from dpaudit.experiments.trials._task import ONE_THREAD, Finished, Task, perform
from dpaudit.experiments.trials._trial_plan import Group

__all__ = ["Pool", "Processes", "Ray", "Serial"]


class Pool(Protocol):
    """Anything with this ``map``.

    It gives what ``task(group)`` gives for every group, in any order, once each. The task can be pickled and
    called in any process. What it gives has errors of trainings in it; it raises only what would be wrong for
    every group, such as a function that cannot be imported. If what ``map`` returns has a ``close``, as a
    generator has, it is called at the end and after an interrupt.

    A pool of your own, with the standard library's::

        class Spawned:
            def map(self, task, groups):
                with multiprocessing.get_context("spawn").Pool(4) as pool:
                    yield from pool.imap_unordered(task, groups)
    """

    def map(self, task: Task, groups: Sequence[Group]) -> Iterable[tuple[Group, Finished]]:
        """What became of every group."""
        ...


_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dpaudit.experiments.trials._worker import main; main(int(sys.argv[2]))"
)
_LAST_SECONDS = 5.0  # to end by itself
_LOOK_SECONDS = 0.5  # how often it is asked whether the silent ones still live


class WorkerProcess:
    """A new interpreter at the other end of a socket.

    It is no copy of this process (which may have threads and locks), and it does not run the caller's script
    again. It has a process group of its own: Ctrl-C on a terminal reaches the driver only, which then ends
    the workers, and a worker is ended with everything it started. When the driver ends, the socket closes.
    """

    def __init__(self, task: Task) -> None:
        self.group: Group | None = None
        """What it works on."""
        self.is_ready = False
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(task.search_path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # whatever a training prints: standard output is for the result
                env={**os.environ, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.channel = mine
        self._lines = mine.makefile("rb")
        self._send({"recipe": task.recipe.to_json()})

    @property
    def is_free(self) -> bool:
        """Whether it can be given a group."""
        return self.is_ready and self.group is None

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended."""
        return self._process.poll() is not None

    def give(self, group: Group) -> None:
        """Let it work on a group."""
        self.group = group
        self._send({"group": [astuple(trial) for trial in group]})

    def receive(self) -> dict[str, Any] | None:
        """What it says; None if it is dead."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        self.is_ready = self.is_ready or "ready" in message
        return message

    def stop(self) -> None:
        """Tell a free worker to end."""
        if self.is_free:
            self._send({"stop": True})

    def end(self) -> str:
        """Wait for its end if it was told to stop, else force it; how it ended, as a sentence's part."""
        if not self.is_free:
            self._kill()
        try:
            status = self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            status = self._process.wait()
        self._kill()  # what it has left behind
        self._lines.close()
        self.channel.close()
        return f"was killed by {_name(-status)}" if status < 0 else f"ended with status {status}"

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # it is dead, which is noticed where it is listened to
            self.channel.sendall(json.dumps(message).encode() + b"\n")


def heard(workers: Iterable[WorkerProcess]) -> list[tuple[WorkerProcess, dict[str, Any] | None]]:
    """Wait a moment; who said what, and None for those that died.

    A dead one is also known by its process, because what it started may keep its socket open.
    """
    everybody = list(workers)
    speaking = connection.wait([worker.channel for worker in everybody], timeout=_LOOK_SECONDS)
    silent = [worker for worker in everybody if worker.channel not in speaking]
    said = [(worker, worker.receive()) for worker in everybody if worker.channel in speaking]
    return said + [(worker, None) for worker in silent if worker.is_dead]


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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


@dataclass(frozen=True)
class Serial:
    """No other processes: for few trials, and to debug a training function."""

    def map(self, task: Task, groups: Sequence[Group]) -> Iterator[tuple[Group, Finished]]:
        """What became of every group, in their order."""
        scorer = task.build()
        for group in groups:
            yield group, perform(scorer, group)
