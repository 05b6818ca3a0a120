"""Computed curves of mechanisms with the same epsilon and delta.

The figures show trade-off curves, the regions of error rates that they allow, and the approximation of a
curve by a few lines (Algorithm 4 of the paper).
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from dpaudit.accounting import SubsampledGaussian, epsilon_above, noise_for_epsilon
from dpaudit.experiments.reproduction import _figure as fig
from dpaudit.experiments.reproduction._simulation import DELTA
from dpaudit.stats import ApproximateDP, Gaussian, Laplace, PiecewiseLinear, RandomizedResponse, TradeOff
from dpaudit.stats.tradeoffs import ratio_epsilon

_APPROXIMATE, _EXACT = "(eps,delta)-DP", "exact"
_RESPONSE = "randomised response"  # seeds and files of cells depend on this spelling
_LABELS = {_RESPONSE: "randomized response"}
_REGIONS = {_APPROXIMATE: _APPROXIMATE, "Gaussian mechanism": "Gaussian"}
_ATTACK_FPR, _ATTACK_EPSILON = 0.23, 0.3  # the paper's red dot


def _at_epsilon(name: str, settings: fig.Settings) -> tuple[TradeOff, float]:
    """Return a family and the parameter of its member with the epsilon and delta of the figure."""
    epsilon = settings["epsilon"]
    if name == _APPROXIMATE:
        return ApproximateDP(DELTA), epsilon
    if name == "DP-SGD":
        rate, steps = settings["sample_rate"], settings["num_steps"]
        noise = noise_for_epsilon(epsilon, sample_rate=rate, num_steps=steps, delta=DELTA)
        return SubsampledGaussian(rate, steps), 1 / noise
    family: TradeOff = {_RESPONSE: RandomizedResponse(), "Laplace": Laplace(), "Gaussian": Gaussian()}[name]
    return family, family.with_epsilon(epsilon, DELTA)


class TradeoffCurves(fig.Figure):
    """The trade-off curves of five mechanisms."""

    def cells(self, _: fig.Settings) -> list[fig.Key]:
        return fig.crossed(mechanism=(_APPROXIMATE, _RESPONSE, "Laplace", "Gaussian", "DP-SGD"))

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        family, parameter = _at_epsilon(str(key["mechanism"]), work.settings)
        fpr = np.linspace(0, 1, work.settings["num_points"])
        points = fig.rates_rows(fpr, family.fnr(parameter, fpr))
        return [{"parameter": parameter, "symbol": family.symbol, **point} for point in points]

    def picture(self, rows: fig.FigureRows, _: fig.Settings) -> fig.Picture:
        marks = dict.fromkeys((_RESPONSE, "DP-SGD"), fig.Mark.DASHES)
        series = [
            rows.only(mechanism=name).rates_series(_LABELS.get(name, name), marks.get(name))
            for name in rows.values("mechanism")
        ]
        return fig.Picture(panels=[fig.rates_panel(series)])

    def tables(self, rows: fig.FigureRows, _: fig.Settings) -> list[fig.Table]:
        """Compare the curves by their smallest sum of error rates: the further below 1, the worse."""
        lines = []
        for name in rows.values("mechanism"):
            curve_rows = rows.only(mechanism=name)
            least = min(map(sum, zip(*curve_rows.rates, strict=True)))
            parameter = f"{curve_rows[0]['symbol']} = {float(curve_rows[0]['parameter'] or 0):.4g}"
            lines.append((_LABELS.get(name, name), parameter, f"{1 - least:.4f}"))
        first, second = (rows.only(mechanism=name).numbers("fnr") for name in (_APPROXIMATE, _RESPONSE))
        gap = max(abs(a - b) for a, b in zip(first, second, strict=True))
        overlap = "randomized response and (eps,delta)-DP", "overlap", f"differ by at most {gap:.1g}"
        return [
            fig.Table(
                title="Success of the best attack, with equal weight on both error rates",
                header=("mechanism", "parameter", "largest 1 - fpr - fnr"),
                rows=lines,
            ),
            fig.comparison_table([overlap]),
        ]


class PrivacyRegions(fig.Figure):
    """The error rates allowed by (eps, delta)-DP and by the Gaussian mechanism, and an attack."""

    def cells(self, _: fig.Settings) -> list[fig.Key]:
        return fig.crossed(region=(*_REGIONS, "attack"))

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        if key["region"] == "attack":
            return [self._attack()]
        family, parameter = _at_epsilon(_REGIONS[str(key["region"])], work.settings)
        fpr = np.linspace(0, 1, work.settings["num_points"])
        low, high = family.fnr(parameter, fpr), 1 - family.fnr(parameter, 1 - fpr)
        return [
            {"parameter": parameter, "fpr": float(x), "low": float(a), "high": float(b)}
            for x, a, b in zip(fpr, low, high, strict=True)
        ]

    def _attack(self) -> fig.Row:
        fpr, fnr = _ATTACK_FPR, 1 - _ATTACK_FPR * (math.exp(_ATTACK_EPSILON) + DELTA)
        rates = np.asarray(fpr), np.asarray(fnr)
        mu, epsilon = float(Gaussian().parameter(*rates)), float(ratio_epsilon(*rates, DELTA))
        return {"fpr": fpr, "low": fnr, "parameter": mu, "epsilon": epsilon}

    def picture(self, rows: fig.FigureRows, _: fig.Settings) -> fig.Picture:
        """Draw each region as a closed line, and the attack as a point."""
        series = []
        for name in _REGIONS:
            x, low, high = (rows.only(region=name).numbers(side) for side in ("fpr", "low", "high"))
            series.append(fig.Series(label=name, x=[*x, *x[::-1]], y=[*low, *high[::-1]]))
        x, y = (rows.only(region="attack").numbers(side) for side in ("fpr", "low"))
        series.append(fig.Series(label="the paper's attack", x=x, y=y, mark=fig.Mark.POINTS))
        return fig.Picture(panels=[fig.rates_panel(series)])

    def tables(self, rows: fig.FigureRows, _: fig.Settings) -> list[fig.Table]:
        mu = rows.only(region="Gaussian mechanism").values("parameter")[0]
        attack = rows.only(region="attack")[0]
        most = float(Gaussian().fnr(mu, np.asarray(_ATTACK_FPR)))
        return [
            fig.comparison_table(
                [
                    ("mu of the Gaussian mechanism", "about 0.25", f"{mu:.4f}"),
                    ("epsilon of the attack with (eps,delta)-DP", "0.3", f"{attack['epsilon']:.4f}"),
                    ("mu of the attack", "about 0.25", f"{attack['parameter']:.4f}"),
                    ("smallest fnr at its fpr", "that of the attack", f"{most:.4f}, {attack['low']:.4f}"),
                ]
            )
        ]


class LineApproximation(fig.Figure):
    """Algorithm 4: a trade-off curve as the maximum of a few lines."""

    def cells(self, settings: fig.Settings) -> list[fig.Key]:
        lines = [
            f"{n} lines, {spacing}" for n in settings["num_lines"] for spacing in ("linear", "logarithmic")
        ]
        return fig.crossed(mechanism=settings["mechanisms"], curve=(_EXACT, *lines))

    def measure(self, key: fig.Key, work: fig.Work) -> list[fig.Row]:
        """Compute a curve; for lines, also their distance from the exact curve and the epsilon they show."""
        curve = str(key["curve"])
        fpr = special.expit(np.linspace(-10, 10, work.settings["num_points"]))
        family, parameter = _at_epsilon(str(key["mechanism"]), work.settings)
        exact = family.fnr(parameter, fpr)
        if curve == _EXACT:
            return fig.rates_rows(fpr, exact)
        lines = _lines(family, parameter, curve)
        approximate = lines.fnr(1.0, fpr)
        epsilons, deltas = np.array(lines.epsilons)[:, None], np.array(lines.deltas)[:, None]
        steep = np.maximum(0, 1 - deltas - np.exp(epsilons) * fpr)
        flat = np.exp(-epsilons) * (1 - deltas - fpr)
        printed = np.min(np.maximum(steep, flat), axis=0)
        concluded = _concluded(family, parameter, curve, work.settings["halvings"])
        return [
            {**point, "least": float(least), "lost": float(gap), "concluded": concluded}
            for point, least, gap in zip(
                fig.rates_rows(fpr, approximate), printed, exact - approximate, strict=True
            )
        ]

    def picture(self, rows: fig.FigureRows, settings: fig.Settings) -> fig.Picture:
        return fig.Picture(panels=[self._panel(rows, name) for name in settings["mechanisms"]])

    def _panel(self, rows: fig.FigureRows, name: str) -> fig.Panel:
        marks = {_EXACT: fig.Mark.LINE}
        series = [
            rows.only(mechanism=name, curve=curve).rates_series(curve, marks.get(curve, fig.Mark.DASHES))
            for curve in rows.values("curve")
        ]
        return fig.rates_panel(series, name)

    def tables(self, rows: fig.FigureRows, settings: fig.Settings) -> list[fig.Table]:
        lines = []
        for name in settings["mechanisms"]:
            for curve in rows.values("curve"):
                if curve == _EXACT:
                    continue
                curve_rows = rows.only(mechanism=name, curve=curve)
                lost, least = (max(curve_rows.numbers(side)) for side in ("lost", "least"))
                lines.append(
                    (name, curve, f"{lost:.4f}", f"{curve_rows[0]['concluded']:.2f}", f"{least:.1g}")
                )
        header = (
            "mechanism",
            "lines",
            "largest distance from the curve",
            f"epsilon shown by an optimal attack (truth {settings['epsilon']:g})",
            "largest fnr of their minimum",
        )
        return [fig.Table(title="Loss from a small number of lines", header=header, rows=lines)]


def _lines(family: TradeOff, parameter: float, curve: str) -> PiecewiseLinear:
    """Return the lines for a description such as ``10 lines, linear``, each with its epsilon and delta."""
    number, _, spacing = curve.split()
    if spacing == "linear":
        deltas = np.linspace(DELTA, 1 - DELTA, int(number))
    else:
        reach = math.log(DELTA / (1 - DELTA))
        deltas = special.expit(np.linspace(reach, -reach, int(number)))
    epsilons = [max(_epsilon(family, parameter, float(delta)), 0.0) for delta in deltas]
    return PiecewiseLinear(tuple(epsilons), tuple(deltas))


def _epsilon(family: TradeOff, parameter: float, delta: float) -> float:
    """Return epsilon at delta; for DP-SGD, directly from its privacy loss distribution."""
    if isinstance(family, SubsampledGaussian):
        return epsilon_above(1 / parameter, family.sample_rate, family.num_steps, delta)
    return family.epsilon(parameter, delta)


def _concluded(family: TradeOff, parameter: float, curve: str, halvings: int) -> float:
    """Return the epsilon that follows from the lines for the best attack with equal error rates.

    The lines lie below the curve, so this epsilon is below that of the curve.
    """
    error = family.balanced_error(parameter)
    low, high = parameter / 2, parameter
    for _ in range(halvings):
        middle = (low + high) / 2
        above = float(_lines(family, middle, curve).fnr(1.0, np.asarray(error))) >= error
        low, high = (middle, high) if above else (low, middle)
    return _epsilon(family, low, DELTA)
