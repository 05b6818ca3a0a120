"""The command line.

What torch needs from the environment before Python starts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


_TRAINING = ("run", "demo", "zoo", "reproduce")
_DONE = "DPAUDIT_ENVIRONMENT"  # set by us, so that nothing goes round twice; or by the user, to be left alone
# glibc gives every large block back to the system and asks again, which costs per-example gradients a factor
# of 3 to 4; threads of OpenMP that wait for each other keep a shared core busy with waiting
_WANTED = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
}


def prepare(words: Sequence[str]) -> None:
    """Start the same program once again with these variables, if it is to train and they are not set."""
    missing = {name: value for name, value in _WANTED.items() if name not in os.environ}
    if words and words[0] in _TRAINING and missing and _DONE not in os.environ:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **missing, _DONE: "set"})


def main() -> None:
    """The entry point of ``dpaudit``."""
    try:
        prepare(sys.argv[1:])
        # here, so that an interrupt is quiet while they load as well
        from dpaudit.cli._app import app, prepare_completion  # noqa: PLC0415

        prepare_completion()
        app()
    except KeyboardInterrupt:
        sys.exit(130)
