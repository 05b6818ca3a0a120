"""Simulate how often every bound exceeds the truth; write docs/soundness.md, its picture and its data.

    python tools/pages/soundness.py [--repetitions 1000] [--section TITLE] [--as-is]

Finished cells are cached in .soundness-cache.json, so that an interrupted run resumes where it stopped. Cells
that were simulated with other code are simulated again. ``soundness_sections`` lists the cells on steps and
runs. ``soundness_page`` turns docs/data/soundness.csv into the page and its picture; --as-is does only this.
Exits with 1 if a confidence bound exceeds the truth in more than 5 % by three standard errors.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np
import power
from _shared import ROOT, read_csv, write, write_csv
from rich.progress import Progress
from scipy import special
from simulated_coverage import Coverage, coverage, ideal_observations, tally
from soundness_page import DATA, DEFAULTS, DEFAULTS_HEAD, HEAD, POWER, POWER_HEAD, documents
from soundness_runs import power_trials
from soundness_sections import sections
from soundness_steps import Section, Trial

import dpaudit

CACHE = ROOT / ".soundness-cache.json"
# what numbers depend on
CODE = ("src/dpaudit/stats", "src/dpaudit/accounting", "src/dpaudit/recording", "src/dpaudit/diagnostics")
MUS = (0.0, 0.1, 0.39, 1.0, 3.0, 6.0)
SIZES = (50, 200, 1000, 2500)


@dataclass(frozen=True)
class Cell:
    """One method at one true parameter and size."""

    family: dpaudit.TradeOff
    inference: dpaudit.Inference
    rule: dpaudit.ThresholdRule
    truth: float
    size: int | tuple[int, int]
    repetitions: int

    @property
    def key(self) -> str:
        return repr(self)

    @property
    def row(self) -> tuple[str, ...]:
        size = f"{self.size:,}" if isinstance(self.size, int) else " x ".join(map(str, self.size))
        method = f"{self.inference!r} + {self.rule!r}"
        return (method, size) if isinstance(self.family, dpaudit.Gaussian) else (repr(self.family), method)

    @property
    def column(self) -> str:
        return f"{'mu' if isinstance(self.family, dpaudit.Gaussian) else 'parameter'} = {self.truth:g}"

    @property
    def is_covered(self) -> bool:
        return not isinstance(self.inference, dpaudit.Posterior) and not isinstance(
            self.rule, dpaudit.SameData
        )

    def run(self) -> Coverage:
        seed = int(hashlib.sha256(self.key.encode()).hexdigest()[:8], 16)
        return coverage(
            tradeoff=self.family,
            parameter=self.truth,
            size=self.size,
            inference=self.inference,
            threshold=self.rule,
            delta=DELTAS.get(type(self.family), 1e-5),
            repetitions=self.repetitions,
            seed=seed,
        )


# for the generic curve, a delta large enough to matter
DELTAS = {dpaudit.ApproximateDP: 0.01, dpaudit.PureDP: 0.0}
SOUND = (
    (dpaudit.ClopperPearson(), dpaudit.Fixed(0.5)),
    (dpaudit.ClopperPearson(), dpaudit.HeldOut(0.2)),
    (dpaudit.ClopperPearson(), dpaudit.Simultaneous()),
    (dpaudit.JointExact(), dpaudit.Simultaneous()),
    (dpaudit.JointExact(), dpaudit.BestOf((dpaudit.Fixed(0.5), dpaudit.Tails()), (0.9, 0.1))),
    (dpaudit.JointExact(), dpaudit.Fixed(0.5)),
    (dpaudit.JointExact(), dpaudit.HeldOut(0.1)),
    (dpaudit.Betting(), dpaudit.Fixed(0.5)),
    (dpaudit.Betting(), dpaudit.HeldOut(0.1)),
    (dpaudit.Betting(), dpaudit.Predictable()),
)
PRACTICE = (
    (dpaudit.ClopperPearson(), dpaudit.SameData()),
    (dpaudit.Posterior(), dpaudit.Fixed(0.5)),
    (dpaudit.Posterior(), dpaudit.SameData()),
)
OTHERS = (
    dpaudit.ApproximateDP(),
    dpaudit.PureDP(),
    dpaudit.Laplace(),
    dpaudit.RandomizedResponse(4),
    dpaudit.PiecewiseLinear((0.0, 0.5, 2.0), (0.3, 0.1, 1e-5)),
    dpaudit.SubsampledGaussian(0.08, 200),
)
STEPPED = ((50, 8), (50, 64), (250, 8), (250, 64))
ON_STEPS = ((dpaudit.Betting(), dpaudit.Fixed(0.5)), (dpaudit.Betting(), dpaudit.Predictable()))


def fewer(inference: dpaudit.Inference, rule: dpaudit.ThresholdRule, repetitions: int) -> int:
    """Return how often to repeat audits with this method: bets take longer than counts at one threshold."""
    several = isinstance(inference, dpaudit.JointExact) and isinstance(
        rule, dpaudit.BestOf | dpaudit.Simultaneous
    )
    return max(repetitions // 4, 1) if several or isinstance(inference, dpaudit.Betting) else repetitions


def grid(methods: tuple, repetitions: int) -> Iterator[Cell]:
    """Yield all parameters and sizes for the Gaussian family."""
    for inference, rule in methods:
        for size in SIZES:
            for mu in MUS:
                times = fewer(inference, rule, repetitions)
                yield Cell(dpaudit.Gaussian(), inference, rule, mu, size, times)


def other_families(repetitions: int) -> Iterator[Cell]:
    for family in OTHERS:
        for inference, rule in SOUND:
            yield Cell(family, inference, rule, 1.0, 500, fewer(inference, rule, repetitions))


def stepped(repetitions: int) -> Iterator[Cell]:
    for inference, rule in ON_STEPS:
        for size in STEPPED:
            for mu in MUS:
                yield Cell(dpaudit.Gaussian(), inference, rule, mu, size, fewer(inference, rule, repetitions))


def optimal(repetitions: int) -> Iterator[Cell]:
    """Yield the cells of Optimal(), whose threshold is in units of the canary."""
    for inference in (dpaudit.ClopperPearson(), dpaudit.JointExact()):
        for size in SIZES:
            for mu in MUS[1:]:
                threshold = optimal_in_ideal_units(mu)
                yield Cell(dpaudit.Gaussian(), inference, dpaudit.Fixed(threshold), mu, size, repetitions)


def optimal_in_ideal_units(mu: float) -> float:
    """Return the paper's w as a threshold on ideal scores, which are false positive rates."""
    w = dpaudit.Optimal(1 / mu).threshold(1e-5)
    return 0.5 + dpaudit.Gaussian().balanced_error(mu) - float(special.ndtr(-w * mu))


