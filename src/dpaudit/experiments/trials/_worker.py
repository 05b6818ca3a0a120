"""A process of dpaudit's own at the other end of a socket: a worker of a pool, or the driver of Ray.

:class:`WorkerProcess` is the handle in the process that starts it; :class:`WorkerChannel` is the other end.
Messages are lines of JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from dpaudit.errors import DpauditError, IncompleteError, InputError
from dpaudit.experiments.trials._task import ONE_THREAD, failed_worker

_MARK = "DPAUDIT_WORKER"  # in the environment of a worker and of everything that it starts


class WorkerProcess:
    """Handle of a new interpreter that runs ``module:function`` with the descriptor of its socket.

    The worker is not forked from this process, which may have threads and locks, and does not run the
    caller's script again. It has its own process group: Ctrl-C on a terminal reaches only the driver, which
    then ends the workers, and a worker is killed together with everything it started. When the driver ends,
    the socket closes.
    """

    def __init__(self, entry: str, search_path: Sequence[str], log: BinaryIO | None = None) -> None:
        mine, theirs = socket.socketpair()
        module, _, function = entry.partition(":")
        start = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            f"from {module} import {function}; {function}(int(sys.argv[2]))"
        )
        self._mark = secrets.token_hex(16)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    start,
                    json.dumps(list(search_path)),
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log or 2,  # a training function may print: standard output is reserved for the result
                stderr=log,
                env={**os.environ, **ONE_THREAD, _MARK: self._mark},
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        self.channel = mine
        self._lines = mine.makefile("rb")
        self._ended = ""

    @property
    def is_dead(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; a dead worker is detected by the next poll."""
        with suppress(OSError):
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Return the worker's next message; None if it is dead."""
        try:
            line = self._lines.readline()
        except OSError:
            return None
        if not line.endswith(b"\n"):
            return None
        message: dict[str, Any] = json.loads(line)
        return message

    def end(self, seconds: float) -> str:
        """Wait for a worker that was asked to stop, then kill it; return how it ended, for a sentence.

        Everything that it started is killed, including processes that have left its group, as those of Ray.
        """
        if self._ended:
            return self._ended
        started = _open_descendants(self._process.pid)
        has_orphans = self.is_dead  # so that the list above may be incomplete
        try:
            with suppress(subprocess.TimeoutExpired):
                if seconds > 0:
                    self._process.wait(seconds)
        finally:  # also after a second signal
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            _kill(started)
            if has_orphans:
                _kill(_open_marked(f"{_MARK}={self._mark}"))
        status = self._process.wait()
        self._lines.close()
        self.channel.close()
        killed, left = f"was killed by {_signal_name(-status)}", f"ended with status {status}"
        self._ended = killed if status < 0 else left
        return self._ended


def poll(workers: Sequence[WorkerProcess]) -> list[tuple[WorkerProcess, dict[str, Any] | None]]:
    """Wait briefly; return the workers that sent a message with it, and dead workers with None.

    The process is checked as well, because child processes of a dead worker may keep its socket open.
    """
    ready = connection.wait([worker.channel for worker in workers], timeout=0.5)
    messages = [(worker, worker.receive()) for worker in workers if worker.channel in ready]
    silent = [worker for worker in workers if worker.channel not in ready]
    return messages + [(worker, None) for worker in silent if worker.is_dead]


def _descendants(process: int) -> list[int]:
    """Return the processes that a process has started, and those that these have; Linux only."""
    children: list[int] = []
    with suppress(OSError, ValueError):
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return children + [process_id for child in children for process_id in _descendants(child)]


def _open_descendants(process: int) -> list[int]:
    """Return descriptors of these processes, because their numbers may be used again."""
    descriptors = []
    for number in _descendants(process):
        with suppress(OSError):
            descriptors.append(os.pidfd_open(number))
    return descriptors


def _open_marked(variable: str) -> list[int]:
    """Return descriptors of all processes with this variable in their environment; Linux only."""
    descriptors = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if variable.encode() in path.read_bytes().split(b"\0"):
                descriptors.append(os.pidfd_open(int(path.parent.name)))
    return descriptors


def _kill(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def raise_reported(message: Mapping[str, Any]) -> None:
    """Raise the error that the process at the other end has sent, if the message is one."""
    if "lost" in message:
        raise IncompleteError(message["lost"])
    if "refused" in message:
        raise InputError(message["refused"])
    if "bug" in message:
        raise failed_worker(message["bug"])


class WorkerChannel:
    """The worker's end of the socket.

    Requests are read in a thread, so that the death of the driver is noticed while training.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._requests: SimpleQueue[Mapping[str, Any]] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> Mapping[str, Any]:
        """Wait for the next request."""
        return self._requests.get()

    def has_request(self) -> bool:
        """Return whether there is a request that was not read yet."""
        return not self._requests.empty()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the driver."""
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            _die()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Send an error to the driver, which raises it again by :func:`raise_reported`."""
        try:
            yield
        except IncompleteError as error:
            self.send({"lost": str(error)})
        except DpauditError as error:
            self.send({"refused": str(error)})
        except Exception:  # noqa: BLE001
            self.send({"bug": traceback.format_exc()})

    def _listen(self) -> None:
        # a driver that dies with a reply unread resets the connection instead of closing it
        with suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                request = json.loads(line)
                self._requests.put(request)
                if "stop" in request:
                    return
        _die()


def _die() -> None:
    """Kill this process and everything that it has started, because the driver has died."""
    _kill(_open_descendants(os.getpid()))
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
