"""How a training is watched: a bar on a terminal, some lines elsewhere, all on standard error."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

if TYPE_CHECKING:  # it needs torch, which the command imports when it is called
    from dpaudit.experiments import Progress as Steps

__all__ = ["Watching"]

_LINES = 20  # in a run, where there is no terminal
_PAUSE = 10.0  # seconds between lines about canaries, where there is no terminal


class Watching:
    """Shows steps, speed, the time that is left and the live bound beside the claim."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._stack = ExitStack()
        self._bar = _bar(console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=None, visible=False)
        self._line = -1
        self._told = time.monotonic()
        self.newest: Steps | None = None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        if self._bar is None:
            typer.echo(text, err=True)
        else:
            self._bar.console.print(text)

    def __call__(self, steps: Steps) -> None:
        """After every step."""
        self.newest = steps
        line = steps.num_done * _LINES // steps.num_steps
        if self._bar is not None or line != self._line:
            self._line = line
            self.show(steps.num_done, steps.num_steps, _text(steps))

    def crafting(self, num_done: int, num_all: int) -> None:
        """After every step of making canaries, which may take long before the first step of the training."""
        text = f"making canaries, step {num_done:,} of {num_all:,}"
        if self._bar is not None:
            self.show(num_done, num_all, text)
        elif (now := time.monotonic()) - self._told >= _PAUSE:
            self._told = now
            typer.echo(text, err=True)

    def show(self, num_done: int, num_all: int, text: str) -> None:
        """So many of all are done, and what else there is to say of it."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=num_all, completed=num_done, description=text, visible=True)
        else:
            typer.echo(text, err=True)


def _bar(console: Console) -> Progress:
    columns = BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)


def _text(steps: Steps) -> str:
    parts = [f"step {steps.num_done:,} of {steps.num_steps:,}"]
    if steps.num_new > 0 and steps.seconds > 0:
        speed = steps.num_new / steps.seconds
        left = (steps.num_steps - steps.num_done) / speed
        parts += [f"{speed:.3g} steps/s", f"{_duration(left)} left"]
    if steps.live is not None:
        parts.append(str(steps.live))
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
