"""What ends work from outside: signals, and faults of the machine.

One handler serves SIGINT, SIGTERM and SIGHUP in every command and pool. Outside of :func:`deferred` a signal
raises :class:`Interrupted` at once; inside, the work notices it after the current step or trial. A second
signal raises at once, a third ends the process.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dpaudit.errors import IncompleteError, InputError

_SIGNALS: Final = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_STOPPING: Final = b"Stopping after the current step or trial; a second signal stops at once.\n"
# errors about a path that the user named, and that another path or permission would avoid
_OF_INPUT: Final = frozenset(
    {
        errno.EACCES,
        errno.EEXIST,
        errno.EINVAL,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ENOTEMPTY,
        errno.EPERM,
        errno.EROFS,
    }
)
_OF_MACHINE: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ESTALE,
    }
)
_NO_MEMORY: Final = "allocate memory", "out of memory", "bad_alloc", "resource_exhausted"  # torch and JAX
_NO_DISK: Final = "pytorchstreamwriter failed writing"


def machine_fault(error: BaseException) -> str | None:
    """Return the fault of the machine that an exception reports, as part of a sentence; None for others."""
    if isinstance(error, IncompleteError):
        return str(error).rstrip(".")
    if isinstance(error, MemoryError):
        return "there is not enough memory"
    if isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY):
        return "there is not enough memory"
    if isinstance(error, RuntimeError) and _NO_DISK in str(error).lower():
        return "a file could not be written, as on a full disk"
    if isinstance(error, OSError) and error.errno in _OF_MACHINE:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror or error}"
    return None


def is_about_input(error: OSError) -> bool:
    """Return whether an error is about a path that the user named, and not about the machine."""
    return error.errno in _OF_INPUT


def raise_if_machine(error: BaseException, doing: str) -> None:
    """Raise ``IncompleteError`` if an exception reports a fault of the machine."""
    if (fault := machine_fault(error)) is not None and not isinstance(error, InputError):
        raise IncompleteError(f"{doing}: {fault}.") from error


class Interrupted(KeyboardInterrupt):
    """A signal has asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _SignalState:
    """The signals received by this process, how to react to them, and the directory that it works in."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.folder: Path | None = None
        self._count, self._depth, self._pid = 0, 0, 0
        self._limit: float | None = None
        self._timer: threading.Timer | None = None

    def reset(self) -> None:
        """Forget earlier signals; called before the handler is installed."""
        self.number, self.folder, self._count, self._pid = None, None, 0, os.getpid()

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child of the audited code: it ends as without a handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._count += 1
        self.number = self.number or number
        if self._count > 2:
            os._exit(128 + self.number)
        if self._count > 1 or self._depth == 0:
            raise Interrupted(self.number)
        self._announce()

    def _announce(self) -> None:
        with suppress(OSError):
            os.write(2, _STOPPING)  # sys.stderr may be in use by the interrupted code
        if self._limit is not None:
            self._timer = threading.Timer(self._limit, os.kill, (self._pid, self.number))
            self._timer.daemon = True
            self._timer.start()

    @contextmanager
    def defer(self, limit: float | None) -> Iterator[None]:
        before, self._limit = self._limit, limit
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._limit = before
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None


_STATE: Final = _SignalState()
_IS_HANDLED: Final = threading.Lock()  # held while the handler is installed


@contextmanager
def handled() -> Iterator[None]:
    """Install the handler, unless it is installed or this is not the main thread, which alone may do so.

    SIGHUP stays ignored if it is, as after ``nohup``.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not _IS_HANDLED.acquire(blocking=False):
        yield
        return
    before: dict[int, Any] = {}
    try:
        _STATE.reset()
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, _STATE.handle)
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, signal.SIG_DFL if handler is None else handler)
        _IS_HANDLED.release()


@contextmanager
def deferred(limit: float | None = None) -> Iterator[None]:
    """Defer the first signal: the code inside polls :func:`requested` or :func:`raise_if_requested`.

    After ``limit`` seconds, the signal takes effect in any case.
    """
    with handled(), _STATE.defer(limit):
        yield


def requested() -> int | None:
    """Return the number of the first signal received; None if there was none."""
    return _STATE.number if _IS_HANDLED.locked() else None


def raise_if_requested() -> None:
    """Raise ``Interrupted`` if a signal was received."""
    if (number := requested()) is not None:
        raise Interrupted(number)


def note_folder(folder: Path) -> None:
    """Note the directory in which this process keeps its work, for messages."""
    _STATE.folder = folder.absolute()


def work_folder() -> Path | None:
    """Return the directory in which this command keeps its work; None before it has one."""
    return _STATE.folder
