"""Figures of several trainings at several epsilons, audited by the paper's methods and by ours.

Pictures that several figures have: bounds over a number, a line for each method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from dpaudit.experiments.reproduction._figure import (
    Figure,
    Key,
    Mark,
    Need,
    Panel,
    Picture,
    Row,
    Rows,
    Scale,
    Series,
    Settings,
    Table,
    Work,
    mean,
    only,
    pairs_of,
    spread,
    values_of,
)
from dpaudit.experiments.reproduction._trainings import (
    COLUMNS,
    OURS,
    SAME_DATA,
    audited,
    method_rows,
    our_row,
    tested,
)


def labelled(method: str, rule: str) -> str:
    """A method with its threshold rule, as a legend says it."""
    return f"{method}, {rule}" if rule else method


def rates_panel(series: Sequence[Series], title: str = "") -> Panel:
    """Both error rates from 0 to 1."""
    return Panel(
        title=title,
        x_label="false positive rate",
        y_label="false negative rate",
        series=series,
        x_range=(0, 1),
        y_range=(0, 1),
    )


def rates_of(rows: Rows) -> tuple[list[float], list[float]]:
    """The false positive and the false negative rates of a curve."""
    x, y = ([float(row[axis] or 0.0) for row in rows] for axis in ("fpr", "fnr"))
    return x, y


def rates_series(rows: Rows, label: str, mark: Mark = Mark.LINE, every: int = 1) -> Series:
    """A curve of error rates; of many points only some are drawn."""
    x, y = rates_of(rows)
    return Series(label=label, x=x[::every], y=y[::every], mark=mark)


def bounds_panel(
    rows: Rows,
    axis: str,
    label: str,
    level: float,
    *,
    title: str = "",
    log_x: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Panel:
    """The bounds of all methods over a column, below the truth."""
    return Panel(
        title=title,
        x_label=label,
        y_label="epsilon lower bound",
        series=series_over(rows, axis),
        level=level,
        log_x=log_x,
        y_range=y_range,
    )


def diagonal(epsilons: Sequence[float]) -> Series:
    """Where a bound would be that finds all there is."""
    return Series(label="theoretical", x=epsilons, y=epsilons, mark=Mark.TRUTH)


def bars(rows: Rows, column: str, places: Sequence[float | str]) -> list[Series]:
    """For each method and rule the mean bound at each place of a column, side by side."""
    found = []
    for method, rule in pairs_of(rows):
        own = only(rows, method=method, rule=rule)
        cells = [only(own, **{column: place}) for place in places]
        found.append(
            Series(
                label=labelled(method, rule),
                x=range(len(places)),
                y=[mean(cell) or 0.0 for cell in cells],
                spread=[spread(cell) for cell in cells],
                mark=Mark.BARS,
            )
        )
    return found


def series_over(rows: Rows, axis: str) -> list[Series]:
    """The mean bound over a column, with the standard deviation over runs, for each method and rule."""
    found = []
    for method, rule in pairs_of(rows):
        own = only(rows, method=method, rule=rule)
        places = sorted(values_of(own, axis))
        cells = [only(own, **{axis: place}) for place in places]
        is_heuristic = own[0].get("kind") != "confidence"
        found.append(
            Series(
                label=labelled(method, rule),
                x=places,
                y=[mean(cell) or 0.0 for cell in cells],
                spread=[spread(cell) for cell in cells],
                mark=Mark.DASHES if is_heuristic else Mark.LINE,
            )
        )
    return found


PAPERS = "f-DP(CP)", "f-DP(ZB)", "(eps,delta)(CP)", "(eps,delta)(ZB)", "eps-DP(Katz)"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is trained, and what differs from the others in the tables ``audit`` and ``training``."""

    column: str
    audit: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    """A figure of trainings. ``printed`` has the paper's values by method, epsilon and variant.

    Settings have ``columns``, ``epsilons``, ``num_runs``, and ``num_canaries`` for our one run; ``variants``
    where not all are run, ``audit`` where a scale audits in a way of its own.
    """

    name: str
    title: str
    text: str
    variants: Mapping[str, Variant]
    settings: Mapping[Scale, Settings]
    threat_model: str = "gradient"
    methods: Sequence[str] = PAPERS
    noise_multiplier: float | None = None
    """Given where single steps are audited: epsilons are then of a step."""
    printed: Mapping[tuple[str, float, str], float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    axis: str = ""
    """What the variants are, where their names do not say it."""
    more_tables: Callable[[Rows, Settings], Sequence[Table]] = lambda *_: ()
    draw: Callable[[Rows], Picture] | None = None
    """Where the paper's figure has a form of its own."""

    def figure(self) -> Figure:
        """The description that is run."""
        needs = dict.fromkeys(COLUMNS[variant.column].need for variant in self.variants.values())
        return Figure(
            name=self.name,
            title=self.title,
            paper=self.text,
            settings=self.settings,
            cells=self.cells,
            measure=self.measure,
            picture=self.picture,
            tables=self.tables,
            needs=tuple(need for need in needs if isinstance(need, Need)),
            remarks=self.remarks,
        )

    def cells(self, settings: Settings) -> list[Key]:
        """A training each."""
        modes = ("paper", "ours") if settings["num_canaries"] else ("paper",)
        names = settings.get("variants", list(self.variants))
        return [
            {"variant": name, "claimed": epsilon, "run": run, "mode": mode}
            for name, epsilon, run, mode in product(
                names, settings["epsilons"], range(settings["num_runs"]), modes
            )
        ]

    def measure(self, key: Key, work: Work) -> list[Row]:
        """Train and audit."""
        variant = self.variants[str(key["variant"])]
        of_step = self.noise_multiplier is not None
        noise = {"noise_multiplier": self.noise_multiplier} if of_step else {"target_epsilon": key["claimed"]}
        training = {**noise, **variant.training}
        audit: dict[str, Any] = {"mode": "paper", **variant.audit, **work.settings.get("audit", {})}
        if key["mode"] == "ours":
            audit |= {"mode": "one-run", "num_canaries": work.settings["num_canaries"]}
            audit["methods"] = ["f-DP(betting)"]
        values = audited(work, variant.column, audit=audit, training=training, threat_model=self.threat_model)
        if key["mode"] == "ours":
            return [our_row(values, of_step=of_step)]
        return method_rows(values, of_step=of_step)

    def picture(self, rows: Rows, settings: Settings) -> Picture:
        """Over epsilon, a panel for each variant; bars, where there is one epsilon."""
        shown = [row for row in rows if self._is_shown(row)]
        if self.draw is not None:
            return self.draw(shown)
        if len(settings["epsilons"]) == 1:
            return Picture(panels=[self._bars(shown, settings["epsilons"][0])])
        names = values_of(rows, "variant")
        return Picture(panels=[self._lines(only(shown, variant=name), name) for name in names], columns=2)

    def _is_shown(self, row: Row) -> bool:
        """The paper's practice and our sound bounds."""
        if row["method"] in self.methods:
            return row["rule"] == SAME_DATA
        return row["method"] in (OURS, "f-DP(joint)")

    def _lines(self, rows: Rows, name: str) -> Panel:
        epsilons = sorted(values_of(rows, "claimed"))
        axes = "theoretical epsilon", "epsilon lower bound"
        return Panel(
            title=name,
            x_label=axes[0],
            y_label=axes[1],
            series=[*series_over(rows, "claimed"), diagonal(epsilons)],
        )

    def _bars(self, rows: Rows, epsilon: float) -> Panel:
        names = values_of(rows, "variant")
        return Panel(
            x_label=self.axis,
            y_label="epsilon lower bound",
            series=bars(rows, "variant", names),
            categories=names,
            level=epsilon,
        )

    def tables(self, rows: Rows, settings: Settings) -> list[Table]:
        """The mean over runs, beside the printed values."""
        names = values_of(rows, "variant")
        lines = [
            (
                labelled(method, rule),
                str(only(rows, method=method, rule=rule)[0]["kind"]),
                f"{epsilon:g}",
                *(self._cell(rows, method, rule, epsilon, name) for name in names),
            )
            for method, rule in pairs_of(rows)
            if method in (*PAPERS, OURS, "f-DP(joint)")
            for epsilon in settings["epsilons"]
        ]
        number = settings["num_runs"]
        several = f"Mean epsilon of {number} runs, in brackets the standard deviation"
        text = several if number > 1 else "Epsilon of one run"
        text += "; after the stroke the paper's value" if self.printed else ""
        accuracy = ", ".join(f"{name}: {mean(only(rows, variant=name), 'accuracy'):.1%}" for name in names)
        return [
            Table(title=text, header=("method", "kind", "epsilon", *names), rows=lines),
            Table(title=tested(settings), header=("mean",), rows=[(accuracy,)]),
            *self.more_tables(rows, settings),
        ]

    def _cell(self, rows: Rows, method: str, rule: str, epsilon: float, name: str) -> str:
        found = only(rows, method=method, rule=rule, claimed=epsilon, variant=name)
        if not found:
            return ""
        off = f" ({spread(found):.2f})" if len(found) > 1 else ""
        printed = self.printed.get((method, epsilon, name)) if rule == SAME_DATA else None
        return f"{mean(found):.2f}{off}" + ("" if printed is None else f" / {printed:.2f}")
