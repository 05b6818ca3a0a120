"""Algorithm 4: a trade-off curve as the maximum of few lines."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit.accounting import SubsampledGaussian, noise_for_epsilon
from dpaudit.accounting._pld import epsilon_above
from dpaudit.experiments.reproduction._bounds import DELTA
from dpaudit.experiments.reproduction._curves import rates_panel, rates_series
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._picture import Mark, Panel, Picture, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, only, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import Gaussian, PiecewiseLinear, TradeOff
from dpaudit.stats._types import FloatArray

__all__ = ["PLD"]

_EXACT = "exact"
_SPACINGS = "linear", "logarithmic"


def _cells(settings: Settings) -> list[Key]:
    lines = [(n, spacing) for n in settings["num_lines"] for spacing in _SPACINGS]
    return [
        {"mechanism": name, "curve": curve}
        for name in settings["mechanisms"]
        for curve in (_EXACT, *(f"{n} lines, {spacing}" for n, spacing in lines))
    ]


def _mechanism(name: str, settings: Settings) -> tuple[TradeOff, float]:
    epsilon = settings["epsilon"]
    if name == "Gaussian":
        return Gaussian(), Gaussian().with_epsilon(epsilon, DELTA)
    rate, steps = settings["sample_rate"], settings["num_steps"]
    noise = noise_for_epsilon(epsilon, sample_rate=rate, num_steps=steps, delta=DELTA)
    return SubsampledGaussian(rate, steps), 1 / noise


def _deltas(curve: str) -> FloatArray:
    """The deltas of a description such as ``10 lines, linear``."""
    number, _, spacing = curve.split()
    if spacing == "linear":
        return np.linspace(DELTA, 1 - DELTA, int(number))
    reach = math.log(DELTA / (1 - DELTA))
    return special.expit(np.linspace(reach, -reach, int(number)))


def _lines(family: TradeOff, parameter: float, curve: str) -> tuple[FloatArray, FloatArray]:
    """The epsilon and the delta of every line."""
    deltas = _deltas(curve)
    return np.array([max(_epsilon(family, parameter, float(delta)), 0.0) for delta in deltas]), deltas


def _epsilon(family: TradeOff, parameter: float, delta: float) -> float:
    """Of a whole training straight from its distribution, because few parameters have many deltas here."""
    if isinstance(family, SubsampledGaussian):
        return epsilon_above(1 / parameter, family.sample_rate, family.num_steps, delta)
    return family.epsilon(parameter, delta)


def _fnr(family: TradeOff, parameter: float, curve: str, fpr: FloatArray) -> FloatArray:
    epsilons, deltas = _lines(family, parameter, curve)
    return PiecewiseLinear(tuple(epsilons), tuple(deltas)).fnr(1.0, fpr)


def _concluded(family: TradeOff, parameter: float, curve: str, halvings: int) -> float:
    """The epsilon that the best attack with equal error rates shows, if it is read by lines.

    They lie below the curve, so what they refute is a less leaky one.
    """
    error = family.balanced_error(parameter)
    low, high = parameter / 2, parameter
    for _ in range(halvings):
        middle = (low + high) / 2
        above = float(_fnr(family, middle, curve, np.asarray(error))) >= error
        low, high = (middle, high) if above else (low, middle)
    return _epsilon(family, low, DELTA)


def _measure(key: Key, work: Work) -> list[Row]:
    name, curve = str(key["mechanism"]), str(key["curve"])
    fpr = special.expit(np.linspace(-10, 10, work.settings["num_points"]))
    family, parameter = _mechanism(name, work.settings)
    exact = family.fnr(parameter, fpr)
    if curve == _EXACT:
        return [{"fpr": float(x), "fnr": float(y)} for x, y in zip(fpr, exact, strict=True)]
    epsilons, deltas = _lines(family, parameter, curve)
    made = _fnr(family, parameter, curve, fpr)
    steep = np.maximum(0, 1 - deltas[:, None] - np.exp(epsilons)[:, None] * fpr)
    flat = np.exp(-epsilons)[:, None] * (1 - deltas[:, None] - fpr)
    printed = np.min(np.maximum(steep, flat), axis=0)
    concluded = _concluded(family, parameter, curve, work.settings["halvings"])
    return [
        {"fpr": float(x), "fnr": float(y), "least": float(z), "lost": float(gap), "concluded": concluded}
        for x, y, z, gap in zip(fpr, made, printed, exact - made, strict=True)
    ]


def _panel(rows: Rows, name: str) -> Panel:
    marks = {_EXACT: Mark.LINE}
    series = [
        rates_series(only(rows, mechanism=name, curve=curve), curve, marks.get(curve, Mark.DASHES))
        for curve in values_of(rows, "curve")
    ]
    return rates_panel(series, name)


def _picture(rows: Rows, settings: Settings) -> Picture:
    return Picture(panels=[_panel(rows, name) for name in settings["mechanisms"]])


def _tables(rows: Rows, settings: Settings) -> list[Table]:
    lines = []
    for name in settings["mechanisms"]:
        for curve in values_of(rows, "curve"):
            found = only(rows, mechanism=name, curve=curve)
            if curve == _EXACT:
                continue
            lost = max(float(row["lost"] or 0) for row in found)
            least = max(float(row["least"] or 0) for row in found)
            concluded = float(found[0]["concluded"] or 0)
            lines.append((name, curve, f"{lost:.4f}", f"{concluded:.2f}", f"{least:.1g}"))
    header = (
        "mechanism",
        "lines",
        "largest distance from the curve",
        f"epsilon that a perfect attack shows (truth {settings['epsilon']:g})",
        "largest fnr of their minimum",
    )
    return [Table(title="How much few lines lose", header=header, rows=lines)]


_USUAL = {
    "epsilon": 8.0,
    "num_points": 401,
    "num_lines": (10, 100),
    "mechanisms": ("Gaussian", "DP-SGD"),
    "sample_rate": 4096 / 50000,
    "num_steps": 2500,
    "halvings": 12,
}

PLD = Figure(
    name="pld",
    title="Algorithm 4 with 10 and 100 lines against the exact curve",
    paper="Figure of appendix A: ten lines are close to the curve; the epsilon that they lose is of the "
    "order of 0.1.",
    settings=simulated(_USUAL, num_points=41, num_lines=(10,), num_steps=10, halvings=3),
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=(
        "The paper prints the minimum of the lines, spaced linearly in delta. Every line is a guarantee, so "
        "the curve is their maximum; the minimum is valid and says nothing. Curves are computed, not "
        "measured: no number here is a bound.",
    ),
)
