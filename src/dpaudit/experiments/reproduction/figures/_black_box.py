"""What the final model alone tells of a canary that was trained on."""

from __future__ import annotations

from typing import Any

from dpaudit.experiments.reproduction._curves import bars
from dpaudit.experiments.reproduction._data import CIFAR10, PURCHASE
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._final_models import final_models
from dpaudit.experiments.reproduction._picture import Panel, Picture, Table
from dpaudit.experiments.reproduction._scale import Scale
from dpaudit.experiments.reproduction._trained import TINY, sizes, tested
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, mean, only, pairs_of, values_of
from dpaudit.experiments.reproduction._work import Work

__all__ = ["BLACK_BOX"]

_CANARIES = "blank", "mislabelled"
_EPSILON = 8.0


def _cells(settings: Settings) -> list[Key]:
    return [{"column": column, "canary": canary} for column in settings["columns"] for canary in _CANARIES]


def _measure(key: Key, work: Work) -> list[Row]:
    return final_models(
        work,
        str(key["column"]),
        canary=str(key["canary"]),
        score="log-odds",
        training={"target_epsilon": _EPSILON},
    )


def _panel(rows: Rows, column: str) -> Panel:
    series = bars(only(rows, column=column), "canary", _CANARIES)
    return Panel(title=column, x_label="", y_label="epsilon lower bound", series=series, categories=_CANARIES)


def _picture(rows: Rows, _: Settings) -> Picture:
    return Picture(panels=[_panel(rows, column) for column in values_of(rows, "column")], columns=2)


def _tables(rows: Rows, settings: Settings) -> list[Table]:
    pairs = pairs_of(rows)
    lines = []
    for column in values_of(rows, "column"):
        for canary in _CANARIES:
            found = only(rows, column=column, canary=canary)
            bounds = [f"{mean(only(found, method=method, rule=rule)):.2f}" for method, rule in pairs]
            lines.append((column, canary, f"{mean(found, 'accuracy'):.1%}", *bounds))
    header = ("training", "canary", "accuracy", *(f"{method}, {rule}" for method, rule in pairs))
    said = [
        ("CIFAR-10 WRN-16, f-DP(ZB)", "about 1.6", _said(rows, "CIFAR-10 WRN-16")),
        ("CIFAR-10 ConvNet, f-DP(ZB)", "significantly lower", _said(rows, "CIFAR-10 ConvNet")),
        ("Purchase, f-DP(ZB)", "significantly lower", _said(rows, "Purchase")),
        ("random data, f-DP(ZB)", "nothing non-trivial", _said(rows, "Random")),
    ]
    return [
        Table(
            title=f"{settings['num_models']:,} models each, epsilon = 8. {tested(settings)}",
            header=header,
            rows=lines,
        ),
        Table(title="What the paper says, of 2,000 models", header=("", "paper", "here"), rows=said),
    ]


def _said(rows: Rows, column: str) -> str:
    own = [row for row in rows if str(row["column"]).startswith(column) and row["method"] == "f-DP(ZB)"]
    found = [float(row["epsilon"] or 0) for row in own if row["rule"] == "same data"]
    return f"{max(found):.2f}" if found else "not run at this scale"


def _settings(columns: dict[str, Any], num_models: int) -> dict[str, Any]:
    return {"columns": columns, "num_models": num_models}


_WIDE, _CONV = sizes(None, 4096, 2500, 2.0), sizes(None, 256, 20_000, 0.5)

BLACK_BOX = Figure(
    name="black-box",
    title="Blank and mislabelled canaries, final models only, epsilon = 8",
    paper="Figure of section 6.4, 1,000 models with the canary and 1,000 without: about 1.6 on CIFAR-10 with "
    "WRN-16 by f-DP(ZB), significantly less on others, nothing on random data.",
    settings={
        Scale.TINY: {
            **_settings({"CIFAR-10 MLP": TINY, "Purchase": TINY}, 8),
            "pool": {"kind": "serial"},
        },
        Scale.CPU: _settings(
            {
                "CIFAR-10 MLP": sizes(500, 25, 100, 0.1),
                "CIFAR-10 ConvNet": sizes(100, 8, 40, 0.5),
                "Purchase": sizes(800, 64, 100, 0.1),
                "Random ConvNet": sizes(100, 8, 40, 0.5),
            },
            200,
        ),
        Scale.PAPER: _settings(
            {
                "CIFAR-10 WRN-16": _WIDE,
                "CIFAR-10 ConvNet": _CONV,
                "Purchase": sizes(None, 256, 2500, 0.5),
                "Random WRN-16": _WIDE,
            },
            2_000,
        ),
    },
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    has_processes=True,
    needs=(CIFAR10, PURCHASE),
    remarks=(
        "The curve is that of the whole training, composed. Below the paper's scale WRN-16 is left out: "
        "hundreds of them take days without a GPU.",
    ),
)
