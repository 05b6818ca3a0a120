"""How the results of ``dpaudit scores`` look."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpaudit.cli._console import print_labelled, slim_table
from dpaudit.cli._examine import REVERSED, Examined, Row
from dpaudit.cli._methods import is_large
from dpaudit.stats import Bound, Observations, Predictable, Result, SameData, Simultaneous, Verdict
from dpaudit.stats.thresholds import Fixed, ThresholdRule

__all__ = ["print_examined", "print_result"]

_STYLE = {Verdict.VIOLATION: "bold red", Verdict.UNDERPOWERED: "bold yellow", Verdict.NO_VIOLATION: "bold"}
_LEGEND = (
    "CP: Clopper-Pearson. ZB: the posterior of Zanella-Beguelin et al. joint, betting: dpaudit's own. "
    "confidence: above the truth at most as often as stated. credible: depends on a prior. heuristic: no "
    "error rate is known."
)
_TRAINING = (
    " training: epsilon of the whole training, if its steps are Gaussian and Poisson-sampled as claimed."
)


def print_examined(console: Console, examined: Examined) -> None:
    """The table of methods, its notes, and the verdict."""
    notes = _Notes()
    table = _table(examined, notes)
    console.print(_heading(examined))
    console.print(table)
    console.print()
    print_labelled(console, [(str(number), text) for text, number in notes.numbers.items()])
    console.print()
    console.print(_LEGEND + (_TRAINING if _is_composed(examined) else ""))
    if examined.is_reversed:
        console.print()
        print_labelled(console, [("note", REVERSED)])
    if examined.result is not None:
        console.print()
        print_result(console, examined.result)


def print_result(console: Console, result: Result) -> None:
    """Verdict, claim, bound, method, power and assumptions."""
    verdict, bound = result.verdict, result.bound
    rows: list[tuple[str, str | Text]] = [
        ("verdict", Text.assemble((verdict.name, _STYLE[verdict]), f". {result.sentence}")),
        ("claim", result.claim.summary),
        ("bound", bound.statement),
        ("method", f"{bound.tradeoff} + {bound.method} + {bound.rule}"),
        ("power", str(result.power)),
    ]
    labels = ["assumes"] + [""] * len(bound.assumptions)
    print_labelled(console, [*rows, *zip(labels, bound.assumptions, strict=False)])


class _Notes:
    """Assumptions, each with a number at its first use."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def of(self, bound: Bound) -> str:
        for text in bound.assumptions:
            self.numbers.setdefault(text, len(self.numbers) + 1)
        return " ".join(map(str, sorted(self.numbers[text] for text in bound.assumptions)))


def _heading(examined: Examined) -> str:
    lines = [
        _sizes(examined.observations),
        f"lower bounds at {100 * examined.confidence:g} %, epsilon at delta = {examined.delta:g}",
    ]
    if is_large(examined.observations):
        lines.append("files of this size are read once; methods that need them in memory are left out")
    return "\n".join(lines) + "\n"


def _is_composed(examined: Examined) -> bool:
    return any(row.training_epsilon is not None for row in examined.rows)


def _sizes(observations: Observations) -> str:
    sides = observations.with_canary, observations.without_canary
    first, second = (" x ".join(f"{n:,}" for n in side.shape) for side in sides)
    return f"scores with the canary: {first}, without: {second}"


def _table(examined: Examined, notes: _Notes) -> Table:
    composed = _is_composed(examined)
    symbol = "1/noise" if examined.symbol.startswith("1/") else examined.symbol
    table = slim_table("method", "threshold")
    for name in (symbol, "epsilon", "training") if composed else (symbol, "epsilon"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "notes"):
        table.add_column(name, no_wrap=True)
    practice = False
    for row in examined.rows:
        if isinstance(row.method.rule, SameData) and not practice:
            practice = True
            table.add_section()
        table.add_row(*_cells(row, notes, composed))
    return table


def _cells(row: Row, notes: _Notes, composed: bool) -> list[str]:
    bound = row.bound
    parameter = "" if bound.tradeoff.symbol == "epsilon" else f"{bound.parameter:.4g}"
    training = "" if row.training_epsilon is None else f"{row.training_epsilon:.4g}"
    cells = [row.method.name, _rule(row.method.rule), parameter, f"{bound.epsilon:.4g}"]
    return [*cells, *([training] if composed else []), str(bound.kind), notes.of(bound)]


def _rule(rule: ThresholdRule) -> str:
    if isinstance(rule, Fixed):
        return f"fixed {rule.threshold:.4g}"
    names = {Simultaneous: "bands", Predictable: "predictable", SameData: "same data"}
    return names.get(type(rule), "held out")
