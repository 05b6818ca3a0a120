"""The region of error rates that (eps, delta)-DP allows, and that of the Gaussian mechanism inside it."""

from __future__ import annotations

import math

import numpy as np

from dpaudit.experiments.reproduction._bounds import DELTA
from dpaudit.experiments.reproduction._curves import rates_panel
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._picture import Mark, Picture, Series, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, only, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import ApproximateDP, Gaussian, TradeOff
from dpaudit.stats.tradeoffs._base import ratio_epsilon

__all__ = ["REGIONS"]

_ANY, _GAUSSIAN = "(eps,delta)-DP", "Gaussian mechanism"
_ATTACK_FPR, _ATTACK_EPSILON = 0.23, 0.3  # the paper's red dot


def _attack() -> tuple[float, float]:
    return _ATTACK_FPR, 1 - _ATTACK_FPR * (math.exp(_ATTACK_EPSILON) + DELTA)


def _cells(_: Settings) -> list[Key]:
    return [{"region": _ANY}, {"region": _GAUSSIAN}, {"region": "attack"}]


def _measure(key: Key, work: Work) -> list[Row]:
    epsilon = work.settings["epsilon"]
    if key["region"] == "attack":
        attack = _attack()
        rates = [np.asarray(rate) for rate in attack]
        mu = float(Gaussian().parameter(rates[0], rates[1]))
        seen = float(ratio_epsilon(rates[0], rates[1], DELTA))
        return [{"fpr": attack[0], "low": attack[1], "parameter": mu, "epsilon": seen}]
    family: TradeOff = ApproximateDP(DELTA) if key["region"] == _ANY else Gaussian()
    parameter = epsilon if key["region"] == _ANY else family.with_epsilon(epsilon, DELTA)
    fpr = np.linspace(0, 1, work.settings["num_points"])
    low, high = family.fnr(parameter, fpr), 1 - family.fnr(parameter, 1 - fpr)
    return [
        {"parameter": parameter, "fpr": float(x), "low": float(a), "high": float(b)}
        for x, a, b in zip(fpr, low, high, strict=True)
    ]


def _picture(rows: Rows, _: Settings) -> Picture:
    series = []
    for name in (_ANY, _GAUSSIAN):
        found = only(rows, region=name)
        x = [float(row["fpr"] or 0) for row in found]
        there, back = ([float(row[side] or 0) for row in found] for side in ("low", "high"))
        series.append(Series(label=name, x=[*x, *x[::-1]], y=[*there, *back[::-1]]))
    attack = only(rows, region="attack")[0]
    point = [float(attack["fpr"] or 0)], [float(attack["low"] or 0)]
    series.append(Series(label="the paper's attack", x=point[0], y=point[1], mark=Mark.POINTS))
    return Picture(panels=[rates_panel(series)])


def _tables(rows: Rows, _: Settings) -> list[Table]:
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
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=("Regions are computed, not measured: no number here is a bound.",),
)
