"""docs/soundness.md and its picture, from the files in docs/data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from _pictures import dots
from _shared import DOCS, markdown_table, read_csv

__all__ = ["DATA", "DEFAULTS", "DEFAULTS_HEAD", "HEAD", "POWER", "POWER_HEAD", "documents"]

DATA, POWER, DEFAULTS = (DOCS / "data" / f"{name}.csv" for name in ("soundness", "power", "defaults"))
HEAD = [
    "table",
    "setting",
    "parameter",
    "audits",
    "exceeded_percent",
    "standard_error",
    "bound_over_truth",
    "covered",
]
POWER_HEAD = ["design", "audits", "leak_over_claim", "detected_percent", "verdict_of_a_correct_run"]
DEFAULTS_HEAD = ["tested_curve", "scores_per_side", "mu", "held_out_epsilon", "simultaneous_epsilon"]

# what each table simulates
TEXTS = {
    "Confidence methods, Gaussian family": "Every method, ideal scores, 50 to 2,500 per side.",
    "The paper's practice": "Thresholds chosen on the counted data; posteriors. No verdict rests on them.",
    "Many canaries per step": "Bets on the balanced error of each step.",
    "The paper's threshold for (eps, delta)-DP": (
        "`Optimal(noise)`: so far in the tail that few audits contain any error."
    ),
    "Other families": "A mechanism with the curve of each family, 500 scores per side.",
    "One run": "1,000 canaries inserted by fair coins, 200 guesses.",
    "Bets on steps that canaries share": (
        "The main bet over 100 steps. A step may reveal all coins or none (*total reveal*), add one draw of"
        " noise to all canaries, or keep all equally far from the threshold (*shared distance*)."
    ),
    "Short and long runs, planned or not": "The same for 20 to 500 steps, and without a planned number.",
    "Mechanisms that adapt: numbers of right guesses": (
        "Before each step, the mechanism chooses how canaries depend on each other: by luck, by the bettor's"
        " wealth or by the last step."
    ),
    "Mechanisms that adapt: the default audit of a recorder": (
        "The same against the default audit, tails included, with 64 canaries per step."
    ),
    "A mechanism made to mislead counts": (
        "The operating point is chosen by backward induction. Pooled counts assume that no mechanism does"
        " this, and fail; bets hold."
    ),
    "Tails": "A tenth of the error probability is bet on scores far from the threshold.",
    "What tails detect": (
        "Faulty noise: cut off with its variance restored, unclipped in 1 of 50 steps, or the same for all"
        " canaries of a step. Shares are detections."
    ),
    "Input canaries that overlap": "Gradients that are not orthogonal, scores that depend on other coins.",
    "Exactly half of the canaries present": (
        "No leak, but presence without fair coins. Audits that refuse such data count as correct."
    ),
    "Tests of noise in adaptive training": (
        "Linear regressions whose gradients depend on earlier noise, 300 steps. Shares: runs with a finding."
    ),
    "Live bounds, early stopping and repeated audits": "A bound after every step, stopping at a violation.",
    "What is not covered: repeated audits of one-dimensional scores": (
        "Counts need a sample size fixed in advance, and bounds say so. Here, 20 audits of growing data."
    ),
    "Whole runs with sampled entries": "500 canaries that Poisson sampling draws, one score per run.",
    "One run with dependent canaries": "`one_run_fdp_bound` with 1,000 canaries at a shared distance.",
    "One run at the paper's main setting": (
        "Sample rate 4096/50000, 2,500 steps: what tails cost, and what the stop-loss gains."
    ),
    "One short run": "50 steps of 64 canaries per side.",
    "Intervals of estimates": (
        "95 % intervals of the effective noise, and of the true positive rate at 10 % false positives."
    ),
    "Tests of several audits": "One audit after half of the steps, one at the end; bound and tests together.",
    "P-values": "How often the p-value of a correct mechanism is at most 5 %.",
}

PAGE = """# Simulations

**{count} cells of confidence methods were simulated; {wrong} exceed 5 % by more than three standard
errors.**

![Share of audits whose bound exceeded the truth, by table](data/soundness.svg)

At 95 % confidence, a bound may exceed the truth in at most 5 % of audits. To check this, dpaudit
repeatedly audits mechanisms whose leak is known, and counts. A dot is one cell: one method, one leak, one
size, audited {fewest:,} to {most:,} times. Randomness alone puts some cells of an exact method above 5 %;
three standard errors are 2 points for 1,000 audits and 4 for 250. The simulated attack is ideal: it
attains the curve of its family, so no slack could hide an unsound method. Cells far below 5 % show what a
method gives away.

## What was simulated

"Largest" is the largest share of audits in which the bound exceeded the truth, or a correct run was
flagged. "Bound / truth" is the range of the mean over cells with a leak.

{tables}

Rows marked * are not covered by the promise of 5 %: they show why dpaudit does not use a method, or what
a test detects. Black-box audits are simulated elsewhere: 0 of 40 audits of correct training found a
violation (`tools/pages/black_box.py`). `tools/pages/inputs.py` simulates whole training runs with input
canaries.

## The paper's practice

