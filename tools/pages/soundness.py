"""Simulate how often every bound exceeds the truth, and write docs/soundness.md.

    python tools/pages/soundness.py [--repetitions 1000] [--output docs/soundness.md] [--section TITLE]

Finished cells are cached in .soundness-cache.json, so that an interrupted run resumes where it stopped. Cells
that were simulated with other code are simulated again. ``soundness_sections`` lists the cells on steps and
runs. Exits with 1 if a confidence bound exceeds the truth in more than 5 % by three standard errors.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from _shared import ROOT
from rich.progress import Progress
from scipy import special
from simulated_coverage import Coverage, coverage, ideal_observations, tally
from soundness_runs import power_trials
from soundness_sections import sections
from soundness_steps import Trial

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

    @property
    def key(self) -> str:
        return repr(self)

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


def sound_cells(repetitions: int) -> list[AnyCell]:
    """Return all cells with a confidence bound."""
    trials = [one for section in sections(repetitions) for one in section.trials]
    return [
        *(one for one in trials if one.is_covered),
        *one_run(repetitions),
        *grid(SOUND, repetitions),
        *other_families(repetitions),
        *stepped(repetitions),
        *optimal(repetitions),
    ]


AnyCell = Cell | RunCell | Trial


def cells(repetitions: int) -> list[AnyCell]:
    """Return all cells."""
    trials = [one for section in sections(repetitions) for one in section.trials]
    others = [one for one in trials if not one.is_covered]
    weaker = grid(PRACTICE, max(repetitions // 4, 1))
    return [*sound_cells(repetitions), *others, *power_trials(repetitions), *weaker]


@dataclass(frozen=True)
class Choice:
    """The mean epsilon of the two candidates for the default on unnormalized scores."""

    family: dpaudit.TradeOff
    mu: float
    size: int
    held_out: float
    bands: float


def choose(task: tuple[dpaudit.TradeOff, float, int]) -> Choice:
    family, mu, size = task
    fraction = 0.1 if isinstance(family, dpaudit.Gaussian) else 0.2
    found: dict[str, list[float]] = {"held_out": [], "bands": []}
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
            found[name].append(bound.epsilon)
    return Choice(family, mu, size, float(np.mean(found["held_out"])), float(np.mean(found["bands"])))


def choices() -> list[Choice]:
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


def write(path: Path, text: str) -> None:
    """Write the file atomically."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def replace_sections(path: Path, titles: str, repetitions: int) -> int:
    """Simulate the sections on steps, runs and power with these titles, and replace them on the page."""
    from soundness_page import chapters  # noqa: PLC0415  # it imports this script

    chosen: list[Cell | Trial] = [
        one for part in sections(repetitions) if titles in part.title for one in part.trials
    ]
    chosen += power_trials(repetitions) if titles in "Power" else []
    found = simulate(chosen)
    text = path.read_text()
    for title, section in chapters(titles, found, repetitions).items():
        before, _, rest = text.partition(f"\n## {title}\n")
        after = rest[rest.index("\n## ") :] if "\n## " in rest else ""
        # a new section comes before those on power and defaults
        text = before + section + after if rest else text.replace("\n## Power\n", f"{section}\n## Power\n")
    count = len(sound_cells(repetitions))
    write(path, re.sub(r"\*\*\d+ cells", f"**{count} cells", text))
    return int(any(one.is_covered and not found[one.key].is_sound(0.95) for one in chosen))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "soundness.md")
    parser.add_argument("--section", help="simulate and replace only sections whose title contains this")
    arguments = parser.parse_args()
    if arguments.section:
        return replace_sections(arguments.output, arguments.section, arguments.repetitions)
    sound = sound_cells(arguments.repetitions)
    found = simulate(cells(arguments.repetitions))

    from soundness_page import page  # noqa: PLC0415  # it imports this script

    write(arguments.output, page(found, choices(), arguments.repetitions))
    wrong = [cell.key for cell in sound if not found[cell.key].is_sound(0.95)]
    print(f"{len(sound)} cells of confidence methods, {len(wrong)} exceed 5 % by three standard errors")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
