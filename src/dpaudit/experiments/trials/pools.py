"""Pools that run groups of trials in this process, in local worker processes or on Ray, behind one ``map``.

``concurrent.futures`` is not used for local processes: there a killed worker breaks all pending groups,
workers outlive a killed driver, and each worker runs the caller's script again. ``worker_main`` is the entry
point of a worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, Protocol

from dpaudit import _validate
from dpaudit.errors import DpauditError, InputError
from dpaudit.experiments.trials._ray import Ray
from dpaudit.experiments.trials._task import ONE_THREAD, Finished, Task, perform
from dpaudit.experiments.trials._trial_plan import Group, Recipe, Trial

__all__ = ["Pool", "Processes", "Ray", "Serial"]

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dpaudit.experiments.trials.pools import worker_main; worker_main(int(sys.argv[2]))"
)
_STOP_SECONDS = 5.0  # grace period for a worker to exit
_POLL_SECONDS = 0.5  # between checks that silent workers are alive


class Pool(Protocol):
    """Any object with this ``map`` method.

    ``map`` yields the value of ``task(group)`` for every group, once each and in any order. The task can be
    pickled and called in any process. Errors of individual training runs are part of its return value; it
    raises only for errors that would occur in every group, such as a function that cannot be imported. If
    the iterable that ``map`` returns has a ``close`` method, as generators do, it is called at the end and
    after an interrupt.

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
            yield group, perform(scorer, group)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Pool of single-threaded worker processes on this machine.

    A worker that is killed is replaced, and its group is retried up to ``max_retries`` times.
    """

    num_workers: int | None = None
    """Number of workers; None means one per core available to this process."""
    max_retries: int = 3

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            _validate.whole("num_workers", self.num_workers)
        _validate.whole("max_retries", self.max_retries, low=0)

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
        self._false_starts = 0
        self._workers: list[_Worker] = []

    def results(self) -> Iterator[tuple[Group, Finished]]:
        """Keep all workers busy and yield their results."""
        while self._waiting or self._num_busy:
            self._assign()
            for worker, message in _poll(self._workers):
                if message is None:
                    yield from self._handle_exit(worker)
                elif "refused" in message:
                    raise InputError(message["refused"])
                elif worker.group is not None:
                    group, worker.group = worker.group, None
                    yield group, Finished.from_dict(message)

    def shutdown(self) -> None:
        """End all workers, including those in the middle of a group."""
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    @property
    def _num_busy(self) -> int:
        return sum(worker.group is not None for worker in self._workers)

    def _assign(self) -> None:
        """Start as many workers as there are groups for, and assign a group to each free worker."""
        while len(self._workers) < min(self._num_workers, len(self._waiting) + self._num_busy):
            self._workers.append(_Worker(self._task))
        for worker in self._workers:
            if worker.is_free and self._waiting:
                worker.assign(self._waiting.popleft())

    def _handle_exit(self, worker: _Worker) -> Iterator[tuple[Group, Finished]]:
        """Retry the group of a dead worker, or yield it as failed after too many retries."""
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

    def _count_false_start(self, worker: _Worker, how: str) -> None:
        self._false_starts += not worker.is_ready
        if self._false_starts > self._max_retries:
            raise InputError(
                f"Expected worker processes to start, but a worker {how} before it was ready, "
                f"{self._false_starts} times."
            )


class _Worker:
    """Handle of a worker process: a new interpreter at the other end of a socket.

    The worker is not forked from this process, which may have threads and locks, and does not run the
    caller's script again. It has its own process group: Ctrl-C on a terminal reaches only the driver, which
    then ends the workers, and a worker is killed together with everything it started. When the driver ends,
    the socket closes.
    """

    def __init__(self, task: Task) -> None:
        self.group: Group | None = None
        """The group that the worker is processing."""
        self.is_ready = False
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(task.search_path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # a training function may print: standard output is reserved for the result
                env={**os.environ, **ONE_THREAD},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.channel = mine
        self._lines = mine.makefile("rb")
        self._send({"recipe": task.recipe.to_json()})

    @property
    def is_free(self) -> bool:
        """Whether the worker is ready for a group."""
        return self.is_ready and self.group is None

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def assign(self, group: Group) -> None:
        """Send the worker a group to process."""
        self.group = group
        self._send({"group": [astuple(trial) for trial in group]})

    def receive(self) -> dict[str, Any] | None:
        """Return the worker's next message; None if it is dead."""
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
        """Ask a free worker to exit."""
        if self.is_free:
            self._send({"stop": True})

    def end(self) -> str:
        """Wait for a worker that was asked to stop, or kill it; return how it ended, for a sentence."""
        if not self.is_free:
            self._kill()
        try:
            status = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            status = self._process.wait()
        self._kill()  # processes that the worker left behind
        self._lines.close()
        self.channel.close()
        return f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _send(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # a dead worker is detected by the next poll
            self.channel.sendall(json.dumps(message).encode() + b"\n")


def _poll(workers: Sequence[_Worker]) -> list[tuple[_Worker, dict[str, Any] | None]]:
    """Wait briefly; return the workers that sent a message with it, and dead workers with None.

    The process is checked as well, because child processes of a dead worker may keep its socket open.
    """
    ready = connection.wait([worker.channel for worker in workers], timeout=_POLL_SECONDS)
    messages = [(worker, worker.receive()) for worker in workers if worker.channel in ready]
    silent = [worker for worker in workers if worker.channel not in ready]
    return messages + [(worker, None) for worker in silent if worker.is_dead]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def worker_main(descriptor: int) -> None:
    """Score groups for the driver at the other end of this socket until it requests a stop."""
    channel = socket.socket(fileno=descriptor)
    requests: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    first = requests.get()
    try:
        scorer = Task(Recipe.from_json(first["recipe"])).build()
    except DpauditError as error:
        _send(channel, {"refused": str(error)})
        return
    _send(channel, {"ready": True})
    while "stop" not in (request := requests.get()):
        group = tuple(Trial(*values) for values in request["group"])
        _send(channel, perform(scorer, group).to_dict())


def _listen(channel: socket.socket, requests: SimpleQueue[Mapping[str, Any]]) -> None:
    """Read requests in a thread, so that the death of the driver is noticed while training."""
    # a driver that dies with a reply unread resets the connection instead of closing it
    with suppress(OSError), channel.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            requests.put(request)
            if "stop" in request:
                return
    _die()


def _die() -> None:
    """Kill this process and everything that it has started, because the driver has died."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        _die()
