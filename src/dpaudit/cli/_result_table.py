"""Bounds and verdicts on a terminal, from the plain values that ``--json`` prints and runs store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpaudit import _validate
from dpaudit.accounting import SubsampledGaussian
from dpaudit.cli._console import print_labelled, print_table, slim_table
from dpaudit.stats import Bound, ClaimPart, Estimate, Guesses, Kind, Power, ThresholdRule, Verdict, summary

_Values: TypeAlias = Mapping[str, Any]

_STYLE = {Verdict.VIOLATION: "bold red", Verdict.UNDERPOWERED: "bold yellow", Verdict.NO_VIOLATION: "bold"}


def print_examined(
    console: Console, values: _Values, *, left_out: bool = False, more: Sequence[tuple[str, str]] = ()
) -> None:
    """Print the table of methods, notes, and the verdict followed by the labeled lines ``more``."""
    if values["methods"]:
        _print_methods(console, values, left_out)
    for text in values["notes"]:
        console.print()
        print_labelled(console, [("note", text)])
    if values["bound"] is not None:
        console.print()
        print_result(console, values, more)


def print_result(console: Console, values: _Values, more: Sequence[tuple[str, str]] = ()) -> None:
    """Print verdict, claim, bound, method, power, estimates and assumptions, then the lines ``more``."""
    bound, claim = Bound.from_dict(values["bound"]), values["claim"]["summary"]
    claim_parts = [ClaimPart.from_dict(entry) for entry in values["claim"].get("parts", ())]
    if values["verdict"] is None:  # no claim
        print_labelled(console, [*summary(claim, bound, None), *more])
        return
    verdict = Verdict[values["verdict"]]
    rows: list[tuple[str, str | Text]] = [
        ("verdict", Text.assemble((verdict.name, _STYLE[verdict]), f". {values['sentence']}")),
        *summary(
            claim,
            bound,
            Power.from_dict(values["power"]),
            parts=claim_parts,
            attack_power=Power.from_dict(values["attack_power"]) if "attack_power" in values else None,
            p_value=values.get("p_value") if verdict is Verdict.VIOLATION else None,
        ),
        *([("", _more(bound))] if verdict is Verdict.UNDERPOWERED else []),
        *_estimate_lines(values),
        *_listed("finding", [f"{finding['name']}: {finding['sentence']}" for finding in _findings(values)]),
        *_listed("cause", values.get("likely_causes", ())),
        *_listed("assumes", [*bound.assumptions, *(values.get("diagnosis") or {}).get("assumptions", ())]),
        *_listed("not covered", values.get("not_covered", ())),
    ]
    print_labelled(console, [*rows, *more])


def _more(bound: Bound) -> str:
    """Return what helps against too little power; scores of one run cannot be planned."""
    if isinstance(bound.counts, Guesses):
        return "More canaries in the run would detect smaller leaks."
    option = " --end-to-end" if isinstance(bound.tradeoff, SubsampledGaussian) else ""
    return f"dpaudit plan{option} computes how many scores are needed."


def _listed(label: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return labeled lines whose label is on the first line only."""
    return [("" if index else label, text) for index, text in enumerate(texts)]


def _findings(values: _Values) -> Sequence[_Values]:
    """Return the findings that the verdict rests on; black-box and stopped runs are not tested."""
    return values["diagnosis"]["findings"] if values.get("diagnosis") is not None else ()


def _estimate_lines(values: _Values) -> list[tuple[str, str]]:
    """Return the estimates, which stopped runs and one-run audits lack."""
    estimate = values.get("estimate")
    return [] if estimate is None else Estimate.from_dict(estimate).lines(brief=False)


def model_and_steps(values: _Values) -> list[tuple[str, str]]:
    """Return labeled lines about the model and the steps of a run."""
    if "num_models" in values:
        return _many_models(values)
    seconds = values["timing"]["training_seconds"]
    return [
        ("model", f"{values['num_parameters']:,} parameters, test accuracy {values['accuracy']:.3f}"),
        ("steps", f"{values['num_done']:,} of {values['num_steps']:,} in {seconds:.3g} s"),
    ]


def tests_of_noise(values: _Values) -> str:
    """Return the findings of noise and batch tests, which black-box and stopped runs lack."""
    diagnosis = values.get("diagnosis")
    if diagnosis is None:
        return "noise tests: not run"
    names = ", ".join(finding["name"] for finding in diagnosis["findings"])
    level = (
        f"{len(diagnosis['tests'])} tests, at {_validate.percent(diagnosis['confidence'])} joint confidence"
    )
    return f"noise tests: {'flagged by ' + names if names else 'no findings'} ({level})"


def _many_models(values: _Values) -> list[tuple[str, str]]:
    trained = f"{values['num_models'] - values['num_failed']:,} of {values['num_models']:,}"
    if (speed := values["timing"]["models_per_second"]) is not None:
        trained += f", {speed:.3g} per second"
    rows = [
        ("at best", f"epsilon >= {_number(values['largest_epsilon'])} by an attack without a single error"),
        ("models", trained),
    ]
    if values["accuracy"] is not None:
        text = f"{values['num_parameters']:,} parameters, test accuracy {values['accuracy']:.3f}"
        rows.append(("model", f"{text} without the canary"))
    return rows


def _print_methods(console: Console, values: _Values, left_out: bool) -> None:
    texts = dict.fromkeys(text for row in values["methods"] for text in row["assumptions"])
    notes = {text: str(number) for number, text in enumerate(texts, start=1)}
    composed = any(row["training_epsilon"] is not None for row in values["methods"])
    table = _table(values, notes, composed)
    console.print(_heading(values, left_out))
    print_table(console, table)
    console.print()
    print_labelled(console, [(number, text) for text, number in notes.items()])
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
    print_labelled(console, legend)


def _heading(values: _Values, left_out: bool) -> str:
    sides = values["shapes"]["with_canary"], values["shapes"]["without_canary"]
    present, absent = (" x ".join(f"{size:,}" for size in side) for side in sides)
    level = _validate.percent(values["confidence"])
    lines = [
        f"scores: {present} with the canary, {absent} without it",
        f"lower bounds at the {level} level, epsilon at delta = {values['delta']:g}",
    ]
    if left_out:
        lines.append("files of this size stay on disk; methods that need them in memory are skipped")
    return "\n".join(lines) + "\n"


def _table(values: _Values, notes: Mapping[str, str], composed: bool) -> Table:
    table = slim_table("method", "threshold")
    for name in (_symbol(values), "epsilon", "training") if composed else (_symbol(values), "epsilon"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("kind", "notes"):
        table.add_column(name, no_wrap=True)
    previous = ""
    for row in values["methods"]:
        rule = row["threshold_rule"]["type"]
        if rule == "SameData" and rule != previous:  # rows of the common practice come last
            table.add_section()
        previous = rule
        table.add_row(*_cells(row, notes, composed))
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
