"""The page and the rows of a reproduced figure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpaudit.experiments.reproduction import Picture, Reproduced, Scale, figure_named
from dpaudit.experiments.reproduction._figure import FigureRows, Table
from dpaudit.report.reproduction import _csv, _page
from dpaudit.stats import Kind


@pytest.fixture
def found() -> Reproduced:
    return Reproduced(
        figure=replace(figure_named("regions"), title="A title", paper="A place.", remarks=("A remark.",)),
        scale=Scale.CPU,
        seed=5,
        data=("cifar10",),
        settings={"noise": 1.0, "runs": 2},
        rows=FigureRows(
            [
                {"method": "f-DP(CP)", "rule": "t = 1/2", "kind": "confidence", "epsilon": 1.5},
                {"method": "ours", "rule": "", "kind": "heuristic", "steps": 3},
            ]
        ),
        picture=Picture(panels=[]),
        tables=(Table(title="A table", header=("", "paper"), rows=[("a|b", "2"), ("c", "3")]),),
        seconds=12.4,
    )


def test_the_page_has_the_paper_the_picture_the_tables_and_the_settings(found: Reproduced) -> None:
    blocks = [
        "# A title",
        "A place.",
        "![A title](regions.svg)",
        "**A table**",
        "|  | paper |\n| --- | --- |\n| a/b | 2 |\n| c | 3 |",
        "**Which numbers are sound**",
        "| method | threshold | kind | meaning |\n| --- | --- | --- | --- |\n"
        f"| f-DP(CP) | t = 1/2 | confidence | {Kind.CONFIDENCE.meaning} |\n"
        f"| ours |  | heuristic | {Kind.HEURISTIC.meaning} |",
        "A remark.",
        "Scale cpu, seed 5, 12 seconds for all cells. Settings: noise = 1.0, runs = 2. Data: cifar10.",
    ]
    assert _page(found) == "\n\n".join(blocks) + "\n"


def test_a_page_without_bounds_states_no_kinds_and_one_without_data_names_none(found: Reproduced) -> None:
    page = _page(replace(found, rows=FigureRows([{"fpr": 0.5}]), data=()))
    assert "sound" not in page
    assert page.endswith("runs = 2.\n")


@pytest.mark.parametrize(
    ("scale", "chosen", "meaningless"),
    [(Scale.PAPER, True, False), (Scale.CPU, False, False), (Scale.TINY, False, True)],
)
def test_the_page_states_what_its_scale_implies(
    found: Reproduced, scale: Scale, chosen: bool, meaningless: bool
) -> None:
    page = _page(replace(found, scale=scale))
    assert ("The paper gives no learning rates" in page) == chosen
    assert ("meaningless" in page) == meaningless


def test_rows_have_a_column_for_each_name(found: Reproduced) -> None:
    assert _csv(found).splitlines() == [
        "method,rule,kind,epsilon,steps",
        "f-DP(CP),t = 1/2,confidence,1.5,",
        "ours,,heuristic,,3",
    ]
