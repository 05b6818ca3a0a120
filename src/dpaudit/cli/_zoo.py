"""``dpaudit zoo``: faults that were public, and what catches them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpaudit.cli._console import output, print_json
from dpaudit.cli._options import Json
from dpaudit.cli._progress import Watching
from dpaudit.cli._zoo_table import print_entries, print_zoo

__all__ = ["zoo"]

_Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Run this entry; may be given several times."),
]
_List = Annotated[bool, typer.Option("--list", help="Print the names of all entries, and run none.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="The chance of trainings and canaries.")]
_Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Where finished entries are kept.")]


def zoo(
    *,
    only: _Only = None,
    is_list: _List = False,
    seed: _Seed = 0,
    folder: _Output = Path("dpaudit-zoo"),
    as_json: Json = False,
) -> None:
    """Put faults that were public into trainings, and show what catches them.

    Each is run beside a correct twin. Called again, it goes on where it
    was interrupted.

    Exit status: 0 every fault is caught, or known not to be, and no correct
    twin is flagged; 1 otherwise, 2 bad input, 130 interrupted. A correct
    zoo ends with 1 because of a twin in 5 % of seeds at most.
    """
    if is_list:
        _listed(only or [], as_json=as_json)
        return
    values = _watched(only or [], seed, folder)
    if as_json:
        print_json(values)
    else:
        print_zoo(output(), values, folder)
    if not values["is_as_expected"]:
        raise typer.Exit(1)


def _listed(only: list[str], *, as_json: bool) -> None:
    import dpaudit.zoo as package  # noqa: PLC0415  # loads torch

    entries = [entry.described() for entry in package.chosen(package.ENTRIES, only)]
    if as_json:
        print_json({"entries": entries})
    else:
        print_entries(output(), entries)


def _watched(only: list[str], seed: int, folder: Path) -> dict[str, Any]:
    import dpaudit.zoo as package  # noqa: PLC0415  # loads torch

    entries = package.chosen(package.ENTRIES, only)
    num_done = 0
    with Watching() as watching:

        def watch(done: int, total: int, text: str) -> None:
            nonlocal num_done
            num_done = done
            watching.show(done, total, f"{done} of {total}: {text}")

        try:
            return package.run_zoo(entries, seed=seed, output=folder, watch=watch)
        except KeyboardInterrupt:
            kept = f"{num_done} of {len(entries)} entries are done and kept in {folder}"
            watching.say(f"Interrupted: {kept}. The same command goes on from there.")
            raise
