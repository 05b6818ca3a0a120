"""A worker process, seen from the driver."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple
from multiprocessing import connection
from typing import Any

from dpaudit.experiments.trials._task import ONE_THREAD, Task
from dpaudit.experiments.trials._trial import Group

__all__ = ["WorkerProcess", "heard"]

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from dpaudit.experiments.trials.pools._worker import main; main(int(sys.argv[2]))"
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
