"""``dpaudit zoo``: publicly reported faults, what catches each, and every method's epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from dpaudit.cli._console import ProgressDisplay, output, print_json, print_rows, print_table, slim_table
from dpaudit.cli._exit_status import ExitStatus, printable
from dpaudit.cli._options import Json

_Values: TypeAlias = Mapping[str, Any]

_SHORT = {
    "f-DP(CP)": "CP",
    "f-DP(ZB)": "ZB",
    "(eps,delta)(CP)": "CP e,d",
    "(eps,delta)(ZB)": "ZB e,d",
    "eps-DP(Katz)": "Katz",
    "f-DP(joint)": "joint",
    "f-DP(betting)": "bets",
}


def print_zoo(console: Console, values: _Values, folder: Path) -> None:
    """Print the table of faults, the table of methods, and unexpected outcomes."""
    run = [entry for entry in values["entries"] if entry["left_out"] is None]
    print_table(console, _faults(run))
    console.print()
    console.print(
        "caught by: bound, a lower bound on epsilon above the claim; replay, the same step repeated on other "
        "data; otherwise the most significant noise or batch test, and +n for n further findings. Bound and "
        "tests share an error rate of 5 %. steps: the first of 5, 10, 20, 50, 100, 200 and all steps that "
        "would have sufficed. twin: ok if nothing flags it; all twins of the zoo share an error rate of 5 %."
    )
    scored = [entry for entry in run if entry["broken"]["methods"]]
    if scored:
        console.print()
        print_table(console, _methods(scored))
        console.print()
        console.print(
            "Lower bounds on epsilon at 95 %, each method alone; * marks those above the claim. CP, ZB, "
            "joint, bets: Gaussian f-DP. e,d: (epsilon, delta)-DP. Katz: delta = 0. Faults without "
            "scores are not listed."
        )
    notes = _notes(values["entries"])
    if notes:
        console.print()
        print_rows(console, notes)
    console.print()
    console.print(_conclusion(values))
    console.print(printable(f"Written: {folder}"), soft_wrap=True)


def _faults(entries: list[_Values]) -> Table:
    table = slim_table("fault")
    for name in ("claim", "bound", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("caught by", overflow="fold")
    table.add_column("twin", no_wrap=True)
    for entry in entries:
        broken, twin = entry["broken"], entry["correct"]
        bound = broken["bound"]
        table.add_row(
            entry["name"],
            _number(broken["claimed_epsilon"]),
            "" if bound is None else _number(bound["epsilon"]),
            str(broken["steps_needed"] or ""),
            _caught_by(broken) or "NOT CAUGHT",
            _caught_by(twin) or "ok",
            style="" if entry["is_as_expected"] else "bold red",
        )
    return table


def _caught_by(judged: _Values) -> str:
    """Return the bound, a replay and the most significant finding: the others often follow from it."""
    findings = [finding["name"] for finding in (judged["tests"] or {"findings": []})["findings"]]
    names = [name for name in judged["caught_by"] if name not in findings[1:]]
    return ", ".join(names) + (f" +{len(findings) - 1}" if len(findings) > 1 else "")


def _methods(entries: list[_Values]) -> Table:
    table = slim_table("fault")
    for name in _SHORT.values():
        table.add_column(name, justify="right", no_wrap=True)
    for entry in entries:
        by_name = {method["name"]: method for method in entry["broken"]["methods"]}
        table.add_row(entry["name"], *(_cell(by_name[name]) if name in by_name else "" for name in _SHORT))
    return table


def _cell(method: _Values) -> str:
    return _number(method["epsilon"]) + ("*" if method["is_violation"] else " ")


def _number(value: float | str) -> str:
    return f"{float(value):.3g}"


def _notes(entries: list[_Values]) -> list[tuple[str, str]]:
    left_out = [(entry["name"], f"skipped. {entry['left_out']}") for entry in entries if entry["left_out"]]
    not_caught = [
        (entry["name"], f"not caught. {entry['not_caught']}")
        for entry in entries
        if entry["left_out"] is None and entry["not_caught"] and not entry["broken"]["caught_by"]
    ]
    return left_out + not_caught


def _conclusion(values: _Values) -> str:
    wrong = [entry["name"] for entry in values["entries"] if not entry["is_as_expected"]]
    if wrong:
        return f"Not as expected: {', '.join(wrong)}."
    count = sum(entry["left_out"] is None for entry in values["entries"])
    if count == 1:
        return "The fault and its twin are as expected."
    return f"All {count} faults and their twins are as expected."


_Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="NAME", help="Run only this bug. Repeatable."),
]
_List = Annotated[bool, typer.Option("--list", help="List all bugs and exit.")]
_Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed.")]
_Output = Annotated[Path, typer.Option("--output", metavar="DIR", help="Directory for results.")]


def zoo(
    *,
    only: _Only = None,
    is_list: _List = False,
    seed: _Seed = 0,
    folder: _Output = Path("dpaudit-zoo"),
    as_json: Json = False,
) -> None:
    """Run published bugs of DP training, and show what detects them.

    Each bug runs beside a correct twin. If the command is interrupted, the same
    command resumes it.

    Exit status: 0 if every bug is detected or listed as undetectable, and no
    twin is flagged (at most 5 % of seeds flag one); 1 if not; 2 bad input;
    130 interrupted.
    """
    if is_list:
        _print_names(only or [], as_json=as_json)
        return
    values = _run(only or [], seed, folder)
    if as_json:
        print_json(values)
    else:
        print_zoo(output(), values, folder)
    if not values["is_as_expected"]:
        raise ExitStatus(1)


def _print_names(only: list[str], *, as_json: bool) -> None:
    import dpaudit.zoo as package  # noqa: PLC0415  # loads torch

    entries = [entry.described() for entry in package.chosen(package.ENTRIES, only)]
    if as_json:
        print_json({"entries": entries})
    else:
        print_rows(output(), [(str(entry["name"]), str(entry["wrong"])) for entry in entries], indent="")


def _run(only: list[str], seed: int, folder: Path) -> dict[str, Any]:
    import dpaudit.zoo as package  # noqa: PLC0415  # loads torch

    entries = package.chosen(package.ENTRIES, only)
    with (
        ProgressDisplay() as display,
        display.resumable(lambda: f" after {display.num_done} of {len(entries)} entries"),
    ):
        return package.run_zoo(entries, seed=seed, output=folder, watch=display.part)
