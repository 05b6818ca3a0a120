"""The paper's figures, at a scale at which every part runs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reproduction_record
from statistical_limits import room

from dpaudit.accounting import Claim
from dpaudit.errors import IncompleteError, InputError
from dpaudit.experiments.reproduction import (
    FIGURES,
    Data,
    Figure,
    Picture,
    Reproduced,
    Scale,
    figure_named,
    reproduce,
)
from dpaudit.experiments.reproduction._figure import NEEDS
from dpaudit.experiments.reproduction._reproduce import FigureRun, relabeled
from dpaudit.experiments.reproduction._simulation import simulate_counts
from dpaudit.experiments.reproduction._trainings import PAPER_METHODS
from dpaudit.experiments.reproduction.figures._canary_studies import _bound
from dpaudit.experiments.trials import Finished, Processes
from dpaudit.stats import Fixed, Gaussian, JointExact, Observations, audit


def tiny(name: str, folder: Path, **more: Any) -> Reproduced:
    return reproduce(figure_named(name), output=folder, scale=Scale.TINY, data=Data(embedded=True), **more)


@dataclass(frozen=True, kw_only=True)
class Counting(Figure):
    """Three cells; notes which of them it measures, and may be interrupted at one."""

    measured: list[Any]
    fails_at: int | None = None

    def cells(self, settings: Any) -> list[Any]:
        return [{"number": number} for number in range(settings["numbers"])]

    def measure(self, key: Any, work: Any) -> list[Any]:
        if key["number"] == self.fails_at:
            raise KeyboardInterrupt
        self.measured.append(key["number"])
        return [{"drawn": float(work.generator().random())}]

    def picture(self, *_: Any) -> Picture:
        return Picture(panels=[])

    def tables(self, *_: Any) -> list[Any]:
        return []


@pytest.fixture
def counting() -> Counting:
    return Counting(
        name="counting",
        title="Counting",
        paper="Nothing.",
        settings={scale: {"numbers": 3} for scale in Scale},
        measured=[],
    )


NAMES = reproduction_record.names()


def test_every_figure_of_the_paper_has_its_name_and_all_scales() -> None:
    assert sorted(figure.name for figure in FIGURES) == sorted(NAMES)
    assert all(set(figure.settings) == set(Scale) for figure in FIGURES)


# steps and batches that appendix B prints
PRINTED = {
    "CIFAR-10 WRN-16": (4096.0, 2500),
    "Random WRN-16": (4096.0, 2500),
    "CIFAR-10 ConvNet": (256.0, 20_000),
}


@pytest.mark.parametrize("figure", [figure for figure in FIGURES if figure.needs], ids=lambda one: one.name)
def test_at_the_papers_scale_networks_are_trained_as_long_as_the_paper_says(figure: Figure) -> None:
    columns = figure.settings[Scale.PAPER]["columns"]
    for name, size in columns.items():
        assert size["num_examples"] is None
        assert size["num_test"] is None
        if name in PRINTED:
            assert (size["batch_size"], size["num_steps"]) == PRINTED[name]


def test_the_first_steps_of_a_training_are_at_last_all_of_them() -> None:
    for settings in figure_named("steps").settings.values():
        assert {size["num_steps"] for size in settings["columns"].values()} == {settings["first"][-1]}


def test_every_method_has_a_bound_from_the_same_numbers_of_observations(tmp_path: Path) -> None:
    rows = tiny("observations", tmp_path).rows
    for method in rows.values("method"):
        assert rows.only(method=method).values("observations") == [100, 1_000, 10_000]


def test_a_bound_by_each_method_of_table_1_stands_beside_the_papers(folder: Path) -> None:
    [table, *_] = tiny("table1", folder).tables
    said = {row[0]: [cell.partition(" / ")[2] for cell in row[3:]] for row in table.rows if " / " in row[3]}
    assert said == {  # the row of epsilon 8
        "f-DP(CP), same data": ["5.80", "6.12", "6.40", "7.14"],
        "f-DP(ZB), same data": ["7.09", "7.12", "6.94", "7.12"],
        "(eps,delta)(CP), same data": ["3.63", "3.85", "3.25", "4.09"],
        "(eps,delta)(ZB), same data": ["5.07", "5.15", "4.65", "5.09"],
        "eps-DP(Katz), same data": ["4.17", "3.95", "4.24", "4.15"],
    }


@pytest.mark.long
def test_lines_lie_below_the_exact_curve_beside_them(tmp_path: Path) -> None:
    for panel in tiny("pld", tmp_path).picture.panels:
        exact, *lines = panel.series
        assert exact.label == "exact"
        assert lines
        assert all(np.less_equal(one.y, np.add(exact.y, 1e-9)).all() for one in lines)


def test_cells_are_measured_once_and_the_rest_goes_on_after_an_interrupt(
    counting: Counting, tmp_path: Path
) -> None:
    whole = reproduce(counting, output=tmp_path / "whole")
    counting.measured.clear()
    with pytest.raises(KeyboardInterrupt):
        reproduce(replace(counting, fails_at=1), output=tmp_path / "cut")
    resumed = reproduce(counting, output=tmp_path / "cut")
    assert counting.measured == [0, 1, 2]
    assert resumed.rows == whole.rows


def test_a_cell_is_announced_by_its_key(tmp_path: Path) -> None:
    figure = figure_named("observations")
    run = FigureRun(figure=figure, output=tmp_path, scale=Scale.TINY, data=Data(), seed=0, device="cpu")
    assert [run.label(index) for index in range(3)] == [
        "claimed 1.0, run 0",
        "claimed 1.0, run 1",
        "claimed 4.0, run 0",
    ]


def test_cells_of_another_seed_or_scale_are_refused(counting: Counting, tmp_path: Path) -> None:
    reproduce(counting, output=tmp_path, seed=1)
    with pytest.raises(InputError, match="seed is 2 instead of the stored 1; choose another --output"):
        reproduce(counting, output=tmp_path, seed=2)
    with pytest.raises(InputError, match=r'scale is "tiny" instead of the stored "cpu"'):
        reproduce(counting, output=tmp_path, seed=1, scale=Scale.TINY)


def test_a_damaged_cell_is_told_by_its_path(counting: Counting, tmp_path: Path) -> None:
    reproduce(counting, output=tmp_path)
    path = tmp_path / "counting-cells" / "number=1.json"
    path.write_text("{")
    with pytest.raises(
        InputError, match=r"is damaged: it does not contain a cell of a reproduction\. Delete it"
    ):
        reproduce(counting, output=tmp_path)


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(
        InputError, match=r"There is no figure or table 'tradeofs'\. Did you mean 'tradeoffs'\?"
    ):
        figure_named("tradeofs")


def test_counts_of_a_growing_sample_are_those_of_scores() -> None:
    thresholds = np.array([-0.4, 0.5, 1.3])
    noise, number = 0.7, 400_000
    steps = list(simulate_counts([1000, number], thresholds, noise, np.random.default_rng(5)))
    rng = np.random.default_rng(6)
    absent, present = noise * rng.standard_normal(number), 1 + noise * rng.standard_normal(number)
    for place, threshold in enumerate(thresholds):
        counts = steps[1].at(place)
        for share, slow in ((counts.fpr, absent > threshold), (counts.fnr, present <= threshold)):
            error = math.sqrt(2) * slow.std() / math.sqrt(number)  # both are drawn
            assert share == pytest.approx(slow.mean(), abs=room(error, comparisons=6))
        assert steps[0].at(place).false_positives <= counts.false_positives


def test_rows_with_thresholds_from_the_counted_data_are_called_heuristic(tmp_path: Path) -> None:
    found = tiny("observations", tmp_path).kinds
    assert {kind for (_, rule), kind in found.items() if "same data" in rule} == {"heuristic"}
    assert {kind for (_, rule), kind in found.items() if "same data" not in rule} == {"confidence"}


def test_the_regions_of_the_paper_have_its_numbers(tmp_path: Path) -> None:
    rows = tiny("regions", tmp_path).rows
    attack = rows.only(region="attack")[0]
    assert attack["epsilon"] == pytest.approx(0.3, abs=1e-3)
    [mu] = rows.only(region="Gaussian mechanism").values("parameter")
    assert Gaussian().epsilon(mu, 1e-5) == pytest.approx(1.0, abs=1e-4)
    assert attack["parameter"] < mu


def test_no_accountants_curve_lies_above_the_attack_on_a_sampled_step(tmp_path: Path) -> None:
    rows = tiny("subsampling", tmp_path).rows
    exact, pld = (rows.only(curve=name) for name in ("this attack, without end", "PLD"))
    gaps = [float(a["fnr"] or 0) - float(b["fnr"] or 0) for a, b in zip(exact, pld, strict=True)]
    assert min(gaps) > -1e-3
    assert max(gaps) > 0.05
    assert not math.isnan(sum(gaps))


TRAINED = [figure.name for figure in FIGURES if figure.needs]
OURS, HALF = "ours, one run", "t = 1/2"


def _slow_apart(name: str) -> Any:
    """Leave the figure that composes curves of whole runs to `make test-long`."""
    return pytest.param(name, marks=pytest.mark.long) if name == "black-box" else name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trainings are kept, so that several tests look at the same."""
    return tmp_path_factory.mktemp("trained")


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*map(_slow_apart, TRAINED)])
def test_a_figure_of_trainings_runs_on_the_embedded_data(name: str, folder: Path) -> None:
    found = tiny(name, folder)
    assert found.data == ("digits",)
    stand_ins = Data(embedded=True).stand_ins(found.figure.needs)
    keys = relabeled(found.figure.cells(found.settings), stand_ins)
    assert [key for key in keys if not _of_cell(found, key)] == []
    _require_kinds(found)
    shown = [one for panel in found.picture.panels for one in panel.series]
    assert shown
    assert all(np.isfinite(one.y).all() for one in shown)
    again = tiny(name, folder)
    assert again.to_dict() == found.to_dict()


