"""What the final model alone tells of a canary that was trained on."""

from __future__ import annotations

from typing import Any

from dpaudit.experiments.reproduction._curves import bars
from dpaudit.experiments.reproduction._data import CIFAR10, PURCHASE
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._final_models import final_models
from dpaudit.experiments.reproduction._picture import Panel, Picture, Table
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._trained import (
    PAPER_CONV,
    PAPER_DENSE,
    PAPER_WIDE,
    TINY,
    audited,
    our_row,
    sizes,
    tested,
)
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, mean, only, pairs_of, values_of
from dpaudit.experiments.reproduction._work import Work

__all__ = ["BLACK_BOX"]

_ONE_RUN = "many, one run"  # mislabelled ones
_CANARIES = "blank", "mislabelled", _ONE_RUN
_EPSILON = 8.0


def _cells(settings: Settings) -> list[Key]:
    return [{"column": column, "canary": canary} for column in settings["columns"] for canary in _CANARIES]


def _measure(key: Key, work: Work) -> list[Row]:
    column = str(key["column"])
    if key["canary"] == _ONE_RUN:
        return [_one_run(column, work)]
    return final_models(
        work,
        column,
        num_models=work.settings["num_models"][column],
        canary=str(key["canary"]),
        score="log-odds",
        training={"target_epsilon": _EPSILON},
    )


def _one_run(column: str, work: Work) -> Row:
    values = audited(
        work,
        column,
        audit={
            "mode": "one-run",
            "num_canaries": work.settings["num_canaries"],
            "score": "log-odds",
            "canary": {"kind": "mislabelled"},
        },
        training={"target_epsilon": _EPSILON},
        threat_model="black-box",
    )
    return our_row(values)


def _panel(rows: Rows, column: str) -> Panel:
    series = bars(only(rows, column=column), "canary", _CANARIES)
    return Panel(
        title=column,
        x_label="",
        y_label="epsilon lower bound",
        series=series,
        categories=_CANARIES,
        level=_EPSILON,
    )


def _picture(rows: Rows, _: Settings) -> Picture:
    return Picture(panels=[_panel(rows, column) for column in values_of(rows, "column")], columns=2)


def _tables(rows: Rows, settings: Settings) -> list[Table]:
    pairs = pairs_of(rows)
    lines = []
    for column in values_of(rows, "column"):
        for canary in _CANARIES:
            found = only(rows, column=column, canary=canary)
            bounds = [_cell(only(found, method=method, rule=rule)) for method, rule in pairs]
            number = "1" if canary == _ONE_RUN else f"{settings['num_models'][column]:,}"
            lines.append((column, canary, number, f"{mean(found, 'accuracy'):.1%}", *bounds))
    header = ("training", "canary", "models", "accuracy", *(f"{method}, {rule}" for method, rule in pairs))
    said = [
        ("CIFAR-10 WRN-16, f-DP(ZB)", "about 1.6", _said(rows, "CIFAR-10 WRN-16")),
        ("CIFAR-10 ConvNet, f-DP(ZB)", "significantly lower", _said(rows, "CIFAR-10 ConvNet")),
        ("Purchase, f-DP(ZB)", "significantly lower", _said(rows, "Purchase")),
        ("random data, f-DP(ZB)", "nothing non-trivial", _said(rows, "Random")),
    ]
    return [
        Table(
            title=f"Final models, epsilon = 8. {tested(settings)}",
            header=header,
            rows=lines,
        ),
        Table(
            title="What the paper says, of 2,000 models of its own data",
            header=("", "paper", "here"),
            rows=said,
            names_papers=True,
        ),
    ]


def _cell(rows: Rows) -> str:
    epsilon = mean(rows)
    return "" if epsilon is None else f"{epsilon:.2f}"


def _said(rows: Rows, column: str) -> str:
    own = [row for row in rows if str(row["column"]).startswith(column) and row["method"] == "f-DP(ZB)"]
    found = [float(row["epsilon"] or 0) for row in own if row["rule"] == "same data"]
    return f"{max(found):.2f}" if found else "not run at this scale"


def _settings(trained: dict[str, tuple[dict[str, Any], int]], num_canaries: int = 100) -> dict[str, Any]:
    """From sizes and a number of models, with and without the canary together; our one run has canaries."""
    return {
        "num_canaries": num_canaries,
        "columns": {column: size for column, (size, _) in trained.items()},
        "num_models": {column: number for column, (_, number) in trained.items()},
    }


BLACK_BOX = Figure(
    name="black-box",
    title="Blank and mislabelled canaries, final models only, epsilon = 8",
    paper="Figure of section 6.4, 1,000 models with the canary and 1,000 without: about 1.6 on CIFAR-10 with "
    "WRN-16 by f-DP(ZB), significantly less on others, nothing on random data.",
    settings={
        Scale.TINY: _settings({"CIFAR-10 MLP": (TINY, 8), "Purchase": (TINY, 8)}, num_canaries=8),
        Scale.CPU: _settings(
            {
                "CIFAR-10 MLP": (sizes(500, 50, 200, 0.3), 1_000),
                "CIFAR-10 ConvNet": (sizes(100, 8, 40, 0.5), 120),
                "Purchase": (sizes(800, 64, 100, 0.3), 1_000),
                "Random ConvNet": (sizes(100, 8, 40, 0.5), 120),
            }
        ),
        Scale.PAPER: _settings(
            {
                "CIFAR-10 WRN-16": (PAPER_WIDE, 2_000),
                "CIFAR-10 ConvNet": (PAPER_CONV, 2_000),
                "Purchase": (PAPER_DENSE, 2_000),
                "Random WRN-16": (PAPER_WIDE, 2_000),
            }
        ),
    },
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    has_processes=True,
    needs=(CIFAR10, PURCHASE),
    remarks=(
        "The curve is that of the whole training, composed. Ours, one run, is a single training with many "
        "mislabelled canaries, each there by a fair coin, and guesses about them (Mahloujifar et al. 2024). "
        "Below the paper's scale WRN-16 is left out: hundreds of them take days without a GPU.",
    ),
)
