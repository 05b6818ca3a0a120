"""A reproduced figure as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from dpaudit.experiments.reproduction import Reproduced, Scale, Table

__all__ = ["page"]

_MEANING = {
    "confidence": "sound where what it assumes holds: exceeds the truth in 5 % of runs at most",
    "credible": "not a confidence bound: a posterior probability",
    "heuristic": "not sound: nothing is known of its error rate",
}
_CHOSEN = (
    "The paper prints no learning rates, and of Purchase neither steps nor batches; those here are ours. So "
    "is the number of trainings but for the ten of the figure in section 6.2."
)


def page(found: Reproduced) -> str:
    """What the paper shows, how it was measured, the tables, and which numbers are sound."""
    figure = found.figure
    blocks = [
        f"# {figure.title}",
        figure.paper,
        f"![{figure.title}]({figure.name}.svg)",
        *(part for table in found.tables for part in _table(table)),
        *_kinds(found),
        *found.remarks,
        _made(found),
    ]
    return "\n\n".join(blocks) + "\n"


def _table(table: Table) -> list[str]:
    return [f"**{table.title}**", _grid(table.header, table.rows)]


def _kinds(found: Reproduced) -> list[str]:
    rows = [(method, rule, kind, _MEANING[kind]) for (method, rule), kind in found.kinds.items()]
    if not rows:
        return []
    return ["**Which numbers are sound**", _grid(("method", "threshold", "kind", "meaning"), rows)]


def _made(found: Reproduced) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in found.settings.items())
    data = f" Data: {', '.join(found.data)}." if found.data else ""
    chosen = f" {_CHOSEN}" if found.data and found.scale is Scale.PAPER else ""
    return (
        f"Scale {found.scale}, seed {found.seed}, {found.seconds:.0f} seconds of all cells together. "
        f"Settings: {settings}.{data}{chosen}"
    )


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