@pytest.mark.few(8)
@pytest.mark.parametrize("name", [*map(_slow_apart, NAMES)])
def test_a_figure_shows_the_recorded_series_axes_and_tables(name: str, folder: Path) -> None:
    found, expected = tiny(name, folder), reproduction_record.recorded(name)
    assert reproduction_record.outline(found) == expected["outline"]
    assert reproduction_record.numbers(found) == pytest.approx(expected["numbers"], rel=1e-4, abs=1e-9)
    json.dumps(found.to_dict(), allow_nan=False)


def test_the_bound_from_the_first_steps_is_composed_over_all_steps() -> None:
    claim = Claim.dpsgd(noise_multiplier=1.0, sample_rate=0.1, num_steps=100, delta=1e-5)
    sides = [1.0] * 90 + [0.0] * 10, [0.0] * 90 + [1.0] * 10
    first = Observations(with_canary=sides[0], without_canary=sides[1], scores_of="step")
    method: Any = {"inference": JointExact(), "threshold": Fixed(0.5)}
    found = audit(first, claim=claim, tradeoff=Gaussian(), **method)
    row = _bound(first, claim, "f-DP(joint)", **method)
    assert row == {
        "method": "f-DP(joint)",
        "rule": HALF,
        "kind": "confidence",
        "epsilon": found.bound.epsilon,
    }


