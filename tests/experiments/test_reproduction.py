"""The paper's figures, at a scale at which every part runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpaudit.errors import InputError
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
from dpaudit.experiments.reproduction._mechanism import counted
from dpaudit.experiments.reproduction._values import kinds, only, values_of
from dpaudit.stats import Gaussian

SIMULATED = [figure.name for figure in FIGURES if not figure.needs]


def tiny(name: str, folder: Path, **more: Any) -> Reproduced:
    return reproduce(figure_named(name), output=folder, scale=Scale.TINY, data=Data(embedded=True), **more)


@pytest.fixture
def counting() -> tuple[Figure, list[Any]]:
    """A figure of three cells that notes which of them it measures."""
    seen: list[Any] = []

    def measure(key: Any, work: Any) -> list[Any]:
        seen.append(key["number"])
        if work.settings.get("fails_at") == key["number"]:
            raise KeyboardInterrupt
        return [{"drawn": float(work.generator().random())}]

    figure = Figure(
        name="counting",
        title="Counting",
        paper="Nothing.",
        settings={scale: {"numbers": 3} for scale in Scale},
        cells=lambda settings: [{"number": number} for number in range(settings["numbers"])],
        measure=measure,
        picture=lambda *_: Picture(panels=[]),
        tables=lambda *_: [],
    )
    return figure, seen


def test_every_figure_of_the_paper_has_a_name_of_its_own_and_all_scales() -> None:
    names = [figure.name for figure in FIGURES]
    assert len(set(names)) == len(names)
    assert all(set(figure.settings) == set(Scale) for figure in FIGURES)


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulated_figure_runs_and_its_picture_holds_finite_numbers(name: str, tmp_path: Path) -> None:
    found = tiny(name, tmp_path)
    assert found.rows
    assert found.tables
    for panel in found.picture.panels:
        assert panel.series
        for one in panel.series:
            assert np.isfinite(one.x).all()
            assert np.isfinite(one.y).all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_cells_are_measured_once_and_the_rest_goes_on_after_an_interrupt(
    counting: tuple[Figure, list[Any]], tmp_path: Path
) -> None:
    figure, seen = counting
    whole = reproduce(figure, output=tmp_path / "whole")
    seen.clear()
    broken = replace(figure, measure=_failing(figure, at=1))
    with pytest.raises(KeyboardInterrupt):
        reproduce(broken, output=tmp_path / "cut")
    resumed = reproduce(figure, output=tmp_path / "cut")
    assert seen == [0, 1, 2]
    assert resumed.rows == whole.rows


def _failing(figure: Figure, at: int) -> Callable[..., Any]:
    def measure(key: Any, work: Any) -> Any:
        if key["number"] == at:
            raise KeyboardInterrupt
        return figure.measure(key, work)

    return measure


def test_cells_of_another_seed_or_scale_are_refused(
    counting: tuple[Figure, list[Any]], tmp_path: Path
) -> None:
    figure, _ = counting
    reproduce(figure, output=tmp_path, seed=1)
    with pytest.raises(InputError, match="seed is 2 here and 1 there; give another --output"):
        reproduce(figure, output=tmp_path, seed=2)
    with pytest.raises(InputError, match=r'scale is "tiny" here and "cpu" there'):
        reproduce(figure, output=tmp_path, seed=1, scale=Scale.TINY)


def test_a_damaged_cell_is_told_by_its_path(counting: tuple[Figure, list[Any]], tmp_path: Path) -> None:
    figure, _ = counting
    reproduce(figure, output=tmp_path)
    path = tmp_path / "counting-cells" / "number=1.json"
    path.write_text("{")
    with pytest.raises(InputError, match=r"number=1\.json, but it cannot be read; delete it"):
        reproduce(figure, output=tmp_path)


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(InputError, match="did you mean 'tradeoffs'"):
        figure_named("tradeofs")


def test_counts_of_a_growing_sample_are_those_of_scores() -> None:
    thresholds = np.array([-0.4, 0.5, 1.3])
    noise, number = 0.7, 400_000
    steps = list(counted([1000, number], thresholds, noise, np.random.default_rng(5)))
    rng = np.random.default_rng(6)
    absent, present = noise * rng.standard_normal(number), 1 + noise * rng.standard_normal(number)
    for place, threshold in enumerate(thresholds):
        counts = steps[1].at(place)
        assert counts.fpr == pytest.approx((absent > threshold).mean(), abs=0.005)
        assert counts.fnr == pytest.approx((present <= threshold).mean(), abs=0.005)
        assert steps[0].at(place).false_positives <= counts.false_positives


def test_rows_with_thresholds_from_the_counted_data_are_called_heuristic(tmp_path: Path) -> None:
    found = kinds(tiny("observations", tmp_path).rows)
    assert {kind for (_, rule), kind in found.items() if "same data" in rule} == {"heuristic"}
    assert {kind for (_, rule), kind in found.items() if "same data" not in rule} == {"confidence"}


def test_the_regions_of_the_paper_have_its_numbers(tmp_path: Path) -> None:
    rows = tiny("regions", tmp_path).rows
    attack = only(rows, region="attack")[0]
    assert attack["epsilon"] == pytest.approx(0.3, abs=1e-3)
    [mu] = values_of(only(rows, region="Gaussian mechanism"), "parameter")
    assert Gaussian().epsilon(mu, 1e-5) == pytest.approx(1.0, abs=1e-4)
    assert attack["parameter"] < mu


def test_no_accountants_curve_lies_above_the_attack_on_a_sampled_step(tmp_path: Path) -> None:
    rows = tiny("subsampling", tmp_path).rows
    exact, pld = (only(rows, curve=name) for name in ("this attack, without end", "PLD"))
    gaps = [float(a["fnr"] or 0) - float(b["fnr"] or 0) for a, b in zip(exact, pld, strict=True)]
    assert min(gaps) > -1e-3
    assert max(gaps) > 0.05
    assert not math.isnan(sum(gaps))


TRAINED = [figure.name for figure in FIGURES if figure.needs]


QUICK = "bugs", "clipping-only"  # the others ask the accountant, for minutes on a busy machine


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in TRAINED]
)
def test_a_figure_of_trainings_runs_on_the_embedded_data(name: str, tmp_path: Path) -> None:
    found = tiny(name, tmp_path)
    assert found.data == ("digits",)
    assert {"confidence", "heuristic"} <= set(found.kinds.values())
    assert all(np.isfinite(one.y).all() for panel in found.picture.panels for one in panel.series)
    json.dumps(found.to_dict(), allow_nan=False)
    again = tiny(name, tmp_path)
    assert again.rows == found.rows


@pytest.mark.parametrize("name", TRAINED)
def test_without_files_a_figure_says_which_it_needs_and_offers_the_embedded_data(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"--data-dir .*cifar-10-batches-bin.*or give --embedded") as caught:
        reproduce(figure_named(name), output=tmp_path / "out", data=Data(tmp_path))
    assert str(caught.value).count("\n") == 0
    assert not (tmp_path / "out").exists()
