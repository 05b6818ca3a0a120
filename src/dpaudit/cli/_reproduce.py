"""``dpaudit reproduce``: the paper's tables and figures again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpaudit.cli._console import output, print_json, print_labelled
from dpaudit.cli._options import Json
from dpaudit.cli._reproduce_tables import print_reproduced
from dpaudit.cli._reproducing import Asked
from dpaudit.errors import InputError

if TYPE_CHECKING:  # imported when the command is called, so that the others start faster
    from dpaudit.experiments.reproduction import Figure, Reproduced, Scale

__all__ = ["reproduce"]

_ALL = "all"

_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="A figure or table; --list prints them. all: one after another.",
        show_default=False,
    ),
]
_List = Annotated[bool, typer.Option("--list", help="Print the names of all figures, and run none.")]
_Scale = Annotated[
    str,
    typer.Option(
        "--scale",
        metavar="tiny|cpu|paper",
        help="tiny: seconds; cpu: at most half an hour on two cores; paper: its own numbers, for a GPU.",
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="DIR",
        help="Where files and finished cells go; by default dpaudit-reproduction/SCALE.",
        show_default=False,
    ),
]
_DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="The folder with the official files.", show_default=False),
]
_Embedded = Annotated[
    bool, typer.Option("--embedded", help="Train on the digits that come with dpaudit instead.")
]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="The chance of everything.")]
_Device = Annotated[str, typer.Option("--device", help="Where models are trained, for example cuda.")]
_Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        help="How many cells are measured at a time; by default one for each core, one on a GPU.",
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
    """Reproduce a table or figure of "Tight Auditing of DP Machine Learning".

    Writes NAME.csv, NAME.png, NAME.svg and NAME.md, which sets it beside the
    paper and says which numbers are sound. Called again, it goes on where it
    was interrupted. With all, a figure that cannot be made is told, and the
    next one comes.

    Exit status: 0 all is written, 2 bad input, 130 interrupted.
    """
    from dpaudit.experiments import reproduction  # noqa: PLC0415

    if is_list:
        _listed(reproduction.FIGURES, as_json=as_json)
        return
    if name is None:
        raise InputError("Expected the name of a figure; print all with: dpaudit reproduce --list")
    if embedded and data_dir is not None:
        raise InputError(f"Expected --data-dir or --embedded, got both: --embedded would not use {data_dir}.")
    figures = reproduction.FIGURES if name == _ALL else (reproduction.figure_named(name),)
    size = _scale(scale)
    asked = Asked(
        scale=size,
        place=folder or Path("dpaudit-reproduction", size),
        data=reproduction.Data(data_dir, embedded),
        seed=seed,
        device=device,
        num_workers=num_workers,
    )
    if name == _ALL:
        _all(asked, figures, as_json=as_json)
        return
    found, files = asked.one(*figures)
    if as_json:
        print_json(_plain(found, files))
    else:
        print_reproduced(output(), found, files)


def _all(asked: Asked, figures: tuple[Figure, ...], *, as_json: bool) -> None:
    made = []
    try:
        for found, files in asked.each(figures):
            made.append(_plain(found, files))
            if not as_json:
                print_reproduced(output(), found, files)
    finally:
        if as_json:
            print_json({"figures": made})


def _plain(found: Reproduced, files: list[Path]) -> dict[str, Any]:
    return {**found.to_dict(), "files": [str(path) for path in files]}


def _scale(name: str) -> Scale:
    from dpaudit.experiments.reproduction import Scale  # noqa: PLC0415

    if name not in list(Scale):
        raise InputError(f"Expected --scale to be {', '.join(Scale)}, got {name!r}.")
    return Scale(name)


def _listed(figures: tuple[Figure, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"figures": [figure.described() for figure in figures]})
        return
    print_labelled(output(), [(figure.name, figure.title) for figure in figures])