@dataclass(frozen=True)
class RunCell:
    """A one-run bound on canaries, each observed through the family's ideal mechanism."""

    family: dpaudit.TradeOff
    generic: bool  # Steinke's bound instead of the f-DP one
    truth: float
    repetitions: int
    num_canaries: int = 1000
    num_guesses: int = 200
    is_covered: ClassVar[bool] = True

    @property
    def key(self) -> str:
        return repr(self)

    @property
    def row(self) -> tuple[str, ...]:
        return ("one_run_bound" if self.generic else "one_run_fdp_bound", repr(self.family))

    @property
    def column(self) -> str:
        return f"{'epsilon' if isinstance(self.family, dpaudit.PureDP) else 'mu'} = {self.truth:g}"

    def run(self) -> Coverage:
        return tally(self.once, self.truth, self.repetitions, seed=int(self.truth * 100))

    def once(self, rng: np.random.Generator) -> float:
        present = rng.random(self.num_canaries) < 0.5
        levels = rng.random(self.num_canaries)
        scores = -np.where(present, self.family.fnr(self.truth, levels), levels)
        guesses = dpaudit.Guesses.from_scores(scores, present, num_guesses=self.num_guesses)
        if self.generic:
            return dpaudit.one_run_bound(guesses, delta=0.0).parameter
        return dpaudit.one_run_fdp_bound(guesses, tradeoff=self.family, delta=1e-5).parameter


