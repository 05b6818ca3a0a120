"""``dpaudit reproduce``: measure the paper's tables and figures, print them and write their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dpaudit.cli._console import ProgressDisplay, output, print_json, print_rows, print_table, slim_table
from dpaudit.cli._exit_status import printable, with_partial_json
from dpaudit.cli._options import Json
from dpaudit.errors import DpauditError, IncompleteError, InputError

if TYPE_CHECKING:  # imported when the command is called, so that the others start faster
    from dpaudit.experiments.reproduction import Figure, Reproduced, Scale
    from dpaudit.experiments.trials import Processes


def print_reproduced(console: Console, reproduced: Reproduced, files: Sequence[Path]) -> None:
    """Print the tables, the methods that are not sound, and the paths of the files."""
    data = f", data {', '.join(reproduced.data)}" if reproduced.data else ""
    console.print(
        f"{reproduced.figure.title} (scale {reproduced.scale}, seed {reproduced.seed}{data})", soft_wrap=True
    )
    for table in reproduced.tables:
        console.print()
        console.print(table.title, soft_wrap=True)
        print_table(console, _grid(table.header, table.rows))
    unsound = [
        f"{method}, {rule} ({kind})"
        for (method, rule), kind in reproduced.kinds.items()
        if kind != "confidence"
    ]
    remarks = [f"Not confidence bounds: {'; '.join(unsound)}."] if unsound else []
    for remark in (*remarks, *reproduced.remarks):
        console.print()
        console.print(remark)
    console.print()
    for path in files:
        console.print(printable(f"Written: {path}"), soft_wrap=True)


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    grid = slim_table()
    for index, name in enumerate(header):
        is_text = index == 0 or name in ("method", "lines", "canary", "kind")
        grid.add_column(name, justify="left" if is_text else "right", no_wrap=is_text, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def _measure(figure: Figure, folder: Path, **options: Any) -> tuple[Reproduced, list[Path]]:
    """Measure a figure and write its files."""
    from dpaudit.experiments import reproduction  # noqa: PLC0415
    from dpaudit.report.reproduction import require_plotting, write_reproduced  # noqa: PLC0415

    require_plotting()  # fail before the work, not after it
    with (
        ProgressDisplay() as display,
        display.resumable(lambda: f" after {display.num_done} of {display.num_all} cells of {figure.name}"),
    ):
        reproduced = reproduction.reproduce(
            figure, output=folder, watch=display.part, within=display.within, **options
        )
    return reproduced, write_reproduced(reproduced, folder)


def _measure_each(
    figures: tuple[Figure, ...], folder: Path, **options: Any
) -> Iterator[tuple[Reproduced, list[Path]]]:
    """Measure figures one after another; figures that fail are reported and skipped."""
    failed = []
    for figure in figures:
        typer.echo(f"{figure.name}: {figure.title}", err=True)
        try:
            yield _measure(figure, folder, **options)
        except IncompleteError:  # the next figure would meet the same disk or cluster
            raise
        except DpauditError as error:
            typer.echo(f"{figure.name}: {error}", err=True)
            failed.append(figure.name)
    if failed:
        raise InputError(f"{len(failed)} of {len(figures)} figures failed: {', '.join(failed)}.")


def _pool(num_workers: int | None, device: str, scale: Scale) -> Processes | None:
    """Return a pool of the requested size, or the default pool for long work on a CPU."""
    from dpaudit.experiments.trials import Processes  # noqa: PLC0415

    if num_workers is not None:
        return Processes(num_workers=num_workers) if num_workers > 1 else None
    return Processes() if device == "cpu" and scale != "tiny" else None


_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help='Figure or table (see --list), or "all".',
        show_default=False,
    ),
]
_List = Annotated[bool, typer.Option("--list", help="List all figures and exit.")]
_Scale = Annotated[
    str,
    typer.Option(
        "--scale",
        metavar="tiny|cpu|paper",
        help="tiny takes seconds, cpu at most half an hour on two cores; paper needs a GPU.",
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="DIR",
        help="Directory for results. Default: dpaudit-reproduction/SCALE.",
        show_default=False,
    ),
]
_DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Directory of the official data.", show_default=False),
]
_Embedded = Annotated[
    bool,
    typer.Option("--embedded", help="Train on the digits that come with dpaudit."),
]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]
_Device = Annotated[str, typer.Option("--device", help="Device to train on, such as cuda.")]
_Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="Processes. Default: one per core, or one on a GPU.",
        show_default=False,
    ),
]


def reproduce(
    *,
    name: _Name = None,
    is_list: _List = False,
    scale: _Scale = "cpu",
    folder: _Output = None,
    data_dir: _DataDir = None,
    embedded: _Embedded = False,
    seed: _Seed = 0,
    device: _Device = "cpu",
    num_workers: _Workers = None,
    as_json: Json = False,
) -> None:
    """Reproduce a figure of "Tight Auditing of DP Machine Learning".

    Writes NAME.csv, NAME.png, NAME.svg and NAME.md, which compares the figure
    with the paper and says which numbers are sound. "all" skips figures that
    fail. If the command is interrupted, the same command resumes it.

    Exit status: 0 all written, 2 bad input, 130 interrupted.
    """
    from dpaudit._validate import choice  # noqa: PLC0415  # loads numpy
    from dpaudit.experiments import reproduction  # noqa: PLC0415

    if is_list:
        _print_names(reproduction.FIGURES, as_json=as_json)
        return
    if name is None:
        raise InputError("The name of a figure is missing; list all with: dpaudit reproduce --list")
    if embedded and data_dir is not None:
        raise InputError(f"Pass either --data-dir or --embedded, which ignores {data_dir}, not both.")
    size = reproduction.Scale(choice("scale", scale, [size.value for size in reproduction.Scale]))
    folder = folder or Path("dpaudit-reproduction", size)
    options = {
        "scale": size,
        "data": reproduction.Data(data_dir, embedded),
        "seed": seed,
        "device": device,
        "pool": _pool(num_workers, device, size),
    }
    if name == "all":
        _reproduce_all(_measure_each(reproduction.FIGURES, folder, **options), as_json=as_json)
        return
    reproduced, files = _measure(reproduction.figure_named(name), folder, **options)
    if as_json:
        print_json(_plain(reproduced, files))
    else:
        print_reproduced(output(), reproduced, files)


def _reproduce_all(measured: Iterator[tuple[Reproduced, list[Path]]], *, as_json: bool) -> None:
    entries: list[dict[str, Any]] = []
    values = {"figures": entries}
    with with_partial_json(values):
        for reproduced, files in measured:
            entries.append(_plain(reproduced, files))
            if not as_json:
                print_reproduced(output(), reproduced, files)
    if as_json:
        print_json(values)


def _plain(reproduced: Reproduced, files: list[Path]) -> dict[str, Any]:
    return {**reproduced.to_dict(), "files": [str(path) for path in files]}


def _print_names(figures: tuple[Figure, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"figures": [figure.described() for figure in figures]})
    else:
        print_rows(output(), [(figure.name, figure.title) for figure in figures], indent="")
