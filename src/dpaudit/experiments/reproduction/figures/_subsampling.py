"""A Poisson-sampled Gaussian step: accounted curves and what an attack really finds."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit.accounting import SubsampledGaussian
from dpaudit.accounting._pld import epsilon_above
from dpaudit.experiments.reproduction._bounds import DELTA
from dpaudit.experiments.reproduction._curves import rates_of, rates_panel, rates_series
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._picture import Mark, Picture, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, only, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import Gaussian
from dpaudit.stats._types import FloatArray

__all__ = ["SUBSAMPLING"]

_PLD, _GDP = "PLD", "GDP with the same epsilon"
_ADDED, _MEASURED = "this attack, without end", "measured"
_PLACES = 0.01, 0.1, 0.25, 0.5, 0.75


def _cells(_: Settings) -> list[Key]:
    return [{"curve": name} for name in (_PLD, _GDP, _ADDED, _MEASURED)]


def _measure(key: Key, work: Work) -> list[Row]:
    if key["curve"] == _MEASURED:
        return _rows(*_attacked(work))
    rate, noise = work.settings["canary_rate"], math.sqrt(work.settings["variance"])
    step = SubsampledGaussian(rate, 1)
    fpr = np.linspace(0, 1, work.settings["num_points"])
    if key["curve"] == _PLD:
        return _rows(fpr, step.fnr(1 / noise, fpr))
    if key["curve"] == _GDP:
        epsilon = epsilon_above(noise, rate, 1, DELTA)
        mu = Gaussian().with_epsilon(epsilon, DELTA)
        return [{**row, "epsilon": epsilon, "mu": mu} for row in _rows(fpr, Gaussian().fnr(mu, fpr))]
    place = -special.ndtri(fpr)  # of the threshold, in units of the noise
    fnr = (1 - rate) * special.ndtr(place) + rate * special.ndtr(place - 1 / noise)
    return _rows(fpr, fnr)


def _attacked(work: Work) -> tuple[FloatArray, FloatArray]:
    """Both error rates at every threshold, of scores that were drawn."""
    settings, rng = work.settings, work.generator()
    number, noise = settings["num_observations"], math.sqrt(settings["variance"])
    absent = np.sort(noise * rng.standard_normal(number))
    there = rng.random(number) < settings["canary_rate"]
    present = np.sort(there + noise * rng.standard_normal(number))
    thresholds = np.quantile(np.concatenate([absent, present]), np.linspace(0, 1, settings["num_points"]))
    fpr = 1 - np.searchsorted(absent, thresholds, side="right") / number
    return fpr, np.searchsorted(present, thresholds, side="right") / number


def _rows(fpr: FloatArray, fnr: FloatArray) -> list[Row]:
    return [{"fpr": float(x), "fnr": float(y)} for x, y in zip(fpr, fnr, strict=True)]


def _picture(rows: Rows, _: Settings) -> Picture:
    marks = {_ADDED: Mark.DASHES, _MEASURED: Mark.POINTS}
    series = [
        rates_series(
            only(rows, curve=name), name, marks.get(name, Mark.LINE), every=8 if name == _MEASURED else 1
        )
        for name in values_of(rows, "curve")
    ]
    return Picture(panels=[rates_panel(series)])


def _tables(rows: Rows, _: Settings) -> list[Table]:
    lines = []
    for name in values_of(rows, "curve"):
        x, y = rates_of(sorted(only(rows, curve=name), key=lambda row: float(row["fpr"] or 0)))
        lines.append((name, *(f"{np.interp(place, x, y):.3f}" for place in _PLACES)))
    epsilon, mu = (values_of(rows, name)[0] for name in ("epsilon", "mu"))
    return [
        Table(
            title=f"False negative rate at false positive rates; epsilon = {epsilon:.2f}, mu = {mu:.2f}",
            header=("curve", *(f"fpr = {place:g}" for place in _PLACES)),
            rows=lines,
        )
    ]


_USUAL = {"canary_rate": 0.25, "variance": 0.3, "num_observations": 10_000, "num_points": 401}

SUBSAMPLING = Figure(
    name="subsampling",
    title="A Gaussian step with sampling rate 1/4 and variance 0.3, 10,000 observations",
    paper="Figure of section 5.4: the curves of PLD and GDP accounting lie below the measured one, most so "
    "at larger false positive rates.",
    settings=simulated(_USUAL, num_observations=500, num_points=41),
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=(
        "The curve of an accountant is for adding and for removing an example at once. This attack tells "
        "the step with the canary from the one without, so it can follow one of the two directions only: "
        "the dashed curve, which is exact, and which touches the accountant's where false positives are "
        "rare.",
    ),
)
