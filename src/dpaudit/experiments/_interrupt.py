"""Ctrl-C that waits for the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupt", "between_steps"]

_SIGNALS = signal.SIGINT, signal.SIGTERM


class Interrupt:
    """Whether somebody asked to stop. The second time is at once, without waiting."""

    def __init__(self) -> None:
        self.is_asked = False

    def ask(self, _signal: int, _frame: FrameType | None) -> None:
        """What a signal calls."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True


@contextmanager
def between_steps() -> Iterator[Interrupt]:
    """Inside, an interrupt only asks: half a step in a checkpoint would make another run of it."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # signals are the main thread's
        return
    before = {number: signal.signal(number, interrupt.ask) for number in _SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
