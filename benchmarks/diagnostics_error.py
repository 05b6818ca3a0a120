"""Simulate how often a correct training run has a finding, and write the table to docs/diagnostics.md.

python benchmarks/diagnostics_error.py [--repetitions 2000]
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpaudit.diagnostics import Diagnosis, Diagnostics

PAGE = Path(__file__).parent.parent / "docs" / "diagnostics.md"
BEGIN, END = "<!-- written by benchmarks/diagnostics_error.py -->", "<!-- end -->"
CONFIDENCE = 0.95


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=2000)
    written = f"{BEGIN}\n\n{table(parser.parse_args().repetitions)}\n\n{END}"
    page = PAGE.read_text()
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: written, page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
