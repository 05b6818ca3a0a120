"""What ends work from outside: signals, and faults of the machine.

One handler serves SIGINT, SIGTERM and SIGHUP in every command and pool. Outside of :func:`deferred` a signal
raises :class:`Interrupted` at once; inside, the work notices it after the current step or trial. A second
signal raises at once, a third ends the process. In a script that calls dpaudit, the signal then takes the
effect that it has in the rest of the script.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from dpaudit.errors import DpauditError, IncompleteError, message_of

_SIGNALS: Final = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_STOPPING: Final = b"Stopping after the current step or trial; a second signal stops at once.\n"
_AGAIN_SECONDS = 0.01  # until the finalizer in which a signal arrived has ended
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
# others, such as a refused connection, are errors of the code that raised them
_OF_MACHINE: Final = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNRESET,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOLCK,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EPIPE,
        errno.ESTALE,
    }
)
_NO_MEMORY: Final = "there is not enough memory"
# what a RuntimeError of torch or JAX says, in lower case, and what it means
_OF_LIBRARIES: Final = {
    "allocate memory": _NO_MEMORY,
    "out of memory": _NO_MEMORY,
    "bad_alloc": _NO_MEMORY,
    "resource_exhausted": _NO_MEMORY,
    "pytorchstreamwriter failed writing": "a file could not be written, as on a full disk",
    "is killed by signal": "a process that loads data was killed",
}


def machine_fault(error: BaseException) -> str | None:
    """Return the fault of the machine behind an exception, as part of a sentence; None if there is none.

    Training code and libraries may replace the exception of a full disk with another one, so its causes are
    examined, too, up to an exception of dpaudit, for which this was decided when it was raised.
    """
    for cause in _with_causes(error):
        if (fault := _reported_fault(cause)) is not None:
            return fault
        if isinstance(cause, DpauditError):
            return None
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its cause, the cause of that and so on; they may form a cycle."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ if current.__suppress_context__ else current.__context__


def _reported_fault(error: BaseException) -> str | None:
    if isinstance(error, IncompleteError):
        return str(error).rstrip(".")
    if isinstance(error, MemoryError):
        return _NO_MEMORY
    if isinstance(error, RuntimeError):
        message = message_of(error).lower()
        return next((fault for words, fault in _OF_LIBRARIES.items() if words in message), None)
    if isinstance(error, OSError) and error.errno in _OF_MACHINE:
        place = "" if error.filename is None else f"{error.filename}: "
        return f"{place}{error.strerror or error}"
    return None


def is_about_input(error: OSError) -> bool:
    """Return whether an error is about a path that the user named, and not about the machine."""
    return error.errno in _OF_INPUT


def raise_if_machine(error: BaseException, doing: str) -> None:
    """Raise ``IncompleteError`` if an exception reports a fault of the machine."""
    if (fault := machine_fault(error)) is not None:
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
        self.is_resumed = True
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

    def repeat(self) -> None:
        """Handle the last signal once more, in a moment: Python has dropped the exception that it raised."""
        self._count -= 1
        timer = threading.Timer(_AGAIN_SECONDS, os.kill, (self._pid, self.number))
        timer.daemon = True
        timer.start()

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
        if self._depth == 0:
            raise_if_requested()  # by a signal that was received after the work looked for the last time


_STATE: Final = _SignalState()
_IS_HANDLED: Final = threading.Lock()  # held while the handler is installed


@contextmanager
def handled() -> Iterator[bool]:
    """Install the handler, unless it is installed or this is not the main thread, which alone may do so.

    Yield whether it was installed here. SIGHUP stays ignored if it is, as after ``nohup``.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not _IS_HANDLED.acquire(blocking=False):
        yield False
        return
    before: dict[int, Any] = {}
    report = sys.unraisablehook
    try:
        _STATE.reset()
        sys.unraisablehook = partial(_dropped, report)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, _STATE.handle)
        yield True
    finally:
        sys.unraisablehook = report
        for changed, handler in before.items():
            signal.signal(changed, signal.SIG_DFL if handler is None else handler)
        _IS_HANDLED.release()


def _dropped(report: Callable[[Any], object], unraisable: Any) -> None:
    """Repeat a signal that arrived in a finalizer or a callback, as imports have: Python drops its exception.

    The command would run on as if there had been no signal.
    """
    if isinstance(unraisable.exc_value, Interrupted):
        _STATE.repeat()
    else:
        report(unraisable)


@contextmanager
def deferred(limit: float | None = None) -> Iterator[None]:
    """Defer the first signal: the code inside polls :func:`requested` or :func:`raise_if_requested`.

    After ``limit`` seconds, and at the end of the block, the signal takes effect in any case: ``Interrupted``
    within a command, which turns it into a status; elsewhere, the effect that it would have had before.
    """
    is_script = False
    try:
        with handled() as is_script, _STATE.defer(limit):
            yield
    except BaseException as error:
        if is_script and _STATE.number is not None:
            _deliver(_STATE.number, error)
        raise


def _deliver(number: int, error: BaseException) -> NoReturn:
    """Send a signal to the handler of the script that called dpaudit, now that its work is saved.

    Python's own handler of SIGINT raises ``KeyboardInterrupt``. Without a handler, SIGTERM and SIGHUP end the
    process; an exception would end it with 1, which of a command means a violation.
    """
    if not isinstance(error, KeyboardInterrupt) and signal.getsignal(number) is signal.SIG_DFL:
        traceback.print_exception(error)  # the process ends here, and the last state could not be saved
    signal.raise_signal(number)
    # The handler has returned. Python ends with 130 after this class, but with 1 after a subclass.
    raise KeyboardInterrupt from error


def requested() -> int | None:
    """Return the number of the first signal received; None if there was none."""
    return _STATE.number if _IS_HANDLED.locked() else None


def raise_if_requested() -> None:
    """Raise ``Interrupted`` if a signal was received."""
    if (number := requested()) is not None:
        raise Interrupted(number)


def note_folder(folder: Path, *, is_resumed: bool) -> None:
    """Note the directory in which this process keeps its work, and whether the next one resumes it."""
    _STATE.folder, _STATE.is_resumed = folder.absolute(), is_resumed


def work_folder() -> Path | None:
    """Return the directory in which this command keeps its work; None before it has one."""
    return _STATE.folder


def is_work_resumed() -> bool:
    """Return whether the same command resumes the work in its directory, instead of starting over."""
    return _STATE.is_resumed