def one_run(repetitions: int) -> Iterator[RunCell]:
    for truth in (0.0, 0.5, 1.0, 3.0):
        yield RunCell(dpaudit.PureDP(), generic=True, truth=truth, repetitions=repetitions)
        yield RunCell(dpaudit.PureDP(), generic=False, truth=truth, repetitions=repetitions)
    for mu in (0.0, 0.39, 1.0, 3.0):
        yield RunCell(dpaudit.Gaussian(), generic=False, truth=mu, repetitions=repetitions)
    for mu in (0.5, 1.0):  # a second each
        family, few = dpaudit.SubsampledGaussian(0.08, 200), max(repetitions // 10, 1)
        yield RunCell(family, generic=False, truth=mu, repetitions=few)


AnyCell = Cell | RunCell | Trial


def tables(repetitions: int) -> list[Section]:
    """Return all tables, given the repetitions of the fastest cells."""
    return [
        Section(
            title="Confidence methods, Gaussian family",
            head=("method", "scores per side"),
            trials=tuple(grid(SOUND, repetitions)),
        ),
        Section(
            title="The paper's practice",
            head=("method", "scores per side"),
            trials=tuple(grid(PRACTICE, max(repetitions // 4, 1))),
        ),
        Section(
            title="Many canaries per step",
            head=("method", "steps x canaries per side"),
            trials=tuple(stepped(repetitions)),
        ),
        Section(
            title="The paper's threshold for (eps, delta)-DP",
            head=("method", "scores per side"),
            trials=tuple(optimal(repetitions)),
        ),
        Section(
            title="Other families",
            head=("family", "method"),
            trials=tuple(other_families(repetitions)),
        ),
        Section(
            title="One run",
            head=("bound", "mechanism"),
            trials=tuple(one_run(repetitions)),
        ),
        *sections(repetitions),
    ]


def choose(task: tuple[dpaudit.TradeOff, float, int]) -> list[str]:
    """Return the mean epsilon of the two candidates for the default on unnormalized scores."""
    family, mu, size = task
    fraction = 0.1 if isinstance(family, dpaudit.Gaussian) else 0.2
    epsilons: dict[str, list[float]] = {"held_out": [], "bands": []}
    for seed in range(60):
        rng = np.random.default_rng(seed)
        observations = ideal_observations(dpaudit.Gaussian(), mu, size, size, rng)
        for name, inference, rule in (
            ("held_out", dpaudit.JointExact(), dpaudit.HeldOut(fraction)),
            ("bands", dpaudit.JointExact(), dpaudit.Simultaneous()),
        ):
            bound = dpaudit.lower_bound(
                observations, delta=1e-5, tradeoff=family, inference=inference, threshold=rule
            )
            epsilons[name].append(bound.epsilon)
    return [repr(family), str(size), f"{mu:g}", *(f"{np.mean(values):.2f}" for values in epsilons.values())]


def choices() -> list[list[str]]:
    tasks = [
        (family, mu, size)
        for family in (dpaudit.Gaussian(), dpaudit.ApproximateDP())
        for size in (200, 1000, 2500, 5000, 20000)
        for mu in (1.0, 3.0)
    ]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(choose, tasks))


def code_version() -> str:
    """Return a hash of the code that numbers depend on, without comments and docstrings."""
    digest = hashlib.sha256()
    for path in sorted(file for folder in CODE for file in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body[0] = ast.Pass()
        digest.update(f"{path.name}{ast.dump(tree)}".encode())
    return digest.hexdigest()[:16]


def simulate(cells: list[AnyCell]) -> dict[str, Coverage]:
    """Run the cells that are not cached on all cores, and cache each as it finishes."""
    version = code_version()
    stored = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    known = stored["cells"] if stored.get("code") == version else {}
    todo = [cell for cell in cells if cell.key not in known]
    with ProcessPoolExecutor(os.cpu_count()) as pool, Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("cells", total=len(cells), completed=len(cells) - len(todo))
        futures = {pool.submit(cell.run): cell for cell in todo}
        for count, future in enumerate(as_completed(futures), 1):
            known[futures[future].key] = asdict(future.result())
            write(CACHE, json.dumps({"code": version, "cells": known}))
            bar.advance(task)
            if not sys.stderr.isatty() and count % 25 == 0:
                print(f"{count} of {len(todo)} cells", file=sys.stderr, flush=True)
    return {cell.key: Coverage(**known[cell.key]) for cell in cells}


def data_rows(table: Section, coverages: dict[str, Coverage]) -> Iterator[list[str]]:
    """Yield the rows of a table in the data."""
    for cell in table.trials:
        coverage = coverages[cell.key]
        shares = (f"{100 * share:.1f}" for share in (coverage.exceeded, coverage.standard_error))
        yield [
            table.title,
            "; ".join(f"{name}: {value}" for name, value in zip(table.head, cell.row, strict=True)).replace(
                "`", ""
            ),
            cell.column,
            str(cell.repetitions),
            *shares,
            f"{coverage.mean_ratio:.3f}" if table.has_ratio else "",
            "yes" if cell.is_covered else "no",
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--section", default="", help="simulate only tables whose title contains this")
    parser.add_argument("--as-is", action="store_true", help="write the page and its picture from the data")
    arguments = parser.parse_args()
    wrong = 0 if arguments.as_is else simulate_tables(arguments.section, arguments.repetitions)
    for path, text in documents().items():
        write(path, text)
    return int(wrong > 0)


def simulate_tables(title: str, repetitions: int) -> int:
    """Write the data of the tables whose titles contain this; return how many bounds exceed 5 %."""
    chosen = [table for table in tables(repetitions) if title in table.title]
    trials = power_trials(repetitions) if title in "Power" else []
    coverages = simulate([*(cell for table in chosen for cell in table.trials), *trials])
    others = [row for row in read_csv(DATA) if row[0] not in {table.title for table in chosen}]
    write_csv(DATA, HEAD, [*others, *(row for table in chosen for row in data_rows(table, coverages))])
    if trials:
        designs = {design.name: design for design in power.all_designs()}
        write_csv(
            POWER,
            POWER_HEAD,
            [
                power.row(
                    designs[one.row[0]],
                    one.repetitions,
                    coverages[one.key].mean_ratio,
                    coverages[one.key].exceeded,
                )
                for one in trials
            ],
        )
    if not title:
        write_csv(DEFAULTS, DEFAULTS_HEAD, choices())
    covered = [cell for table in chosen for cell in table.trials if cell.is_covered]
    wrong = [cell.key for cell in covered if not coverages[cell.key].is_sound(0.95)]
    print(f"{len(covered)} cells of confidence methods, {len(wrong)} exceed 5 % by three standard errors")
    print("\n".join(wrong))
    return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
