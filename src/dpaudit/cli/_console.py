"""Output of commands, their progress, and the group that they belong to.

Results go to standard output, progress to standard error: a bar on a terminal, a few lines elsewhere. An
error is reported as one sentence, never as a traceback; ``_exit_status`` decides its status.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

import dpaudit
from dpaudit.cli._exit_status import (
    UNDERPOWERED,
    VIOLATION,
    ExitStatus,
    UnexpectedExitError,
    exit_on_error,
    flush,
)
from dpaudit.errors import IncompleteError, InputError

if TYPE_CHECKING:  # need torch, which is imported when the command is called
    from dpaudit.experiments import Progress as TrainingProgress
    from dpaudit.experiments import Running

EXIT_STATUS: Final = {"NO_VIOLATION": 0, "VIOLATION": VIOLATION, "UNDERPOWERED": UNDERPOWERED}
_UsageError: Any = typer.BadParameter.__base__  # not exported by typer
OUTPUT_PANEL: Final = "Output"
_ALLOWED: Final = {  # what typer says of a value, and what an error says everywhere else
    "a valid number": "a number",
    "a valid integer": "a whole number",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
_PAUSE = 10.0  # seconds between lines within a part of the work, without a terminal


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """Return a console on standard output that prints square brackets literally."""
    return _Console(highlight=False, markup=False, emoji=False)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_rows(console: Console, rows: Sequence[tuple[str, str]], *, indent: str = "  ") -> None:
    """Print labeled lines, wrapped within their own column; a repeated label continues the row above."""
    start = max([7, *(len(label) for label, _ in rows)]) + 2 + len(indent)
    width, previous = min(console.width, 100) - start, None
    for label, text in rows:
        for line in textwrap.wrap(text, max(width, 1), break_on_hyphens=False) or [""]:
            name = "" if label == previous else label
            console.print(Text.assemble((f"{indent}{name}".ljust(start), "dim"), line), soft_wrap=True)
            previous = label


def slim_table(*left: str) -> Table:
    """Return a table without a frame, as narrow as its cells, whose first columns hold text."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; on a console too narrow for it, print one block per row to avoid truncating numbers."""
    if _least_width(table) <= console.width:
        console.print(table)
        return
    names = [str(column.header) for column in table.columns]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        console.print(str(name))
        print_rows(
            console, [(label, str(cell)) for label, cell in zip(names[1:], cells, strict=True) if cell]
        )


def _least_width(table: Table) -> int:
    """Return the width below which a word would be truncated."""
    gaps = 2 * (len(table.columns) - 1)  # two spaces between columns
    return sum(map(_least_column, table.columns)) + gaps


def _least_column(column: Column) -> int:
    texts = map(str, (column.header, *column.cells))
    unbreakable = texts if column.no_wrap else (word for text in texts for word in text.split())
    return max(map(cell_len, unbreakable), default=0)


@contextmanager
def working(text: str) -> Iterator[None]:
    """Announce a slow operation: with a spinner on a terminal, with a line of text elsewhere."""
    console = Console(stderr=True, highlight=False, markup=False)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        typer.echo(text, err=True)
        yield


class ProgressDisplay:
    """A display of steps, speed, remaining time, and the live bound next to the claim."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._bar = _bar(console) if console.is_terminal else None
        self._line = -1
        self._speed = _Speed()
        self._last_line, self._shown = time.monotonic(), ""
        self.position: str | None = None
        """The last completed step or model; None before the first."""
        self.num_done, self.num_all = 0, 0
        """The number of finished parts of the work, and of all parts; see :meth:`part`."""

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

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
        self._put(text, is_rare=True, total=num_all, completed=num_done, visible=True)

    def part(self, num_done: int, num_all: int, text: str) -> None:
        """Show the start of a part of the work, such as a cell of a figure, that is stored once finished."""
        self.num_done, self.num_all = num_done, num_all
        self.show(num_done, num_all, f"{num_done} of {num_all}: {text}")

    def within(self, text: str) -> None:
        """Show progress within the part that was shown last."""
        self._put(f"{self._shown}: {text}", is_rare=True)

    def show(self, num_done: int, num_all: int, text: str) -> None:
        """Show the completed fraction and a message."""
        self._shown = text
        self._put(text, is_rare=False, total=num_all, completed=num_done, visible=True)

    def _put(self, text: str, *, is_rare: bool, **numbers: Any) -> None:
        """Update the bar; without one, print a line, but rarely where there are many of them."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=text, **numbers)
            return
        now = time.monotonic()
        if is_rare and now - self._last_line < _PAUSE:
            return
        self._last_line = now if is_rare else self._last_line
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
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task("", total=None, visible=False)
    return progress


def _text(steps: TrainingProgress, speed: float | None) -> str:
    phrases = [f"step {steps.num_done:,} of {steps.num_steps:,}"]
    if speed is not None:
        left = (steps.num_steps - steps.num_done) / speed
        phrases += [f"{_speed(speed)} steps/s", f"{_duration(left)} left"]
    if steps.live is not None:
        phrases.append(str(steps.live))
    return ", ".join(phrases)


