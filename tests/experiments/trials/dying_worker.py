"""A worker that dies and leaves a process behind; it is loaded without dpaudit."""

from __future__ import annotations

import os
import subprocess
import sys


def main(descriptor: int) -> None:
    """Tell the other end the number of a new process in a session of its own, and die."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
    os.write(descriptor, f'{{"left": {child.pid}}}\n'.encode())
    os._exit(1)
