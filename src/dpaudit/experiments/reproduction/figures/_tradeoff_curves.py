"""Curves of mechanisms with the same epsilon and delta.

The region of error rates that (eps, delta)-DP allows, and that of the Gaussian mechanism inside it. Algorithm
4: a trade-off curve as the maximum of few lines.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit._types import FloatArray
from dpaudit.accounting import SubsampledGaussian, noise_for_epsilon
from dpaudit.accounting._pld import epsilon_above
from dpaudit.experiments.reproduction._figure import (
    Figure,
    Key,
    Mark,
    Panel,
    Picture,
    Row,
    Rows,
    Series,
    Settings,
    Table,
    Work,
    only,
    simulated,
    values_of,
)
from dpaudit.experiments.reproduction._simulation import DELTA
from dpaudit.experiments.reproduction._study import rates_of, rates_panel, rates_series
from dpaudit.stats import ApproximateDP, Gaussian, Laplace, PiecewiseLinear, RandomizedResponse, TradeOff
from dpaudit.stats.tradeoffs._base import ratio_epsilon

_ANY_TRADEOFFS = "(eps,delta)-DP"
_RESPONSE = "randomised response"
_NAMES = _ANY_TRADEOFFS, _RESPONSE, "Laplace", "Gaussian", "DP-SGD"


def _curve(name: str, settings: Settings) -> tuple[TradeOff, float]:
    """The family, and its member with the epsilon and delta of the figure."""
    epsilon = settings["epsilon"]
    if name == "DP-SGD":
        rate, steps = settings["sample_rate"], settings["num_steps"]
        noise = noise_for_epsilon(epsilon, sample_rate=rate, num_steps=steps, delta=DELTA)
        return SubsampledGaussian(rate, steps), 1 / noise
    family: TradeOff = {
        _ANY_TRADEOFFS: ApproximateDP(DELTA),
        _RESPONSE: RandomizedResponse(),
        "Laplace": Laplace(),
        "Gaussian": Gaussian(),
    }[name]
    return family, epsilon if name == _ANY_TRADEOFFS else family.with_epsilon(epsilon, DELTA)


def _cells_tradeoffs(_: Settings) -> list[Key]:
    return [{"mechanism": name} for name in _NAMES]


def _measure_tradeoffs(key: Key, work: Work) -> list[Row]:
    family, parameter = _curve(str(key["mechanism"]), work.settings)
    fpr = np.linspace(0, 1, work.settings["num_points"])
    fnr = family.fnr(parameter, fpr)
    return [
        {"parameter": parameter, "symbol": family.symbol, "fpr": float(x), "fnr": float(y)}
        for x, y in zip(fpr, fnr, strict=True)
    ]


def _picture_tradeoffs(rows: Rows, _: Settings) -> Picture:
    marks = dict.fromkeys((_RESPONSE, "DP-SGD"), Mark.DASHES)
    series = [
        rates_series(only(rows, mechanism=name), name, marks.get(name, Mark.LINE))
        for name in values_of(rows, "mechanism")
    ]
    return Picture(panels=[rates_panel(series)])


def _tables_tradeoffs(rows: Rows, _: Settings) -> list[Table]:
    """The smallest sum of both rates tells the curves apart: the further below 1, the leakier."""
    lines = []
    for name in values_of(rows, "mechanism"):
        found = only(rows, mechanism=name)
        least = min(map(sum, zip(*rates_of(found), strict=True)))
        parameter = f"{found[0]['symbol']} = {float(found[0]['parameter'] or 0):.4g}"
        lines.append((name, parameter, f"{1 - least:.4f}"))
    gap = _largest_gap(rows, _ANY_TRADEOFFS, _RESPONSE)
    return [
        Table(
            title="How well the best attack does with both error rates weighed alike",
            header=("mechanism", "its parameter", "1 - fpr - fnr at most"),
            rows=lines,
        ),
        Table(
            title="What the paper says",
            header=("", "paper", "here"),
            rows=[("randomised response and (eps,delta)-DP", "overlap", f"differ by {gap:.1g} at most")],
        ),
    ]


def _largest_gap(rows: Rows, one: str, other: str) -> float:
    first, second = (rates_of(only(rows, mechanism=name))[1] for name in (one, other))
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


_USUAL_TRADEOFFS = {"epsilon": 1.0, "num_points": 401, "sample_rate": 4096 / 50000, "num_steps": 2500}

TRADEOFFS = Figure(
    name="tradeoffs",
    title="Trade-off curves of mechanisms at epsilon = 1, delta = 1e-5",
    paper="Figure of section 4: mechanisms with the same (epsilon, delta) have different curves; that of "
    "randomised response overlaps with that of (epsilon, delta)-DP.",
    settings=simulated(_USUAL_TRADEOFFS, num_points=21, num_steps=10),
    cells=_cells_tradeoffs,
    measure=_measure_tradeoffs,
    picture=_picture_tradeoffs,
    tables=_tables_tradeoffs,
    remarks=("Curves are computed, not measured: no number here is a bound.",),
)


_ANY_REGIONS, _GAUSSIAN = "(eps,delta)-DP", "Gaussian mechanism"
_ATTACK_FPR, _ATTACK_EPSILON = 0.23, 0.3  # the paper's red dot


def _attack() -> tuple[float, float]:
    return _ATTACK_FPR, 1 - _ATTACK_FPR * (math.exp(_ATTACK_EPSILON) + DELTA)


def _cells_regions(_: Settings) -> list[Key]:
    return [{"region": _ANY_REGIONS}, {"region": _GAUSSIAN}, {"region": "attack"}]


def _measure_regions(key: Key, work: Work) -> list[Row]:
    epsilon = work.settings["epsilon"]
    if key["region"] == "attack":
        attack = _attack()
        rates = [np.asarray(rate) for rate in attack]
        mu = float(Gaussian().parameter(rates[0], rates[1]))
        seen = float(ratio_epsilon(rates[0], rates[1], DELTA))
        return [{"fpr": attack[0], "low": attack[1], "parameter": mu, "epsilon": seen}]
    family: TradeOff = ApproximateDP(DELTA) if key["region"] == _ANY_REGIONS else Gaussian()
    parameter = epsilon if key["region"] == _ANY_REGIONS else family.with_epsilon(epsilon, DELTA)
    fpr = np.linspace(0, 1, work.settings["num_points"])
    low, high = family.fnr(parameter, fpr), 1 - family.fnr(parameter, 1 - fpr)
    return [
        {"parameter": parameter, "fpr": float(x), "low": float(a), "high": float(b)}
        for x, a, b in zip(fpr, low, high, strict=True)
    ]


def _picture_regions(rows: Rows, _: Settings) -> Picture:
    series = []
    for name in (_ANY_REGIONS, _GAUSSIAN):
        found = only(rows, region=name)
        x = [float(row["fpr"] or 0) for row in found]
        there, back = ([float(row[side] or 0) for row in found] for side in ("low", "high"))
        series.append(Series(label=name, x=[*x, *x[::-1]], y=[*there, *back[::-1]]))
    attack = only(rows, region="attack")[0]
    point = [float(attack["fpr"] or 0)], [float(attack["low"] or 0)]
    series.append(Series(label="the paper's attack", x=point[0], y=point[1], mark=Mark.POINTS))
    return Picture(panels=[rates_panel(series)])


def _tables_regions(rows: Rows, _: Settings) -> list[Table]:
    mu = values_of(only(rows, region=_GAUSSIAN), "parameter")[0]
    attack = only(rows, region="attack")[0]
    most = float(Gaussian().fnr(mu, np.asarray(_ATTACK_FPR)))
    return [
        Table(
            title="What the paper says",
            header=("", "paper", "here"),
            rows=[
                ("mu of the Gaussian mechanism", "about 0.25", f"{mu:.4f}"),
                ("epsilon of the attack by (eps,delta)-DP", "0.3", f"{float(attack['epsilon'] or 0):.4f}"),
                ("mu of the attack", "about 0.25", f"{float(attack['parameter'] or 0):.4f}"),
                ("smallest fnr at its fpr", "that of the attack", f"{most:.4f}, {attack['low']:.4f}"),
            ],
        )
    ]


REGIONS = Figure(
    name="regions",
    title="Privacy regions at epsilon = 1, delta = 1e-5",
    paper="Figure of section 4: the region of the Gaussian mechanism lies inside that of (epsilon, "
    "delta)-DP and touches it near the corners only; an attack with fpr = 0.23 that is nearly the best "
    "possible shows epsilon = 0.3.",
    settings=simulated({"epsilon": 1.0, "num_points": 401}, num_points=21),
    cells=_cells_regions,
    measure=_measure_regions,
    picture=_picture_regions,
    tables=_tables_regions,
    remarks=("Regions are computed, not measured: no number here is a bound.",),
)


_EXACT = "exact"
_SPACINGS = "linear", "logarithmic"


def _cells_pld(settings: Settings) -> list[Key]:
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


def _measure_pld(key: Key, work: Work) -> list[Row]:
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


def _picture_pld(rows: Rows, settings: Settings) -> Picture:
    return Picture(panels=[_panel(rows, name) for name in settings["mechanisms"]])


def _tables_pld(rows: Rows, settings: Settings) -> list[Table]:
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


_USUAL_PLD = {
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
    settings=simulated(_USUAL_PLD, num_points=41, num_lines=(10,), num_steps=10, halvings=3),
    cells=_cells_pld,
    measure=_measure_pld,
    picture=_picture_pld,
    tables=_tables_pld,
    remarks=(
        "The paper prints the minimum of the lines, spaced linearly in delta. Every line is a guarantee, so "
        "the curve is their maximum; the minimum is valid and says nothing. Curves are computed, not "
        "measured: no number here is a bound.",
    ),
)
