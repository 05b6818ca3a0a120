"""How the results of ``dpaudit plan`` look."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dpaudit.cli._console import print_labelled, print_table, slim_table
from dpaudit.cli._planned import Findable, Planned
from dpaudit.stats import Plan, Power

__all__ = ["print_planned"]

_NOTE = (
    "Canaries are those of a step and side; a step is whatever one score is of. For an ideal attack: "
    "normalised scores, the threshold at their midpoint. ClopperPearson and JointExact count all scores "
    "together and assume that they are independent, also those of one step; Betting goes step by step and "
    "lets the canaries of a step depend on each other."
)
_TRY = (
    "Try more of them (--observations, or --steps and --canaries), or give a leak by --true-epsilon instead "
    "of a size, to see how many find it."
)


def print_planned(console: Console, planned: Planned) -> None:
    """The claim, the leak where one was asked for, and a row a method."""
    chances = f"with {100 * planned.power:g} % probability, at {100 * planned.confidence:g} % confidence"
    rows = [("claim", planned.claim.summary)]
    if planned.plans:
        rows.append(("to find", f"{_leak(planned.plans[0].leak)}, {chances}"))
    else:
        rows.append(("found", f"the smallest leak {chances}"))
    print_labelled(console, rows)
    console.print()
    print_table(console, _plans(planned.plans) if planned.plans else _leaks(planned.leaks))
    console.print()
    console.print(_NOTE)
    if not planned.is_found:
        console.print()
        console.print(_nothing(planned))


def _leak(leak: Power) -> str:
    text = f"a true epsilon of {leak.epsilon:.4g}"
    if leak.noise_factor is None:
        return text
    return f"{text}, noise at {leak.noise_factor:.4g} of the claimed"


def _sized(*more: str) -> Table:
    table = slim_table("method")
    for name in ("canaries", "steps", "scores a side", *more):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _plans(plans: tuple[Plan, ...]) -> Table:
    table = _sized()
    for plan in plans:
        canaries, steps, total = (
            f"> {plan.most:,}" if size is None else f"{size:,}"
            for size in (plan.num_canaries, plan.num_steps, plan.num_observations)
        )
        name = type(plan.inference).__name__
        table.add_row(name, canaries, steps, total if plan.num_observations else "")
    return table


def _leaks(leaks: tuple[Findable, ...]) -> Table:
    scaled = any(one.leak.noise_factor is not None for one in leaks)
    table = _sized("epsilon", *(["noise factor"] if scaled else []))
    for one in leaks:
        sizes = one.num_canaries, one.num_steps, one.num_canaries * one.num_steps
        found = ["none", *(["none"] if scaled else [])]
        if one.leak.parameter < float("inf"):
            found = [f"{one.leak.epsilon:.4g}"]
            found += [] if one.leak.noise_factor is None else [f"{one.leak.noise_factor:.4g}"]
        table.add_row(type(one.inference).__name__, *(f"{size:,}" for size in sizes), *found)
    return table


def _nothing(planned: Planned) -> str:
    if planned.leaks:
        return f"With so few scores no leak is found with {100 * planned.power:g} % probability. {_TRY}"
    return "No method finds this leak within the sizes that were tried."