def test_a_cell_that_is_measured_here_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[str] = []
    tiny("clipping-only", tmp_path / "models", within=told.append)
    assert "8 of 8 models" in told
    tiny("input-canaries", tmp_path / "steps", within=told.append)
    assert "step 2 of 2" in told
    assert any(text.startswith("crafting canaries, step 2 of") for text in told)


@pytest.mark.parametrize(("pool", "expected"), [(None, {"kind": "serial"}), (Processes(num_workers=3), 3)])
def test_final_models_are_trained_by_as_many_processes_as_are_asked_for(
    pool: Processes | None, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpaudit import experiments  # noqa: PLC0415

    asked: list[Any] = []

    def stop(config: Any, **_: Any) -> None:
        asked.append(config.pool)
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        tiny("clipping-only", tmp_path, pool=pool)
    [found] = asked
    assert (found.model_dump() if pool is None else found.num_workers) == expected


def _of_cell(found: Reproduced, key: Any) -> list[Any]:
    """The rows of a cell that have a bound of a known kind."""
    known = {"confidence", "credible", "heuristic"}
    return [row for row in found.rows.only(**key) if row["epsilon"] is not None and row["kind"] in known]


def _require_kinds(found: Reproduced) -> None:
    """Sound is only what has a threshold that was chosen before the data and is no posterior or Katz's."""
    for (method, rule), kind in found.kinds.items():
        if rule == "same data" or "Katz" in method:
            assert kind == "heuristic"
        elif "ZB" in method:
            assert kind == "credible"
        else:
            assert kind == "confidence"
    assert {"confidence", "heuristic"} <= set(found.kinds.values())


def test_table_1_has_all_its_cells_and_two_steps_refute_no_claim(folder: Path) -> None:
    rows = tiny("table1", folder).rows
    columns = (
        "digits for CIFAR-10 WRN-16",
        "digits for CIFAR-10 ConvNet",
        "digits for Purchase",
        "Random WRN-16",
    )
    for column, method in product(columns, PAPER_METHODS):
        [same] = rows.only(variant=column, method=method, rule="same data")
        [half] = rows.only(variant=column, method=method, rule=HALF)
        assert same["claimed"] == half["claimed"] == 8.0
        assert same["epsilon"] >= half["epsilon"]
    assert max(row["epsilon"] for row in rows if row["kind"] == "confidence") <= 8.0
    assert len(rows.only(method=OURS)) == len(columns)


@pytest.mark.long
def test_data_that_are_not_the_papers_are_called_by_their_own_name(folder: Path, tmp_path: Path) -> None:
    found = tiny("black-box", folder)
    names = ["digits for CIFAR-10 MLP", "digits for Purchase"]
    assert [panel.title for panel in found.picture.panels] == names
    assert found.rows.values("column") == names
    assert {row[0] for row in found.tables[0].rows} == set(names)
    assert found.tables[1].rows[0][:2] == ("CIFAR-10 WRN-16, f-DP(ZB)", "about 1.6")  # of the paper's own
    assert "meaningless" in found.remarks[0]
    (tmp_path / "bangkok").touch()
    (tmp_path / "data_batch_1.bin").touch()
    needs = tuple(NEEDS.values())
    assert Data(tmp_path).stand_ins(needs) == {"Purchase": "location for Purchase"}
    (tmp_path / "purchase100.npz").touch()
    assert Data(tmp_path).stand_ins(needs) == {}


def test_thirty_steps_show_a_missing_clip_best_by_the_gaussian_curve_and_a_correct_step_shows_none(
    folder: Path,
) -> None:
    found = tiny("bugs", folder)
    broken, correct = (
        {row["method"]: row["epsilon"] for row in found.rows.only(variant=name, rule=HALF)}
        for name in ("1: clipped after the mean", "correct")
    )
    assert broken["f-DP(joint)"] > broken["f-DP(CP)"] > 1.27
    assert broken["f-DP(CP)"] > broken["(eps,delta)(CP)"] > 0
    assert max(correct[name] for name in ("f-DP(joint)", "f-DP(CP)", "(eps,delta)(CP)")) <= 1.27
    seen = {row[0]: row[1:] for row in found.tables[2].rows}
    assert seen["f-DP(CP), same data"] == ("yes / yes",)
    assert seen["f-DP(CP), t = 1/2"] == ("yes",)


@pytest.mark.long
def test_cells_in_processes_have_the_rows_of_cells_in_this_one(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    pooled = tiny(
        "thresholds",
        tmp_path / "pooled",
        pool=Processes(num_workers=2),
        watch=lambda *words: told.append(words),
    )
    assert pooled.rows == tiny("thresholds", tmp_path / "serial").rows
    assert [(done, total) for done, total, _ in told] == [(0, 2), (1, 2), (2, 2), (2, 2)]


class _Failing:
    """A pool whose first cell fails."""

    num_workers = 2

    def map(self, task: Any, groups: Any) -> Any:
        yield groups[0], Finished.failed(groups[0], "Traceback\nValueError: broken")
        yield from map(task, groups[1:])


def test_a_cell_that_fails_in_a_process_is_told_and_the_others_are_kept(tmp_path: Path) -> None:
    with pytest.raises(
        IncompleteError, match=r"1 of 2 cells of thresholds failed; the others are stored\. The first failure"
    ):
        tiny("thresholds", tmp_path, pool=_Failing())
    assert [path.stem for path in tmp_path.glob("*/*.json")] == ["run=1"]
    assert len(tiny("thresholds", tmp_path).rows.values("run")) == 2


@pytest.mark.parametrize("name", TRAINED)
def test_without_files_a_figure_says_which_it_needs_and_offers_the_embedded_data(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"--data-dir .*cifar-10-batches-bin.*or pass --embedded") as caught:
        reproduce(figure_named(name), output=tmp_path / "out", data=Data(tmp_path))
    assert str(caught.value).count("\n") == 0
    assert not (tmp_path / "out").exists()
