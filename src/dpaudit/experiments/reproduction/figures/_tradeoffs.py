"""Curves of mechanisms with the same epsilon and delta."""

from __future__ import annotations

import numpy as np

from dpaudit.accounting import SubsampledGaussian, noise_for_epsilon
from dpaudit.experiments.reproduction._bounds import DELTA
from dpaudit.experiments.reproduction._curves import rates_of, rates_panel, rates_series
from dpaudit.experiments.reproduction._figure import Figure
from dpaudit.experiments.reproduction._picture import Mark, Picture, Table
from dpaudit.experiments.reproduction._scale import simulated
from dpaudit.experiments.reproduction._values import Key, Row, Rows, Settings, only, values_of
from dpaudit.experiments.reproduction._work import Work
from dpaudit.stats import ApproximateDP, Gaussian, Laplace, RandomizedResponse, TradeOff

__all__ = ["TRADEOFFS"]

_ANY = "(eps,delta)-DP"
_RESPONSE = "randomised response"
_NAMES = _ANY, _RESPONSE, "Laplace", "Gaussian", "DP-SGD"


def _curve(name: str, settings: Settings) -> tuple[TradeOff, float]:
    """The family, and its member with the epsilon and delta of the figure."""
    epsilon = settings["epsilon"]
    if name == "DP-SGD":
        rate, steps = settings["sample_rate"], settings["num_steps"]
        noise = noise_for_epsilon(epsilon, sample_rate=rate, num_steps=steps, delta=DELTA)
        return SubsampledGaussian(rate, steps), 1 / noise
    family: TradeOff = {
        _ANY: ApproximateDP(DELTA),
        _RESPONSE: RandomizedResponse(),
        "Laplace": Laplace(),
        "Gaussian": Gaussian(),
    }[name]
    return family, epsilon if name == _ANY else family.with_epsilon(epsilon, DELTA)


def _cells(_: Settings) -> list[Key]:
    return [{"mechanism": name} for name in _NAMES]


def _measure(key: Key, work: Work) -> list[Row]:
    family, parameter = _curve(str(key["mechanism"]), work.settings)
    fpr = np.linspace(0, 1, work.settings["num_points"])
    fnr = family.fnr(parameter, fpr)
    return [
        {"parameter": parameter, "symbol": family.symbol, "fpr": float(x), "fnr": float(y)}
        for x, y in zip(fpr, fnr, strict=True)
    ]


def _picture(rows: Rows, _: Settings) -> Picture:
    marks = dict.fromkeys((_RESPONSE, "DP-SGD"), Mark.DASHES)
    series = [
        rates_series(only(rows, mechanism=name), name, marks.get(name, Mark.LINE))
        for name in values_of(rows, "mechanism")
    ]
    return Picture(panels=[rates_panel(series)])


def _tables(rows: Rows, _: Settings) -> list[Table]:
    """The smallest sum of both rates tells the curves apart: the further below 1, the leakier."""
    lines = []
    for name in values_of(rows, "mechanism"):
        found = only(rows, mechanism=name)
        least = min(map(sum, zip(*rates_of(found), strict=True)))
        parameter = f"{found[0]['symbol']} = {float(found[0]['parameter'] or 0):.4g}"
        lines.append((name, parameter, f"{1 - least:.4f}"))
    gap = _largest_gap(rows, _ANY, _RESPONSE)
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


_USUAL = {"epsilon": 1.0, "num_points": 401, "sample_rate": 4096 / 50000, "num_steps": 2500}

TRADEOFFS = Figure(
    name="tradeoffs",
    title="Trade-off curves of mechanisms at epsilon = 1, delta = 1e-5",
    paper="Figure of section 4: mechanisms with the same (epsilon, delta) have different curves; that of "
    "randomised response overlaps with that of (epsilon, delta)-DP.",
    settings=simulated(_USUAL, num_points=21, num_steps=10),
    cells=_cells,
    measure=_measure,
    picture=_picture,
    tables=_tables,
    remarks=("Curves are computed, not measured: no number here is a bound.",),
)
