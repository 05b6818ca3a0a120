"""What a worker process does: groups of trials, until it is told to stop or nobody listens any more."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from dpaudit.errors import DpauditError
from dpaudit.experiments.trials._task import Task, perform
from dpaudit.experiments.trials._trial_plan import Recipe, Trial


def main(descriptor: int) -> None:
    """Work for whoever holds the other end of this socket."""
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
    """In a thread of its own, so that the driver's end is noticed in the middle of a training."""
    with channel.makefile("rb") as lines:
        for line in lines:
            request = json.loads(line)
            requests.put(request)
            if "stop" in request:
                return
    _die()


def _die() -> None:
    """The driver was killed: end at once, with everything that a training has started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    try:
        channel.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        _die()
