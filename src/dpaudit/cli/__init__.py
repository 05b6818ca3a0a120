"""The entry point of the command line, and the thread and allocator settings of commands that train."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

import dpaudit
from dpaudit.cli._exit_status import INCOMPLETE, ExitStatus, exit_on_error

__all__ = ["main"]

# By default, glibc returns every large block to the system and requests it again, which makes per-example
# gradients of large models up to 4 times slower. The variable applies to child processes; in this process,
# mallopt sets the parameter to an int, where -1 means no limit.
_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": ("0", -4, 0),
    "MALLOC_TRIM_THRESHOLD_": ("17179869184", -1, -1),
    "MALLOC_TOP_PAD_": ("67108864", -2, 67108864),
}


def prepare(words: Sequence[str]) -> None:
    """Configure threads and allocator for a command that trains, before numpy and torch are loaded.

    Variables set by the user are left unchanged, and so is everything if DPAUDIT_ENVIRONMENT is set.
    """
    trains = bool(words) and words[0] in ("run", "demo", "zoo", "reproduce")
    if not trains or "DPAUDIT_ENVIRONMENT" in os.environ:
        return
    # by default, waiting OpenMP threads spin and occupy a shared core
    for name, value in (("OMP_WAIT_POLICY", "PASSIVE"), ("OMP_NUM_THREADS", "1")):
        os.environ.setdefault(name, value)  # read by libraries when they are loaded
    mallopt = _mallopt()
    for name, (value, parameter, number) in _ALLOCATOR.items():
        if name not in os.environ:
            os.environ[name] = value
            mallopt(parameter, number)


def _mallopt() -> Callable[[int, int], object]:
    """Return ``mallopt`` of the C library, or a function that does nothing if there is none."""
    try:
        mallopt: Callable[[int, int], object] = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, musl and others
        return lambda _parameter, _number: 0
    return mallopt


def _open_closed() -> None:
    """Open standard descriptors that are closed: otherwise a file of the run is opened in their place.

    What libraries print would be written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # has the lowest free number


def _make_printable() -> None:
    """Let every character be printed, escaped if need be, on a terminal of at least one column."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS", "1").strip("0") == "":
        del os.environ["COLUMNS"]  # rich would print nothing


def main() -> None:
    """Run the ``dpaudit`` command line."""
    try:
        _open_closed()
        _make_printable()
        _main(sys.argv[1:])
    except ExitStatus:
        raise
    except KeyboardInterrupt as error:  # before or after a handler decides; Python would exit with 1
        os._exit(128 + getattr(error, "number", signal.SIGINT))
    except BaseException:  # noqa: BLE001  # in the code that decides about the status
        with suppress(Exception):
            traceback.print_exc()
        os._exit(INCOMPLETE)


def _main(words: list[str]) -> None:
    with exit_on_error(words):
        if words == ["--version"]:  # without loading scipy
            sys.stdout.write(f"dpaudit {dpaudit.__version__}\n")
            return
        prepare(words)
        # imported here, so that an interrupt or an error during loading has its status, too
        from dpaudit.cli._app import app  # noqa: PLC0415

        app()
