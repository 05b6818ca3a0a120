"""Signals are deferred, doubled, delivered and forked; a full disk behind torch and other exceptions."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from damage import forged

from dpaudit import IncompleteError, InputError, _interrupts, _io
from dpaudit.experiments import _directory, _loop
from dpaudit.experiments.black_box import _canary
from dpaudit.experiments.config import _config


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def work(*numbers: signal.Signals) -> None:
    """Receive signals in deferred work that does not look for them, and that nothing but the third ends."""
    with _interrupts.deferred():
        for number in numbers:
            with suppress(_interrupts.Interrupted):
                send(number)


def test_a_first_signal_is_deferred_and_a_second_is_not(received: list[int]) -> None:
    seen: list[int | None] = []

    def look() -> None:
        with _interrupts.deferred():
            seen.append(_interrupts.requested())
            send(signal.SIGTERM)
            seen.append(_interrupts.requested())
            send(signal.SIGINT)
            seen.append(-1)

    with _interrupts.handled(), pytest.raises(_interrupts.Interrupted) as caught:
        look()
    assert seen == [None, signal.SIGTERM]
    assert caught.value.number == signal.SIGTERM
    assert _interrupts.requested() is None
    assert received == []  # a command turns the exception into a status


def test_a_deferred_signal_takes_effect_after_its_limit(received: list[int]) -> None:
    reached = []

    def wait() -> None:
        with _interrupts.deferred(0.01):
            send(signal.SIGHUP)
            select.select([], [], [], 60)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert reached == []
    assert received == [signal.SIGHUP]


def test_a_third_signal_ends_the_process() -> None:
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            work(signal.SIGTERM, signal.SIGINT, signal.SIGINT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143


def test_a_signal_after_the_last_look_takes_effect_at_the_end_of_the_work() -> None:
    finished = []

    def nested() -> None:
        with _interrupts.deferred():
            work(signal.SIGTERM)
            finished.append("inner")

    with _interrupts.handled(), pytest.raises(_interrupts.Interrupted) as caught:
        nested()
    assert finished == ["inner"]
    assert caught.value.number == signal.SIGTERM


def test_a_signal_to_a_script_reaches_its_own_handler_when_the_work_is_saved(received: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        work(signal.SIGTERM)
    assert received == [signal.SIGTERM]
    assert type(caught.value) is KeyboardInterrupt  # with a subclass, Python ends with 1 instead of 130
    with pytest.raises(KeyboardInterrupt) as caught:
        work(signal.SIGINT)
    assert type(caught.value) is KeyboardInterrupt
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with pytest.raises(SystemExit) as left:
        work(signal.SIGTERM)
    assert left.value.code == 7


def test_a_signal_does_not_end_later_work(received: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt):
        work(signal.SIGTERM)
    with ThreadPoolExecutor(1) as threads:  # where no handler can be installed
        threads.submit(work).result()
    work()
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("error", [None, IncompleteError("The disk is full.")])
def test_a_signal_ends_a_script_without_a_handler_when_the_work_is_saved(
    number: signal.Signals, error: Exception | None, capfd: pytest.CaptureFixture[str]
) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(number, signal.SIG_DFL)
        with suppress(BaseException), _interrupts.deferred():
            send(number)
            os.write(1, b"saved")
            if error is not None:
                raise error
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -number
    printed, said = capfd.readouterr()
    assert printed == "saved"
    assert ("IncompleteError: The disk is full." in said) == (error is not None)


def test_a_signal_outside_takes_effect_at_once() -> None:
    with _interrupts.handled(), pytest.raises(_interrupts.Interrupted):
        send(signal.SIGHUP)


def test_a_signal_in_a_finalizer_is_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    class Object:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def work() -> None:
        with _interrupts.handled():
            Object()  # Python drops the exception
            survived.append("the finalizer")
            threading.Event().wait(10)

    before, survived = sys.unraisablehook, list[str]()
    with pytest.raises(_interrupts.Interrupted):
        work()
    assert survived
    assert sys.unraisablehook is before
    assert "Traceback" not in capfd.readouterr().err


def test_another_exception_in_a_finalizer_is_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Object:
        def __del__(self) -> None:
            raise RuntimeError("mine")

    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda one: reported.append(str(one.exc_value)))
    with _interrupts.handled():
        Object()
    assert reported == ["mine"]


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with _interrupts.handled():
            send(signal.SIGHUP)
            assert _interrupts.requested() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_forked_child_ends_as_if_there_were_no_handler() -> None:
    with _interrupts.deferred():
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


FULL = OSError(errno.ENOSPC, "No space left on device", "weights.pt")


def raised(error: Exception, first: BaseException, *, how: str) -> Exception:
    """An exception that replaces another one, by ``raise ... from`` or in ``except``."""
    error.__context__ = first
    if how != "while handling":
        error.__cause__ = first if how == "from" else None
    return error


@pytest.mark.parametrize("how", ["from", "while handling"])
def test_a_fault_of_the_machine_is_found_behind_other_exceptions(how: str) -> None:
    error = raised(RuntimeError("Cannot save."), raised(ValueError("weights"), FULL, how=how), how=how)
    assert _interrupts.machine_fault(error) == "weights.pt: No space left on device"
    with pytest.raises(IncompleteError, match=r"^Trial 3: weights\.pt: No space left on device\.$"):
        _interrupts.raise_if_machine(error, "Trial 3")


def test_what_was_decided_or_hidden_is_no_fault_of_the_machine() -> None:
    assert _interrupts.machine_fault(raised(RuntimeError("Too many."), FULL, how="from None")) is None
    refused = raised(InputError("Another process is running."), BlockingIOError(errno.EAGAIN, ""), how="from")
    assert _interrupts.machine_fault(refused) is None
    assert _interrupts.machine_fault(raised(ValueError("wrong"), refused, how="from")) is None


def test_exceptions_that_cause_each_other_are_examined_once() -> None:
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert _interrupts.machine_fault(first) is None


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError("CUDA out of memory."), "there is not enough memory"),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "),
            "a process that loads data",
        ),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset"),
        (IncompleteError("The cluster was lost."), "The cluster was lost"),
    ],
)
def test_what_libraries_say_of_the_machine_is_understood(error: Exception, fault: str) -> None:
    assert (_interrupts.machine_fault(error) or "").startswith(fault)


def test_a_file_that_becomes_too_large_is_not_there_in_part(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    _io.write_text(path, "old")
    with (
        pytest.raises(IncompleteError, match=r"^Cannot write .*checkpoint\.pt: File too large\.$"),
        files_of_at_most(10_000),
    ):
        _io.write(path, lambda file: file.write(bytes(100_000)))
    assert [one.read_text() for one in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(
    ("module", "read"),
    [
        (_io, lambda path: _io.read_array(path, "f")),
        (_io, _io.read_json),
        (_canary, lambda path: _canary.SharedCanary.read(path.parent, "")),
        (_directory, lambda path: _loop.restore(path, None, "run")),
        (_config, _config.load_config),
        (_directory, _directory._digest_of),
    ],
)
def test_a_disk_that_cannot_be_read_does_not_make_a_file_damaged(
    module: ModuleType, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "canary.json").touch()
    for name in ("open_file", "map_array"):
        monkeypatch.setattr(module, name, fail, raising=False)
    with pytest.raises(IncompleteError, match=r"^Cannot read .*canary\.json: Input/output error\.$"):
        read(tmp_path / "canary.json")


def test_a_folder_that_vanishes_during_a_write_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def write_and_lose() -> None:
        with _io.locked(folder):
            _io.write(folder / "a.json", lambda _: folder.rename(tmp_path / "elsewhere"))

    with pytest.raises(IncompleteError, match=r"^The directory .*run has vanished\.$"):
        write_and_lose()


def test_a_folder_that_vanishes_during_a_trial_is_a_fault_of_the_machine(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with _io.locked(folder):
        folder.rename(tmp_path / "elsewhere")
        with pytest.raises(IncompleteError, match=r"^The directory .*run has vanished\.$"):
            _io.append(folder / "trials.jsonl", b"{}")


def test_too_little_memory_for_a_checkpoint_does_not_ask_to_delete_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    torch.save({}, tmp_path / "checkpoint.pt")
    forged(tmp_path)
    monkeypatch.setattr("dpaudit.experiments._loop._loaded", fail)
    with pytest.raises(
        IncompleteError, match=r"^Cannot read .*checkpoint\.pt: there is not enough memory\.$"
    ):
        _loop.restore(tmp_path / "checkpoint.pt", None, "run")  # type: ignore[arg-type]
