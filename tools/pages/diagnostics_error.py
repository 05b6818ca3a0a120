"""Simulate how often a correct training run has a finding, and write the tables to docs/data.

    python tools/pages/diagnostics_error.py [--repetitions 2000] [--part noise|rows|regular|audits|adaptive]

The first table is about all tests of noise and batches, the second about the tests of rows, which replace
those of batches where only the rows of a batch are known, the third about the tests of regular noise. The
fourth is about every p-value of audits with default settings, of 100 correct steps, and of their batches, the
fifth about training runs whose gradients depend on earlier noise.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context

import numpy as np
from _adaptive_runs import SCHEDULES, SETTINGS, LinearTraining, adaptive_runs
from _shared import restart_in_environment, write_tables

from dpaudit.diagnostics import BatchRecord, Check, Diagnosis, Diagnostics, NoiseCheck, ObservedStep
from dpaudit.diagnostics._data_tests import missing_direction
from dpaudit.diagnostics._distribution_tests import REGULARITY_TESTS
from dpaudit.diagnostics._row_digests import RowRecord

CONFIDENCE = 0.95
# Of the 5 % of an audit, tests have 1 %, of which the smallest of 26 p-values gets a part by Holm's method.
SMALL = 0.01 / 26
SMALL_OF_ALL = 0.01 / 30  # the same with all tests of noise


@dataclass(frozen=True)
class Size:
    """Size of a correct training run with normal noise and Poisson sampling.

    In kind "doubling", the first leaf has the claimed noise, and each other leaf twice that of the previous.
    """

    num_steps: int
    leaves: tuple[int, ...]
    num_examples: int
    sample_rate: float
    kind: str = "float32"

    def noise(self, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.standard_normal(sum(self.leaves))
        if self.kind == "doubling":
            return drawn * np.repeat(2.0 ** np.arange(len(self.leaves)), self.leaves)
        return np.round(drawn / 0.002) * 0.002 if self.kind == "grid" else drawn.astype(self.kind)

    def diagnose(self, seed: int) -> Diagnosis:
        rng = np.random.default_rng([seed, SIZES.index(self)])
        record = Diagnostics(sample_rate=self.sample_rate)
        for _ in range(self.num_steps):
            rounding = 0.001 if self.kind == "grid" else 0.0
            record.observe_noise(self.noise(rng), self.leaves, rounding=rounding)
            batch = np.flatnonzero(rng.random(self.num_examples) < self.sample_rate)
            record.observe_batch(batch, self.num_examples)
        return record.diagnose(CONFIDENCE)


SIZES = [
    Size(1, (1,), 5, 0.5),
    Size(2, (1, 1), 3, 0.5),
    Size(5, (3, 3, 2), 20, 0.2),
    Size(5, (3, 3, 2), 20, 0.2, "grid"),
    Size(40, (20, 5, 5), 100, 0.1),
    Size(40, (20, 5, 5), 100, 0.1, "grid"),
    Size(40, (20, 5, 5), 100, 0.1, "doubling"),
    Size(200, (1, 2), 50, 0.02, "float64"),
    Size(20, (40_000,), 1_000, 0.01),
    Size(300, (400, 20, 400), 1_500, 0.05),
    Size(300, (75, 75, 75, 75), 100, 0.1, "doubling"),
]


def rates(size: Size, repetitions: int) -> tuple[float, dict[str, float]]:
    """Return how often there was any finding, and how often each test had a p-value of at most 5 %."""
    found, small = 0, Counter[str]()
    for seed in range(repetitions):
        diagnosis = size.diagnose(seed)
        found += bool(diagnosis.findings)
        small.update({check.name: check.p_value <= 1 - CONFIDENCE for check in diagnosis.checks})
    return found / repetitions, {name: count / repetitions for name, count in small.items()}


def table(repetitions: int) -> str:
    error = (CONFIDENCE * (1 - CONFIDENCE) / repetitions) ** 0.5
    lines = [
        f"{repetitions:,} simulated training runs per row; the standard error of 5 % is {100 * error:.1f} %.",
        "",
        "| steps | leaves | noise | examples, rate | any finding | test with p <= 5 % most often |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for size in SIZES:
        found, small = rates(size, repetitions)
        worst = max(small, key=lambda name: small[name])
        leaves = " + ".join(f"{leaf:,}" for leaf in size.leaves)
        lines.append(
            f"| {size.num_steps} | {leaves} | {size.kind} | {size.num_examples:,}, {size.sample_rate:g} "
            f"| {100 * found:.1f} % | `{worst}`, {100 * small[worst]:.1f} % |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


@dataclass(frozen=True)
class RowSize:
    """Size of a correct training run of whose Poisson batches only the rows are known."""

    num_steps: int
    num_examples: int
    sample_rate: float
    num_different: int
    """The number of different rows: some examples may be identical."""

    def checks(self, seed: int) -> tuple[Check, ...]:
        rng = np.random.default_rng([seed, ROW_SIZES.index(self), 1])
        digests = rng.integers(1, 2**64, self.num_different, np.uint64)
        rows = digests[np.arange(self.num_examples) % self.num_different]
        record = BatchRecord("")
        record.tests_sizes, record.rows = True, RowRecord(self.num_examples)
        for is_drawn in rng.random((self.num_steps, self.num_examples)) < self.sample_rate:
            record.use(int(np.count_nonzero(is_drawn)))
            record.rows.observe(rows[is_drawn])
        return record.results(noise_multiplier=1.0, sample_rate=self.sample_rate).checks


ROW_SIZES = [
    RowSize(60, 100, 0.1, 100),
    RowSize(200, 300, 0.1, 300),
    RowSize(200, 300, 0.1, 290),
    RowSize(100, 2_000, 0.03, 2_000),
]


def rows_table(repetitions: int) -> str:
    sizes = (
        (f"{size.num_steps} | {size.num_examples:,}, {size.sample_rate:g} | {size.num_different:,}", size)
        for size in ROW_SIZES
    )
    runs = ((words, map(size.checks, range(repetitions))) for words, size in sizes)
    return p_value_table("steps | examples, rate | different rows | test of rows", runs, repetitions, SMALL)


def p_value_table(
    header: str, runs: Iterable[tuple[str, Iterable[Iterable[Check]]]], repetitions: int, level: float
) -> str:
    """Return a row for each setting and test: how often its p-value was small in correct runs."""
    columns = [*header.split(" | "), "p <= 5 %", "p <= 1 %", f"p <= {100 * level:.3f} %", "smallest p"]
    lines = [
        f"{repetitions:,} simulated training runs per row; the smallest p-value of a run is compared with "
        f"{100 * level:.3f} %.",
        "",
        f"| {' | '.join(columns)} |",
        "| " + "--- | " * len(columns),
    ]
    lines[-1] = lines[-1].rstrip()
    for words, checks_of_runs in runs:
        found: dict[str, list[float]] = {}
        for checks in checks_of_runs:
            for check in checks:
                found.setdefault(check.name, []).append(check.p_value)
        for name, p_values in found.items():
            # A test that does not apply to a run cannot have a small p-value there.
            shares = [np.count_nonzero(np.array(p_values) <= p) / repetitions for p in (0.05, 0.01, level)]
            cells = " | ".join(f"{100 * share:.2f} %" for share in shares)
            lines.append(f"| {words} | `{name}` | {cells} | {min(p_values):.1g} |")
            print(lines[-1], len(p_values), flush=True)
    return "\n".join(lines)


@dataclass(frozen=True)
class RegularSize:
    """Size of a correct training run whose sums are known; the noise has at least the claimed scales."""

    num_steps: int
    leaves: tuple[int, ...]
    kind: str = "as claimed"

    def checks(self, seed: int) -> list[Check]:
        rng = np.random.default_rng([seed, REGULAR_SIZES.index(self), 2])
        width, check = sum(self.leaves), NoiseCheck()
        noise, sums = rng.standard_normal((2, self.num_steps, width), np.float32)
        sums = 3 * sums + 2 * rng.standard_normal(width)  # a part is the same in all steps
        if self.kind == "doubling by leaf":
            noise *= np.repeat(2.0 ** np.arange(len(self.leaves)), self.leaves)
        elif self.kind == "growing by step":
            noise *= np.linspace(1, 3, self.num_steps)[:, None]
        released = np.round((sums + noise) * 64) / 64 if self.kind == "rounded to 1/64" else sums + noise
        rounding = 1 / 128 if self.kind == "rounded to 1/64" else 0.0
        for release, total in zip(released, sums, strict=True):
            step = ObservedStep(noise=release - total, leaves=self.leaves, rounding=rounding, total=total)
            check.observe(step)
        record = check.record()
        results = [test(record) for test in (*REGULARITY_TESTS, missing_direction)]
        return [result for result in results if result is not None]


REGULAR_SIZES = [
    RegularSize(5, (3, 3, 2)),
    RegularSize(40, (20, 5, 5)),
    RegularSize(40, (20, 5, 5), "doubling by leaf"),
    RegularSize(40, (20, 5, 5), "growing by step"),
    RegularSize(40, (20, 5, 5), "rounded to 1/64"),
    RegularSize(300, (320, 20, 160, 8, 32, 4)),
    RegularSize(60, (2_000, 1_000)),
]


def regular_table(repetitions: int) -> str:
    runs = (
        (
            f"{size.num_steps} | {' + '.join(f'{leaf:,}' for leaf in size.leaves)} | {size.kind}",
            map(size.checks, range(repetitions)),
        )
        for size in REGULAR_SIZES
    )
    return p_value_table("steps | leaves | noise | test", runs, repetitions, SMALL_OF_ALL)


AUDITED_STEPS = 100


def audit_checks(seed: int) -> tuple[Check, ...]:
    """Return the checks of the audit of one correct step, at noise multipliers 1 and 2 in turn."""
    from _detection_runs import RUNS, Run  # noqa: PLC0415  # imports all libraries

    from dpaudit.zoo.faults import TWINS  # noqa: PLC0415

    warnings.simplefilter("ignore")
    run = Run(TWINS[0], None, sigma=1.0 + seed % 2, num_steps=AUDITED_STEPS, seed=seed)
    return tuple(RUNS["step"](run).audit().diagnosis.checks)


def batch_checks(seed: int) -> tuple[Check, ...]:
    """Return the checks of Poisson batches: 300 examples at rate 0.1."""
    rng, record = np.random.default_rng([seed, 5]), Diagnostics(sample_rate=0.1)
    for is_drawn in rng.random((AUDITED_STEPS, 300)) < 0.1:
        record.observe_batch(np.flatnonzero(is_drawn), 300)
    return tuple(record.diagnose(CONFIDENCE).checks)


def audits_table(repetitions: int) -> str:
    def runs() -> Iterator[tuple[str, Iterable[Iterable[Check]]]]:
        for name, checks in (("audit of a step", audit_checks), ("batches", batch_checks)):
            yield name, pool.imap_unordered(checks, range(repetitions), chunksize=8)

    with get_context("spawn").Pool(os.cpu_count()) as pool:
        return p_value_table("of | test", runs(), repetitions, SMALL_OF_ALL)


SIMULATED_RUNS, OPACUS_RUNS, OPACUS_STEPS = 400, 40, 200


def adaptive_checks(number: int) -> tuple[Check, ...]:
    """Return the checks of one of the simulated training runs whose gradients depend on earlier noise."""
    training, seed = list(adaptive_runs(SIMULATED_RUNS))[number]
    return training.diagnose(seed).checks


def opacus_checks(number: int) -> tuple[Check, ...]:
    """Return the checks of the audit of such a training run with Opacus, at most one of each setting."""
    warnings.simplefilter("ignore")
    settings = list(product(SETTINGS, SCHEDULES))
    setting, decay = settings[7 * number % len(settings)]
    diagnosis = LinearTraining(*setting, decay, OPACUS_STEPS).audit_with_opacus(number).diagnosis
    return diagnosis.checks if diagnosis is not None else ()


def adaptive_table(repetitions: int) -> str:
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        return "\n\n".join(
            p_value_table(
                "of | test", [(name, pool.imap_unordered(checks, range(count)))], count, SMALL_OF_ALL
            )
            for name, checks, count in (
                ("simulated training", adaptive_checks, min(repetitions, SIMULATED_RUNS)),
                ("audit with Opacus", opacus_checks, OPACUS_RUNS),
            )
        )


PARTS = {
    "noise": table,
    "rows": rows_table,
    "regular": regular_table,
    "audits": audits_table,
    "adaptive": adaptive_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--part", choices=PARTS, help="write only one of the tables")
    arguments = parser.parse_args()
    for name in [arguments.part] if arguments.part else PARTS:
        write_tables(f"p-values-{name}.csv", PARTS[name](arguments.repetitions))


if __name__ == "__main__":
    restart_in_environment()
    main()
