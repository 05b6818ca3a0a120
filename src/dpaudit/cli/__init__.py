"""The command line: its entry point, and how a process that trains uses memory and threads."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence

__all__ = ["main"]

_TRAINING = ("run", "demo", "zoo", "reproduce")
_SWITCH = "DPAUDIT_ENVIRONMENT"  # set by the user, to leave everything alone
# threads of OpenMP that wait for each other keep a shared core busy with waiting
_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
# glibc returns every large block to the system and asks for it again, which makes per-example gradients of
# large models up to 4 times slower. The variable is for processes that are started from here; this one is
# set by the parameter of mallopt and its value, which is an int, and -1 for no limit.
_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": ("0", -4, 0),
    "MALLOC_TRIM_THRESHOLD_": ("17179869184", -1, -1),
    "MALLOC_TOP_PAD_": ("67108864", -2, 67108864),
}


def prepare(words: Sequence[str]) -> None:
    """Set threads and allocator for a command that trains, before numpy and torch are loaded.

    Variables that the user has set stay as they are.
    """
    if not words or words[0] not in _TRAINING or _SWITCH in os.environ:
        return
    for name, value in _THREADS.items():
        os.environ.setdefault(name, value)  # libraries read it when they are loaded
    mallopt = _mallopt()
    for name, (value, parameter, number) in _ALLOCATOR.items():
        if name not in os.environ:
            os.environ[name] = value
            mallopt(parameter, number)


def _mallopt() -> Callable[[int, int], object]:
    """Return the C library's function, or one that does nothing where it has none."""
    try:
        found: Callable[[int, int], object] = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # macOS, musl and others
        return lambda _parameter, _number: 0
    return found


def main() -> None:
    """Run the command line, as ``dpaudit`` does."""
    try:
        prepare(sys.argv[1:])
        # here, so that an interrupt is quiet while they load as well
        from dpaudit.cli._app import app, prepare_completion  # noqa: PLC0415

        prepare_completion()
        app()
    except KeyboardInterrupt:
        sys.exit(130)
