"""Bounds and verdicts on a terminal, from the plain values that ``--json`` prints and runs store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpaudit import _validate
from dpaudit.cli._console import print_rows, print_table, slim_table
from dpaudit.report import training_facts
from dpaudit.stats import Block, Estimate, Kind, Power, ThresholdRule, details

_Values: TypeAlias = Mapping[str, Any]

_STYLE = {"VIOLATION": "bold red", "UNDERPOWERED": "bold yellow"}
_NO_BOUND = Block("\u25cb", "NO BOUND", "too few scores, which --normalized or --threshold could use", ())


@dataclass(frozen=True)
class Shown:
    """How much of a result is printed: ``-v``, ``-q`` and ``--all-methods``."""

    verbose: bool = False
    quiet: bool = False
    all_methods: bool = False


def print_examined(console: Console, values: _Values, shown: Shown, *, left_out: bool = False) -> None:
    """Print the block of a result, and as much of the rest as ``shown`` asks for."""
    print_block(console, values, shown)
    if shown.quiet:
        return
    if left_out:
        console.print("\nLarge files stay on disk: methods that need them in memory are skipped.")
    if shown.verbose:
        console.print()
        print_details(console, values)
    if values["methods"] and (shown.verbose or shown.all_methods):
        console.print()
        _print_methods(console, values)


def print_block(console: Console, values: _Values, shown: Shown) -> None:
    """Print what everybody reads of a result: the verdict with both numbers, and a few labeled lines."""
    block = _NO_BOUND if values["bound"] is None else Block.of(values)
    style = _STYLE.get(values["verdict"], "bold")
    console.print(Text.assemble((f"{block.mark} {block.title}", style), f"   {block.numbers}"))
    if shown.quiet:
        return
    console.print()
    print_rows(console, block.lines(width=min(console.width, 100), most=9))
    if block.closing:
        console.print(f"  {block.closing}")
    if not shown.verbose:
        diagnosis = values.get("diagnosis") or {"findings": ()}
        named = [*diagnosis["findings"], *diagnosis.get("to_check", ())][:1]
        names = [f"dpaudit explain {finding['name']}   |   " for finding in named]
        console.print(f"\n  {''.join(names)}--verbose for all details", style="dim")


def print_details(console: Console, values: _Values) -> None:
    """Print all facts of a result, which ``Result.details()`` returns in Python, and those of its run."""
    rows = [] if values["verdict"] is None else [("verdict", f"{values['verdict']}. {values['sentence']}")]
    if values["bound"] is not None:
        power, attack_power = _restored(Power, values, "power"), _restored(Power, values, "attack_power")
        rows += details(values, power, attack_power, _restored(Estimate, values, "estimate"))
    print_rows(console, rows)
    print_rows(console, list(training_facts(values)))


def _restored(kind: Any, values: _Values, key: str) -> Any:
    return None if values.get(key) is None else kind.from_dict(values[key])


def _print_methods(console: Console, values: _Values) -> None:
    texts = dict.fromkeys(text for row in values["methods"] for text in row["assumptions"])
    notes = {text: str(number) for number, text in enumerate(texts, start=1)}
    composed = any(row["training_epsilon"] is not None for row in values["methods"])
    table = _table(values, notes, composed)
    console.print(_heading(values))
    print_table(console, table)
    console.print()
    print_rows(console, [(number, text) for text, number in notes.items()], indent="")
    console.print()
    legend = [
        ("CP", "Clopper-Pearson"),
        ("ZB", "the posterior of Zanella-Beguelin et al."),
        ("joint, betting", "methods of dpaudit"),
        *((str(kind), kind.meaning) for kind in Kind),
    ]
    if composed:
        text = "epsilon of the whole run, if its steps are Gaussian with Poisson sampling as claimed"
        legend.append(("training", text))
    print_rows(console, legend, indent="")


def _heading(values: _Values) -> str:
    sides = values["shapes"]["with_canary"], values["shapes"]["without_canary"]
    present, absent = (" x ".join(f"{size:,}" for size in side) for side in sides)
    level = _validate.percent(values["confidence"])
    return (
        f"scores: {present} with the canary, {absent} without it\n"
        f"lower bounds at the {level} level, epsilon at delta = {values['delta']:g}\n"
    )


def _table(values: _Values, notes: Mapping[str, str], composed: bool) -> Table:
    table = slim_table("method", "threshold")
    for name in (_symbol(values), "epsilon", "training") if composed else (_symbol(values), "epsilon"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "notes"):
        table.add_column(name, no_wrap=True)
    previous = ""
    for row in sorted(values["methods"], key=lambda row: row["kind"] == "heuristic"):
        is_heuristic = row["kind"] == "heuristic"
        if is_heuristic and previous != "heuristic":
            table.add_section()
        previous = row["kind"]
        table.add_row(*_cells(row, notes, composed), style="dim" if is_heuristic else "")
    return table


def _symbol(values: _Values) -> str:
    """Return the name of the parameter in the f-DP rows."""
    symbols = [row["symbol"] for row in values["methods"] if row["name"].startswith("f-DP")]
    symbol = symbols[0] if symbols else "mu"
    return "1/noise" if symbol.startswith("1/") else symbol


def _cells(row: _Values, notes: Mapping[str, str], composed: bool) -> list[str]:
    parameter = "" if row["symbol"] == "epsilon" else _number(row["parameter"])
    rule = ThresholdRule.from_dict(row["threshold_rule"]).label
    cells = [row["name"], rule, parameter, _number(row["epsilon"])]
    training = [_number(row["training_epsilon"])] if composed else []
    return [
        *cells,
        *training,
        row["kind"],
        " ".join(number for text, number in notes.items() if text in row["assumptions"]),
    ]


def _number(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.4g}"
