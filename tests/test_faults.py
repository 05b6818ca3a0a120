"""Signals are deferred, doubled and forked; a full disk behind torch; an intact checkpoint without memory."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dpaudit import IncompleteError, _faults, _io
from dpaudit.experiments._directory import restore


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def test_a_first_signal_is_deferred_and_a_second_is_not() -> None:
    with _faults.deferred():
        assert _faults.requested() is None
        send(signal.SIGTERM)
        assert _faults.requested() == signal.SIGTERM
        with pytest.raises(_faults.Interrupted) as caught:
            send(signal.SIGINT)
    assert caught.value.number == signal.SIGTERM
    assert _faults.requested() is None


def test_a_deferred_signal_takes_effect_after_its_limit() -> None:
    with _faults.deferred(0.01):
        send(signal.SIGHUP)
        with pytest.raises(_faults.Interrupted):
            signal.pause()


def test_a_signal_outside_takes_effect_at_once() -> None:
    with _faults.handled(), pytest.raises(_faults.Interrupted):
        send(signal.SIGHUP)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _faults.handled():
            send(signal.SIGHUP)
            assert _faults.requested() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_child_ends_as_if_there_were_no_handler() -> None:
    with _faults.deferred():
        child = os.fork()
        if child == 0:
            send(signal.SIGTERM)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_behind_torch_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    path, state = tmp_path / "checkpoint.pt", {"weights": torch.zeros(100_000)}
    _io.write_text(path, "old")
    with (
        pytest.raises(IncompleteError, match=r"^Cannot write .*checkpoint\.pt: File too large\.$"),
        files_of_at_most(10_000),
    ):
        _io.write(path, lambda file: torch.save(state, file))
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]


def test_too_little_memory_for_a_checkpoint_does_not_ask_to_delete_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    torch.save({}, tmp_path / "checkpoint.pt")
    monkeypatch.setattr("dpaudit.experiments._directory._loaded", fail)
    with pytest.raises(
        IncompleteError, match=r"^Cannot read .*checkpoint\.pt: there is not enough memory\.$"
    ):
        restore(tmp_path / "checkpoint.pt", None)  # type: ignore[arg-type]
