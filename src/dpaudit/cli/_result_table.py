"""How bounds and verdicts look: from the same plain values that ``--json`` prints and a run stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpaudit.cli._console import print_labelled, print_table, slim_table
from dpaudit.stats import Power, ThresholdRule, Verdict

_Values: TypeAlias = Mapping[str, Any]

_STYLE = {Verdict.VIOLATION: "bold red", Verdict.UNDERPOWERED: "bold yellow", Verdict.NO_VIOLATION: "bold"}
_LEGEND = (
    "CP: Clopper-Pearson. ZB: the posterior of Zanella-Beguelin et al. joint, betting: dpaudit's own. "
    "confidence: above the truth at most as often as stated. credible: depends on a prior. heuristic: no "
    "error rate is known."
)
_MORE = "dpaudit plan says how many scores are needed."
_TRAINING = (
    " training: epsilon of the whole training, if its steps are Gaussian and Poisson-sampled as claimed."
)


def print_examined(
    console: Console, values: _Values, *, left_out: bool = False, more: Sequence[tuple[str, str]] = ()
) -> None:
    """The table of methods, its notes, and the verdict with what more is to be said."""
    if values["methods"]:
        _print_methods(console, values, left_out)
    for text in values["notes"]:
        console.print()
        print_labelled(console, [("note", text)])
    if values["verdict"] is not None:
        console.print()
        print_result(console, values, more)
    elif values["bound"] is not None:  # where nothing is claimed
        console.print()
        _print_labelled_bound(console, values, more)


def print_result(console: Console, values: _Values, more: Sequence[tuple[str, str]] = ()) -> None:
    """Verdict, claim, bound, method, power, assumptions, and more of the same form."""
    verdict, bound = Verdict[values["verdict"]], values["bound"]
    rows: list[tuple[str, str | Text]] = [
        ("verdict", Text.assemble((verdict.name, _STYLE[verdict]), f". {values['sentence']}")),
        *_claim_and_bound(values),
        ("power", str(power(values))),
        *([("", _MORE)] if verdict is Verdict.UNDERPOWERED else []),
    ]
    labels = ["assumes"] + [""] * len(bound["assumptions"])
    print_labelled(console, [*rows, *zip(labels, bound["assumptions"], strict=False), *more])


def _print_labelled_bound(console: Console, values: _Values, more: Sequence[tuple[str, str]]) -> None:
    print_labelled(console, [*_claim_and_bound(values), *more])


def _claim_and_bound(values: _Values) -> list[tuple[str, str | Text]]:
    bound = values["bound"]
    return [
        ("claim", values["claim"]["summary"]),
        ("bound", bound["statement"]),
        ("method", f"{bound['tradeoff']} + {bound['inference']} + {bound['threshold_rule']}"),
    ]


def model_and_steps(values: _Values) -> list[tuple[str, str]]:
    """What a run has beside its verdict."""
    timing = values["timing"]
    if "num_models" in values:
        return _of_many(values)
    return [
        ("model", f"{values['num_parameters']:,} parameters, test accuracy {values['accuracy']:.3f}"),
        (
            "steps",
            f"{values['num_done']:,} of {values['num_steps']:,} in {timing['training_seconds']:.3g} s",
        ),
    ]


def tests_of_noise(values: _Values) -> str:
    """What tests of noise and batches found, by name; old runs, and those that see no step, have none."""
    found = values.get("diagnosis")
    if found is None:
        return "tests of the noise: not run"
    names = ", ".join(one["name"] for one in found["findings"])
    level = f"{len(found['tests'])} tests, {100 * found['confidence']:g} % confidence of their own"
    return f"tests of the noise: {'found ' + names if names else 'nothing found'} ({level})"


def _of_many(values: _Values) -> list[tuple[str, str]]:
    trained = f"{values['num_models'] - values['num_failed']:,} of {values['num_models']:,}"
    if (speed := values["timing"]["models_per_second"]) is not None:
        trained += f", {speed:.3g} a second"
    rows = [
        ("best", f"epsilon >= {_number(values['largest_epsilon'])} if no score were on the wrong side"),
        ("models", trained),
    ]
    if values["accuracy"] is not None:
        text = f"{values['num_parameters']:,} parameters, test accuracy {values['accuracy']:.3f}"
        rows.append(("model", f"{text} without the canary"))
    return rows


def power(values: _Values) -> Power:
    """The power of a result; JSON has no infinity, and has a word for it."""
    numbers = {name: None if value is None else float(value) for name, value in values["power"].items()}
    return Power(**numbers)  # type: ignore[arg-type]


class _Notes:
    """Assumptions, each with a number at its first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, assumptions: list[str]) -> str:
        for text in assumptions:
            self.numbers.setdefault(text, len(self.numbers) + 1)
        return " ".join(map(str, sorted(self.numbers[text] for text in assumptions)))


def _print_methods(console: Console, values: _Values, left_out: bool) -> None:
    notes = _Notes()
    composed = any(row["training_epsilon"] is not None for row in values["methods"])
    table = _table(values, notes, composed)
    console.print(_heading(values, left_out))
    print_table(console, table)
    console.print()
    print_labelled(console, [(str(number), text) for text, number in notes.numbers.items()])
    console.print()
    console.print(_LEGEND + (_TRAINING if composed else ""))


def _heading(values: _Values, left_out: bool) -> str:
    lines = [
        _sizes(values["shapes"]),
        f"lower bounds at {100 * values['confidence']:g} %, epsilon at delta = {values['delta']:g}",
    ]
    if left_out:
        lines.append("files of this size are read once; methods that need them in memory are left out")
    return "\n".join(lines) + "\n"


def _sizes(shapes: _Values) -> str:
    first, second = (" x ".join(f"{n:,}" for n in shapes[side]) for side in ("with_canary", "without_canary"))
    return f"scores with the canary: {first}, without: {second}"


def _table(values: _Values, notes: _Notes, composed: bool) -> Table:
    table = slim_table("method", "threshold")
    for name in (_symbol(values), "epsilon", "training") if composed else (_symbol(values), "epsilon"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "notes"):
        table.add_column(name, no_wrap=True)
    practice = False
    for row in values["methods"]:
        if row["threshold_rule"]["type"] == "SameData" and not practice:
            practice = True
            table.add_section()
        table.add_row(*_cells(row, notes, composed))
    return table


def _symbol(values: _Values) -> str:
    """The parameter of the f-DP rows."""
    symbols = [row["symbol"] for row in values["methods"] if row["name"].startswith("f-DP")]
    symbol = symbols[0] if symbols else "mu"
    return "1/noise" if symbol.startswith("1/") else symbol


def _cells(row: _Values, notes: _Notes, composed: bool) -> list[str]:
    parameter = "" if row["symbol"] == "epsilon" else _number(row["parameter"])
    cells = [row["name"], _rule(row), parameter, _number(row["epsilon"])]
    training = [_number(row["training_epsilon"])] if composed else []
    return [*cells, *training, row["kind"], notes.of(row["assumptions"])]


def _number(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.4g}"


def _rule(row: _Values) -> str:
    return ThresholdRule.from_dict(row["threshold_rule"]).label
