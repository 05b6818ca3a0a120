"""Progress of long commands: a bar on a terminal, a few lines elsewhere, always on standard error."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from dpaudit.errors import IncompleteError

if TYPE_CHECKING:  # need torch, which is imported when the command is called
    from dpaudit.experiments import Progress as TrainingProgress
    from dpaudit.experiments import Running


_PAUSE = 10.0  # seconds between lines within a part of the work, without a terminal


class ProgressDisplay:
    """A display of steps, speed, remaining time, and the live bound next to the claim."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._stack = ExitStack()
        self._bar = _bar(console) if console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=None, visible=False)
        self._line = -1
        self._speed = _Speed()
        self._last_line, self._shown = time.monotonic(), ""
        self.position: str | None = None
        """The last completed step or model; None before the first."""
        self.num_done, self.num_all = 0, 0
        """The number of finished parts of the work, and of all parts; see :meth:`part`."""

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @contextmanager
    def resumable(self, describe: Callable[[], str | None]) -> Iterator[None]:
        """Add what is finished, unless ``describe`` returns None, to the sentence after an interrupt."""
        try:
            yield
        except (KeyboardInterrupt, IncompleteError) as error:
            if (progress := describe()) is not None:
                error.add_note(progress)
            raise

    def say(self, text: str) -> None:
        """Print a separate line."""
        if self._bar is None:
            typer.echo(text, err=True)
        else:
            self._bar.console.print(text)

    def __call__(self, steps: TrainingProgress) -> None:
        """Show the progress of a training run after a step."""
        self.position = f"step {steps.num_done:,}"
        speed = self._speed.after(steps)
        if self._is_due(steps.num_done, steps.num_steps):
            self.show(steps.num_done, steps.num_steps, _text(steps, speed))

    def trials(self, running: Running) -> None:
        """Show the progress of a run of many models after a group of them."""
        progress = running.progress
        self.position = f"{progress.num_done:,} of {progress.num_trials:,} models"
        ended = progress.num_trials - progress.num_left
        if self._is_due(ended, progress.num_trials):
            self.show(ended, progress.num_trials, _trials_text(running))

    def _is_due(self, num_done: int, num_all: int) -> bool:
        """Return whether to show progress: always with a bar, otherwise at every tenth."""
        line = _tenth(num_done, num_all)
        if self._bar is None and line == self._line:
            return False
        self._line = line
        return True

    def crafting(self, num_done: int, num_all: int) -> None:
        """Show the progress of crafting canaries, which may take long before the first training step."""
        text = f"crafting canaries, step {num_done:,} of {num_all:,}"
        if self._bar is not None:
            self.show(num_done, num_all, text)
        else:
            self._echo_rarely(text)

    def part(self, num_done: int, num_all: int, text: str) -> None:
        """Show the start of a part of the work, such as a cell of a figure, that is stored once finished."""
        self.num_done, self.num_all = num_done, num_all
        self.show(num_done, num_all, f"{num_done} of {num_all}: {text}")

    def within(self, text: str) -> None:
        """Show progress within the part that was shown last."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"{self._shown}: {text}")
        else:
            self._echo_rarely(f"{self._shown}: {text}")

    def show(self, num_done: int, num_all: int, text: str) -> None:
        """Show the completed fraction and a message."""
        self._shown = text
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=num_all, completed=num_done, description=text, visible=True)
        else:
            typer.echo(text, err=True)

    def _echo_rarely(self, text: str) -> None:
        if (now := time.monotonic()) - self._last_line >= _PAUSE:
            self._last_line = now
            typer.echo(text, err=True)


class _Speed:
    """Steps per second in the latest part of a training run: the first step also loads libraries."""

    def __init__(self) -> None:
        self._marks: deque[TrainingProgress] = deque(maxlen=2)

    def after(self, steps: TrainingProgress) -> float | None:
        """Return the speed since the second-to-last mark; None until two steps have ended."""
        if self._marks and steps.num_new < self._marks[-1].num_new:  # another run has begun
            self._marks.clear()
        tenths = [_tenth(mark.num_done, mark.num_steps) for mark in (steps, *self._marks)]
        if steps.num_new > 0 and (not self._marks or tenths[0] != tenths[-1]):
            self._marks.append(steps)
        if not self._marks:
            return None
        seconds = steps.seconds - self._marks[0].seconds
        return (steps.num_new - self._marks[0].num_new) / seconds if seconds > 0 else None


def _tenth(num_done: int, num_all: int) -> int:
    return num_done * 10 // num_all


def _bar(console: Console) -> Progress:
    columns = BarColumn(bar_width=24), TaskProgressColumn(), TextColumn("{task.description}")
    return Progress(*columns, console=console, transient=True)


def _text(steps: TrainingProgress, speed: float | None) -> str:
    phrases = [f"step {steps.num_done:,} of {steps.num_steps:,}"]
    if speed is not None:
        left = (steps.num_steps - steps.num_done) / speed
        phrases += [f"{speed:.3g} steps/s", f"{_duration(left)} left"]
    if steps.live is not None:
        phrases.append(str(steps.live))
    return ", ".join(phrases)


def _trials_text(running: Running) -> str:
    progress = running.progress
    phrases = [f"{progress.num_done:,} of {progress.num_trials:,} models"]
    if progress.num_failed:
        phrases.append(f"{progress.num_failed:,} failed")
    if progress.models_per_second is not None and progress.seconds_left is not None:
        phrases += [f"{progress.models_per_second:.3g} models/s", f"{_duration(progress.seconds_left)} left"]
    if running.epsilon is not None:
        beside = "" if running.claimed is None else f", claimed {running.claimed:.3g}"
        phrases.append(f"epsilon about {running.epsilon:.3g} so far (valid only at the end){beside}")
    return ", ".join(phrases)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