With a threshold chosen on the counted data, or with a posterior, bounds look tighter, but are wrong more
often than their nominal 5 %. `ClopperPearson` with `SameData` exceeded the truth in {same_data} % of
audits, and `Posterior` with `SameData` in {posterior} % where there is a leak. Without a leak, every
posterior reports one. dpaudit labels such bounds *heuristic* or *credible*.

## Power

Every result states the smallest leak that it detects with 80 % probability. For each of {designs} default
designs, {repetitions} mechanisms with exactly that leak were audited in the same way. They were detected
in {least} to {largest} % of audits, and in 75 to 85 % for {near} of the designs. {blind} further designs
state that they detect no leak at all.

## How the defaults were chosen

For scores that are not normalized, `audit()` chooses between a held-out part and bands over many
thresholds. It looks at the number of scores and the curve, never at the scores. With the mechanism's own
curve, the threshold hardly matters: `HeldOut(0.1)` gives at most {loss:.2f} less epsilon than
`Simultaneous()`, and up to {gain:.2f} more. Violations of the generic curve are visible only in the
tails, where `Simultaneous()` gives {generic_least:.2f} to {generic_most:.2f} more. It is used from 50
scores on, and `HeldOut(0.2)` below.

## Reproduce

```sh
make soundness                                               # everything: hours on two cores
python tools/pages/soundness.py --section "One short run"    # one table
python tools/pages/soundness.py --as-is                      # the page and its picture from the data
```

Every number: [soundness.csv](data/soundness.csv) (all cells), [power.csv](data/power.csv) and
[defaults.csv](data/defaults.csv). The command exits with 1 if a bound exceeds 5 % by three standard
errors. `tests/stats/test_soundness.py` runs a fast part in every test run.
"""


class Row(NamedTuple):
    """One cell of the data."""

    table: str
    setting: str
    parameter: str
    audits: str
    exceeded: str
    error: str
    ratio: str
    covered: str

    @property
    def share(self) -> float:
        return float(self.exceeded)

    @property
    def is_wrong(self) -> bool:
        return (
            self.covered == "yes" and self.share > 5 + 300 * math.sqrt(0.05 * 0.95 / int(self.audits)) + 1e-9
        )


def documents() -> dict[Path, str]:
    """Return the page and its picture."""
    rows = [Row(*row) for row in read_csv(DATA)]
    covered = [row for row in rows if row.covered == "yes"]
    shares = {name: [row for row in covered if row.table == name] for name in TEXTS}
    picture = dots(
        f"{len(covered)} cells: how often bounds exceed the truth",
        "share of audits whose bound exceeded the truth; a dot is a cell",
        {
            _short(name): [(row.share, row.is_wrong) for row in cells]
            for name, cells in shares.items()
            if cells
        },
        limit=5,
        end=10,
    )
    numbers = {
        "count": len(covered),
        "wrong": sum(row.is_wrong for row in covered),
        "fewest": min(int(row.audits) for row in covered),
        "most": max(int(row.audits) for row in covered),
        "tables": markdown_table(
            ["table", "what", "cells", "largest", "bound / truth"], [_line(name, rows) for name in TEXTS]
        ),
        "same_data": _range(rows, "ClopperPearson() + SameData()"),
        "posterior": _range([row for row in rows if row.parameter != "mu = 0"], "Posterior() + SameData()"),
    }
    page = PAGE.format(**numbers, **_power(), **_defaults())
    return {DOCS / "soundness.md": page, DOCS / "data" / "soundness.svg": picture}


def _short(name: str) -> str:
    return (
        name.replace("Mechanisms that adapt: ", "Adaptive: ")
        .replace(" early stopping and", "")
        .split(" for (")[0][:42]
    )


def _line(name: str, rows: list[Row]) -> list[str]:
    cells = [row for row in rows if row.table == name]
    ratios = [float(row.ratio) for row in cells if row.ratio and not row.parameter.endswith("= 0")]
    mark = "" if all(row.covered == "yes" for row in cells) else " *"
    between = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    return [name + mark, TEXTS[name], str(len(cells)), f"{max(row.share for row in cells):g} %", between]


def _range(rows: list[Row], method: str) -> str:
    shares = [row.share for row in rows if row.setting.startswith(f"method: {method}")]
    return f"{min(shares):.0f} to {max(shares):.0f}"


def _power() -> dict[str, object]:
    rows = read_csv(POWER)
    shares = [int(row[3]) for row in rows if row[3]]
    return {
        "designs": len(shares),
        "repetitions": rows[0][1],
        "least": min(shares),
        "largest": max(shares),
        "near": sum(75 <= share <= 85 for share in shares),
        "blind": len(rows) - len(shares),
    }


def _defaults() -> dict[str, float]:
    rows = read_csv(DEFAULTS)
    gains = [float(row[3]) - float(row[4]) for row in rows if row[0] == "Gaussian()"]
    generic = [float(row[4]) - float(row[3]) for row in rows if row[0] != "Gaussian()"]
    return {
        "loss": -min(gains),
        "gain": max(gains),
        "generic_least": min(generic),
        "generic_most": max(generic),
    }
