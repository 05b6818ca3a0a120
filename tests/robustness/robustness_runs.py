"""Runs of ``dpaudit run`` in a process of their own, what is left of them, and how to harm them."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from digits_config import digits_config, models_config

MARK = "DPAUDIT_TEST_MARK"  # in the environment of a run and of everything that it starts
ONE_MODEL = 'mode = "one-run"\nnum_canaries = 32\nmethods = []'
POOLS = {
    "serial": '"serial"',
    "processes": '{kind = "processes", num_workers = 2}',
    "ray": '{kind = "ray", num_cpus = 0.5}',
}
_THREAT_MODELS = {"final-model": "black-box", "input": "input"}
MODES = ("one-run", "input", "paper", "end-to-end", "final-model", *POOLS)


def config_of(mode: str, folder: Path, *, size: int = 1) -> str:
    """Return the config of a run that takes a few seconds, times ``size``, and is resumable in the middle."""
    if mode in POOLS:
        sizes = {"sample_rate": 0.5, "num_steps": 60, "num_models": 320 * size}
        return models_config(folder, pool=POOLS[mode], audit="", **sizes)
    top = "checkpoint_seconds = 0"
    if mode in _THREAT_MODELS:
        top += f'\nthreat_model = "{_THREAT_MODELS[mode]}"'
    canaries = {"paper": 1, "input": 4}.get(mode, 32)
    name = "one-run" if mode in _THREAT_MODELS else mode
    audit = f'mode = "{name}"\nnum_canaries = {canaries}\nmethods = []'
    # many more than the checkpoints that are waited for: of those that follow quickly, some are not seen
    return digits_config(folder, top=top, num_steps=150 * size, audit=audit)


def start(config: Path, *words: object, limit: str = "") -> FaultyRun:
    """Start ``dpaudit run``; ``limit`` is Python code that runs before."""
    code = f"import resource, sys; {limit}\nfrom dpaudit.cli import main; main()"
    mark = secrets.token_hex(8)
    environment = {**os.environ, MARK: mark, "DPAUDIT_ENVIRONMENT": "as-is"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "run", str(config), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )
    return FaultyRun(process, mark)


class FaultyRun:
    """A run, and all processes that belong to it."""

    def __init__(self, process: subprocess.Popen[str], mark: str) -> None:
        self.process, self._mark = process, mark
        self._watched: dict[int, str] = {}  # descriptors of processes, and their commands
        self._said = ""

    def watch(self) -> None:
        """Note all processes that the run has started: some of Ray's overwrite their environment."""
        for number in _descendants(self.process.pid):
            self._watch(number)

    def _watch(self, number: int) -> None:
        with suppress(OSError):
            command = _command(Path(f"/proc/{number}"))
            self._watched[os.pidfd_open(number)] = command

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Look often until something is there; an end of the run before is a mistake."""
        while not is_there():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.01)
                _, said = self.process.communicate()
                raise AssertionError(f"The run ended before the fault: {said}")

    def wait_for(self, word: str) -> int:
        """Return a process of the run whose command contains the word, as soon as there is one."""
        self.wait_until(lambda: bool(self.processes(word)))
        found = self.processes(word)
        return found[0] if found else self.wait_for(word)

    def wait_for_line(self, words: str) -> None:
        """Read standard error up to a line that contains these words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._said += line
            if words in line:
                return
        raise AssertionError(f"The run ended before it said {words!r}: {self._said}")

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return status, standard output and standard error."""
        printed, said = self.process.communicate(timeout=280)
        return self.process.returncode, printed, self._said + said

    def processes(self, word: str = "") -> list[int]:
        """Return the living processes of the run, except itself, whose command contains the word."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_its = f"{MARK}={self._mark}".encode() in (folder / "environ").read_bytes()
                if is_its and word in _command(folder) and int(folder.name) != self.process.pid:
                    found.append(int(folder.name))
        return found

    def require_gone(self) -> None:
        """Raise unless every process of the run ends within ten seconds."""
        for number in self.processes():
            self._watch(number)
        left, until = dict(self._watched), time.monotonic() + 10
        while left:
            ended, _, _ = select.select(left, [], [], max(0.0, until - time.monotonic()))
            assert ended, f"These are left behind: {list(left.values())}"
            for descriptor in ended:
                del left[descriptor]

    def kill_all(self) -> None:
        """End whatever a failed test left."""
        for number in (self.process.pid, *self.processes()):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        for descriptor in self._watched:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        self.process.communicate()


def _command(folder: Path) -> str:
    return (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _descendants(process: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found + [one for child in found for one in _descendants(child)]


def _stored(folder: Path) -> list[str]:
    path = folder / "trials.jsonl"
    return path.read_text().splitlines()[1:] if path.exists() else []


def num_kept(folder: Path) -> int:
    """Return the number of trials in the store of a run; 0 if there is no store."""
    return len(_stored(folder))


def failures(folder: Path) -> int:
    """Return the number of trials that are stored as failed."""
    return sum('"error": null' not in line for line in _stored(folder))


def observations(folder: Path) -> dict[str, bytes]:
    """Return the observations of a finished run, bit for bit."""
    found = {path.name: np.load(path).tobytes() for path in folder.glob("*.npy")}
    assert len(found) == 2
    return found


def result(folder: Path) -> dict[str, Any]:
    """Return the result of a finished run without what takes time."""
    values = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in values.items() if name not in ("timing", "provenance")}
