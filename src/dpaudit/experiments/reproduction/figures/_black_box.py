"""What the final model alone reveals about a canary, trained with noise or with clipping only."""

from __future__ import annotations

from dpaudit.experiments.reproduction import _figure as fig
from dpaudit.experiments.reproduction._simulation import CONFIDENCE, count_bound
from dpaudit.experiments.reproduction._trainings import (
    SAME_DATA,
    accuracy_title,
    final_model_rows,
    our_row,
    run_audit,
)
from dpaudit.stats import ErrorCounts

_EPSILON = 8.0
_CANARIES = "blank", "mislabelled"
_ONE_RUN = "many, one run"  # many mislabelled canaries in a single run
_PRINTED = {0.1: 23.4, 1.0: 26.8, 10.0: 41.0}  # Table 2, by clipping norm


class FinalModels(fig.Figure):
    """Bounds from blank and mislabelled canaries in many models, and from many canaries in one model."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(column=settings["columns"], canary=(*_CANARIES, _ONE_RUN))

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        column = str(key["column"])
        if key["canary"] == _ONE_RUN:
            return [_one_run(column, work)]
        return final_model_rows(
            work,
            column,
            num_models=work.settings["num_models"][column],
            canary=str(key["canary"]),
            score="log-odds",
            training={"target_epsilon": _EPSILON},
        )

    def picture(self, rows: fig.FigureRows, _: fig.Settings) -> fig.Picture:
        panels = [
            fig.bars_panel(rows.only(column=column), "canary", (*_CANARIES, _ONE_RUN), _EPSILON, title=column)
            for column in rows.values("column")
        ]
        return fig.Picture(panels=panels, columns=2)

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        methods, lines = [label for label, _ in rows.by_method()], []
        for column in rows.values("column"):
            for canary in (*_CANARIES, _ONE_RUN):
                cell_rows = rows.only(column=column, canary=canary)
                by_label = dict(cell_rows.by_method())
                bounds = [by_label.get(label, fig.FigureRows()).mean_text() for label in methods]
                number = "1" if canary == _ONE_RUN else f"{settings['num_models'][column]:,}"
                lines.append((column, canary, number, f"{cell_rows.mean('accuracy'):.1%}", *bounds))
        header = ("training", "canary", "models", "accuracy", *methods)
        compared = [
            ("CIFAR-10 WRN-16, f-DP(ZB)", "about 1.6", _largest_bound(rows, "CIFAR-10 WRN-16")),
            ("CIFAR-10 ConvNet, f-DP(ZB)", "significantly lower", _largest_bound(rows, "CIFAR-10 ConvNet")),
            ("Purchase, f-DP(ZB)", "significantly lower", _largest_bound(rows, "Purchase")),
            ("random data, f-DP(ZB)", "nothing non-trivial", _largest_bound(rows, "Random")),
        ]
        return [
            fig.Table(
                title=f"Final models, epsilon = 8. {accuracy_title(settings)}", header=header, rows=lines
            ),
            fig.comparison_table(
                compared, "Comparison with the paper's 2,000 models on its data", names_papers=True
            ),
        ]


def _one_run(column: str, work: fig.Work) -> fig.Row:
    values = run_audit(
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


def _largest_bound(rows: fig.FigureRows, column: str) -> str:
    """Return the largest f-DP(ZB) bound, chosen on the same data, of columns that start with this name."""
    bounds = rows.only(method="f-DP(ZB)", rule=SAME_DATA)
    epsilons = bounds.where(lambda row: str(row["column"]).startswith(column)).numbers("epsilon")
    return f"{max(epsilons):.2f}" if epsilons else "not run at this scale"


class ClippingOnly(fig.Figure):
    """Table 2: how much clipping hides without noise."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        return fig.crossed(max_grad_norm=settings["norms"], canary=_CANARIES)

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        [column] = work.settings["columns"]
        norm = float(key["max_grad_norm"])
        rate = work.settings["columns"][column]["learning_rate"] / norm  # clipped steps of equal length
        training = {
            "noise_multiplier": 0.0,
            "max_grad_norm": norm,
            "optimizer": {"name": "sgd", "learning_rate": rate},
        }
        return final_model_rows(
            work,
            column,
            num_models=work.settings["num_models"],
            canary=str(key["canary"]),
            score="loss",
            training=training,
        )

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        largest = _without_error("f-DP(ZB)", settings["num_models"])
        panels = [
            fig.bars_panel(
                rows.only(canary=canary),
                "max_grad_norm",
                rows.values("max_grad_norm"),
                largest,
                title=canary,
                x_label="clipping norm",
                level_label="f-DP(ZB) without errors",
            )
            for canary in _CANARIES
        ]
        return fig.Picture(panels=panels)

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        number, methods = settings["num_models"], [label for label, _ in rows.by_method()]
        lines = [_line(rows, norm, canary) for norm in rows.values("max_grad_norm") for canary in _CANARIES]
        counts = tuple(dict.fromkeys((2_000, number)))
        largest = [
            (
                f"f-DP({short}), {level}",
                "44.0" if short == "ZB" else "",
                *(f"{_without_error(f'f-DP({short})', count, confidence):.2f}" for count in counts),
            )
            for short, level, confidence in (
                ("ZB", "2.5 % quantile", 0.95),
                ("ZB", "5 % quantile", 0.90),
                ("CP", "95 %", 0.95),
                ("joint", "95 %", 0.95),
            )
        ]
        return [
            fig.Table(
                title=f"{number:,} models; the paper reports f-DP(ZB) of 2,000 models with the better canary",
                header=("", "canary", "paper", "accuracy", *methods),
                rows=lines,
            ),
            fig.Table(
                title="Largest possible bound: an attack without errors",
                header=("method", "paper", *(f"{count:,} models" for count in counts)),
                rows=largest,
            ),
        ]


def _line(rows: fig.FigureRows, norm: float, canary: str) -> tuple[str, ...]:
    cell_rows = rows.only(max_grad_norm=norm, canary=canary)
    bounds = [f"{bound_rows.mean():.1f}" for _, bound_rows in cell_rows.by_method()]
    return f"C = {norm:g}", canary, f"{_PRINTED[norm]:.1f}", f"{cell_rows.mean('accuracy'):.1%}", *bounds


def _without_error(method: str, num_models: int, confidence: float = CONFIDENCE) -> float:
    """Return the bound of an attack without errors on this many models."""
    counts = ErrorCounts.perfect(num_models // 2, num_models // 2)
    return count_bound(method, counts, confidence).epsilon
