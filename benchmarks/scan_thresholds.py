"""Check that scanning all thresholds takes little longer than sorting the scores.

With a million scores per side, a scan may take at most 4 times as long as sorting both sides, and must be
faster than the scan of jax_privacy.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from _measure import Table, finish, medians, milliseconds
from _others import Job, Scores, ask, parser

import dpaudit

DELTA, LIMIT = 1e-5, 4.0
METHODS = {
    f"{type(tradeoff).__name__}, {type(rule).__name__}": (tradeoff, rule)
    for tradeoff in (dpaudit.ApproximateDP(), dpaudit.Gaussian())
    for rule in (dpaudit.SameData(), dpaudit.Simultaneous())
}


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--size", type=int, default=1_000_000, help="scores per side")
    arguments.add_argument("--repetitions", type=int, default=7)
    options = arguments.parse_args()
    table = Table(
        f"Scanning all thresholds, {options.size:,} scores per side, ClopperPearson",
        ("mu", "method", "time", "sorting", "ratio", "limit", "jax_privacy"),
    )
    for mu in (0.0, 0.39, 1.0, 3.0):
        rng = np.random.default_rng(0)
        present, absent = rng.normal(mu, 1, options.size), rng.normal(0, 1, options.size)
        other = _other(options.others, present, absent)
        _add(table, mu, _measure(present, absent, options.repetitions), other)
    return finish(table)


def _measure(present: Scores, absent: Scores, repetitions: int) -> dict[str, float]:
    functions = {"sorting": _sort} | {name: _scan(*method) for name, method in METHODS.items()}
    return medians(functions, repetitions, lambda: (present.copy(), absent.copy()))


def _sort(present: Scores, absent: Scores) -> None:
    np.sort(present)
    np.sort(absent)


def _scan(tradeoff, rule):
    def scan(present: Scores, absent: Scores) -> dpaudit.Bound:
        observations = dpaudit.Observations(with_canary=present, without_canary=absent)
        return dpaudit.lower_bound(
            observations,
            delta=DELTA,
            tradeoff=tradeoff,
            inference=dpaudit.ClopperPearson(),
            threshold=rule,
        )

    return scan


def _other(python: Path | None, present: Scores, absent: Scores) -> float | None:
    """Return the time of the jax_privacy scan of the same scores."""
    if python is None:
        return None
    rows = [np.tile(side, (3, 1)) for side in (present, absent)]
    job = Job("jax_privacy clopper_pearson", *rows, {"delta": DELTA, "error": 0.05})
    return ask(python, [job])[0].seconds


def _add(table: Table, mu: float, times: dict[str, float], other: float | None) -> None:
    for name in METHODS:
        ratio = times[name] / times["sorting"]
        table.add(
            f"{mu:g}",
            name,
            milliseconds(times[name]),
            milliseconds(times["sorting"]),
            f"{ratio:.2f}",
            f"{LIMIT:g}",
            "not run" if other is None else milliseconds(other),
            met=ratio <= LIMIT and (other is None or times[name] < other),
        )


if __name__ == "__main__":
    sys.exit(main())