def _trials_text(running: Running) -> str:
    progress = running.progress
    phrases = [f"{progress.num_done:,} of {progress.num_trials:,} models"]
    if progress.num_failed:
        phrases.append(f"{progress.num_failed:,} failed")
    if progress.models_per_second is not None and progress.seconds_left is not None:
        phrases += [
            f"{_speed(progress.models_per_second)} models/s",
            f"{_duration(progress.seconds_left)} left",
        ]
    if running.epsilon is not None:
        beside = "" if running.claimed is None else f", claimed {running.claimed:.3g}"
        phrases.append(f"epsilon about {running.epsilon:.3g} so far (valid only at the end){beside}")
    return ", ".join(phrases)


def _speed(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


_TYPE_NAMES = {float: "NUMBER", int: "N", str: "NAME"}


def _with_plain_types(params: list[Any], help_panel: str | None = None) -> list[Any]:
    """Name what an option takes by a word: typer shows ``<bool>`` for flags, ``<list[Path]>`` for paths."""
    for param in params:
        is_option, shown = param.opts[0].startswith("-"), param.metavar
        if shown is None:
            shown = "" if param.is_flag else _TYPE_NAMES[param.type_descriptor.annotation]
        word = shown if is_option else ""  # arguments have a column for their name
        param.display_type_rich = lambda word=word, **_: word
        param._get_number_range_help_str = str
        if param.name == "help":
            param.rich_help_panel, param.help = help_panel, "Show this help."
    return params


class DecidingCommand(TyperCommand):
    """A command that ends with ``ExitStatus``: an exit of typer comes from other code, as the audited one."""

    def get_params(self, ctx: Any) -> Any:
        return _with_plain_types(super().get_params(ctx), OUTPUT_PANEL)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit as error:
            raise UnexpectedExitError(f"typer.Exit({error.exit_code!r}) was raised") from error


class SentenceErrorGroup(TyperGroup):
    """A group of commands that reports errors as sentences instead of tracebacks."""

    def get_params(self, ctx: Any) -> Any:
        return _with_plain_types(super().get_params(ctx))

    def main(self, args: Any = None, prog_name: str | None = None, *_: Any, **__: Any) -> Any:
        """Run a command without typer's own handling of errors, signals and exits."""
        words, name = sys.argv[1:] if args is None else list(args), prog_name or "dpaudit"
        ctx: Any = None
        with exit_on_error(tuple(words)):
            try:
                self._main_shell_completion({}, name)
                with self.make_context(name, words.copy()) as ctx:
                    self.invoke(ctx)
            except typer.Exit as error:
                raise ExitStatus(error.exit_code) from error
            except _UsageError as error:
                raise InputError(_usage(error, ctx, words)) from error
            finally:
                flush()

    def _main_shell_completion(self, *words: Any, **options: Any) -> None:
        try:
            super()._main_shell_completion(*words, **options)
        except SystemExit as error:  # of typer, which has printed the completions
            raise ExitStatus(error.code) from error


def _usage(error: Any, ctx: Any, words: Sequence[str]) -> str:
    """Return what is wrong about the arguments, and the command that prints the help."""
    message = " ".join(error.format_message().replace("Value error, ", "").split())
    message = message.replace("Got unexpected extra argument(s)", "There are too many arguments:")
    text = (_refused_option(error, words) or message).rstrip(".")
    if error.ctx is not None:
        return f"{text}{'' if text.endswith('?') else '.'} See: {error.ctx.command_path} --help"
    if ctx is None or ctx.invoked_subcommand is None:
        return f"{text}. See: dpaudit --help"
    return f"{text}.{_option_help(error, ctx)} See: {ctx.command_path} {ctx.invoked_subcommand} --help"


def _refused_option(error: Any, words: Sequence[str]) -> str:
    """Return what is wrong with an option worded like all other errors; empty if it is something else."""
    if name := getattr(error, "option_name", None):
        near = getattr(error, "possibilities", None)
        hint = f". Did you mean {near[0]}?" if near else ""
        return f"{name} needs a value" if "requires" in error.message else f"There is no option {name}{hint}"
    match = re.match(rf"Input should be ({'|'.join(_ALLOWED)})(?: (\S+)$)?", error.message)
    if match is None:
        return ""
    option = error.param.opts[0]
    values = [word.partition("=")[2] for word in words if word.startswith(f"{option}=")]
    values += [words[place + 1] for place, word in enumerate(words[:-1]) if word == option]
    return f"{option} must be {' '.join(filter(None, (_ALLOWED[match[1]], match[2])))}, got {values[-1]}"


def _option_help(error: Any, ctx: Any) -> str:
    """Return the help of an option whose value is missing: it may list the possible values."""
    name, command = getattr(error, "option_name", None), ctx.command.get_command(ctx, ctx.invoked_subcommand)
    texts = [option.help for option in command.params if name in option.opts and option.help]
    return f" {texts[0].rstrip('.')}." if texts else ""


def dpaudit_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Test whether differentially private training delivers the privacy it claims.

    Start with: dpaudit demo
    """
    if version:
        typer.echo(f"dpaudit {dpaudit.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
