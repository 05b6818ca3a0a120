"""Compare dpaudit with jax_privacy 2.0.0 and privacy-estimates 0.1.0.post1: time, tightness and error rate.

All scores come from the exact Gaussian mechanism. A cell "0.74, 2 %" means that the mean bound was 0.74 of
the true epsilon, and that 2 % of the bounds exceeded it. For identical distributions (mu = 0), it shows how
many bounds exceeded 0. A confidence bound at 95 % may exceed the truth in 5 % of the runs. The joint interval
of privacy-estimates is so slow that it is computed only once, which does not reveal its error rate.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _measure import Table, finish, milliseconds
from _others import Answer, Job, Scores, ask, parser

import dpaudit

DELTA, ERROR = 1e-5, 0.05
SIZES = (1_000, 2_500)
MUS = (0.0, 0.39, 1.0, 3.0)
FEW = 10  # runs of a method that takes several tenths of a second
FEWER = 60  # runs of a method that takes several hundredths of a second
OURS = (
    (dpaudit.Gaussian(), dpaudit.JointExact(), "Fixed"),
    (dpaudit.Gaussian(), dpaudit.JointExact(), "HeldOut"),
    (dpaudit.Gaussian(), dpaudit.ClopperPearson(), "Fixed"),
    (dpaudit.Gaussian(), dpaudit.Betting(), "Fixed"),
    (dpaudit.ApproximateDP(), dpaudit.JointExact(), "Fixed"),
    (dpaudit.ApproximateDP(), dpaudit.ClopperPearson(), "Fixed"),
    (dpaudit.ApproximateDP(), dpaudit.ClopperPearson(), "Simultaneous"),
    (dpaudit.ApproximateDP(), dpaudit.Posterior(), "Fixed"),
    (dpaudit.Gaussian(), dpaudit.Posterior(), "SameData"),
)
# name, documented kind of its bound, whether it needs a threshold, number of repetitions (None: all)
THEIRS: tuple[tuple[str, str, bool, int | None], ...] = (
    ("jax_privacy clopper_pearson", "confidence", False, None),
    ("jax_privacy clopper_pearson at", "confidence", True, None),
    ("jax_privacy clopper_pearson split", "confidence", False, None),
    ("jax_privacy from_gdp", "confidence", False, None),
    ("jax_privacy one_run", "confidence", False, None),
    ("jax_privacy one_run_fdp", "confidence", False, FEW),
    ("privacy_estimates beta", "confidence", True, None),
    ("privacy_estimates jeffreys", "credible", True, None),
)
SLOW = "privacy_estimates joint-beta"  # half a minute per bound: one bound for one mu, no error rate
SLOW_MU = 1.0


@dataclass(frozen=True)
class Found:
    """The bounds of one method at one mu."""

    bounds: list[float]
    seconds: float
    statement: str
    problem: str | None = None

    def above(self, truth: float) -> float:
        """Return the fraction of bounds above the truth."""
        return statistics.fmean(bound > truth * (1 + 1e-9) for bound in self.bounds)

    def cell(self, truth: float) -> str:
        """Return the table cell."""
        if not self.bounds:
            return self.problem or "-"
        share = f"{100 * self.above(truth):.0f} %" if len(self.bounds) > 1 else "?"
        return f"{statistics.fmean(self.bounds) / truth:.2f}, {share}" if truth > 0 else share

    def is_sound(self, truth: float) -> bool:
        """Return whether the bounds exceed the truth no more often than allowed, within three deviations."""
        deviation = math.sqrt(ERROR * (1 - ERROR) / max(len(self.bounds), 1))
        return not self.bounds or self.above(truth) <= ERROR + 3 * deviation


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--repetitions", type=int, default=200)
    options = arguments.parse_args()
    print(__doc__)
    return finish(*(_table(size, options.repetitions, options.others) for size in SIZES))


def _table(size: int, repetitions: int, python: Path | None) -> Table:
    table = Table(
        f"{size:,} scores per side, delta = {DELTA:g}",
        ("method", "documented as", "runs", "time", *(f"mu = {mu:g}" for mu in MUS)),
        complaint="TOO OFTEN ABOVE THE TRUTH",
    )
    rng = np.random.default_rng(size)
    sides = {
        mu: (rng.normal(mu, 1, (repetitions, size)), rng.normal(0, 1, (repetitions, size))) for mu in MUS
    }
    for name, method in _our_methods().items():
        most = FEWER if name.endswith("SameData") else None
        found = {mu: _run(method, mu, *(side[:most] for side in sides[mu])) for mu in MUS}
        table.add(*_cells(f"dpaudit {name}", found), met=_is_sound(found))
    if python is not None:
        for name, found in _their_bounds(python, sides).items():
            remark = table.complaint.lower() if _is_sound(found) is False else ""
            table.add(*_cells(name, found), remark=remark)
    return table


def _is_sound(found: dict[float, Found]) -> bool | None:
    """Return whether a method exceeds the truth no more often than it claims; None without a claim."""
    if any(one.statement != "confidence" for one in found.values()):
        return None
    return all(one.is_sound(_truth(mu)) for mu, one in found.items())


def _truth(mu: float) -> float:
    return dpaudit.Gaussian().epsilon(mu, DELTA)


def _cells(name: str, found: dict[float, Found]) -> list[str]:
    time_of_one = statistics.median(one.seconds for one in found.values() if one.bounds or one.problem)
    statement = next(one.statement for one in found.values())
    runs = max(len(one.bounds) for one in found.values())
    bounds = [one.cell(_truth(mu)) for mu, one in found.items()]
    return [name, statement, str(runs), milliseconds(time_of_one), *bounds]


Method = Callable[[float, Scores, Scores], dpaudit.Bound]


def _our_methods() -> dict[str, Method]:
    methods = {}
    for tradeoff, inference, rule in OURS:
        name = f"{type(tradeoff).__name__} {type(inference).__name__} {rule}"
        methods[name] = _our_method(tradeoff, inference, rule)
    return methods


def _our_method(tradeoff: dpaudit.TradeOff, inference: dpaudit.Inference, rule: str) -> Method:
    def bound(mu: float, present: Scores, absent: Scores) -> dpaudit.Bound:
        threshold = dpaudit.Fixed(mu / 2) if rule == "Fixed" else getattr(dpaudit, rule)()
        return dpaudit.lower_bound(
            dpaudit.Observations(with_canary=present, without_canary=absent),
            delta=DELTA,
            confidence=1 - ERROR,
            tradeoff=tradeoff,
            inference=inference,
            threshold=threshold,
        )

    return bound


def _run(method: Method, mu: float, present: Scores, absent: Scores) -> Found:
    bounds, times = [], []
    for one, other in zip(present, absent, strict=True):
        start = time.perf_counter()
        bounds.append(method(mu, one, other))
        times.append(time.perf_counter() - start)
    return Found([bound.epsilon for bound in bounds], statistics.median(times), str(bounds[0].kind))


def _their_bounds(python: Path, sides: dict[float, tuple[Scores, Scores]]) -> dict[str, dict[float, Found]]:
    asked, jobs = [], []
    for name, statement, at_threshold, most in (*THEIRS, (SLOW, "credible", True, 1)):
        for mu in (SLOW_MU,) if name == SLOW else MUS:
            settings = {"delta": DELTA, "error": ERROR} | ({"threshold": mu / 2} if at_threshold else {})
            jobs.append(Job(name, *(side[:most] for side in sides[mu]), settings))
            asked.append((name, statement, mu))
    found: dict[str, dict[float, Found]] = {}
    for (name, statement, mu), answer in zip(asked, ask(python, jobs), strict=True):
        nothing = {mu: Found([], 0.0, statement) for mu in MUS}
        found.setdefault(name, nothing)[mu] = _from(answer, statement)
    return found


def _from(answer: Answer, statement: str) -> Found:
    return Found(answer.bounds, answer.seconds, statement, answer.error)


if __name__ == "__main__":
    sys.exit(main())
