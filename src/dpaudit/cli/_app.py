"""The commands, gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

import dpaudit
from dpaudit.cli._completion import completion
from dpaudit.cli._demo import demo
from dpaudit.cli._exit import Sentences
from dpaudit.cli._plan import plan
from dpaudit.cli._report import report
from dpaudit.cli._reproduce import reproduce
from dpaudit.cli._run import run
from dpaudit.cli._scores import scores
from dpaudit.cli._zoo import zoo

__all__ = ["app"]

app = typer.Typer(
    cls=Sentences,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Audit": (run, scores),
    "Plan and compare": (plan, zoo, reproduce),
    "Show": (report, demo, completion),
}
for group, commands in _GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group)(command)


@app.callback(invoke_without_command=True)
def dpaudit_command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Tell whether differentially private training gives the privacy it claims."""
    if version:
        typer.echo(f"dpaudit {dpaudit.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
