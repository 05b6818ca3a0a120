"""Measure which faults of the noise are found, and how often correct noise has a finding.

python benchmarks/noise_power.py power [--seeds 10] [--only NAME ...]
python benchmarks/noise_power.py error [--repetitions 2000]

A step sums 64 clipped gradients on average, with float32 arithmetic, and claims noise multiplier 1; all 600
coordinates (3 leaves) are kept for 300 steps.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats

from dpaudit.diagnostics import Diagnosis
from dpaudit.recording import NoiseLog

LEAVES, NUM_STEPS, BATCH = (300, 100, 200), 300, 64
SIZE = sum(LEAVES)
LEVEL = 0.01


@dataclass
class Run:
    """State of a simulated training run: what a fault may use."""

    rng: np.random.Generator
    size: int = SIZE
    step: int = 0
    batch_size: int = 0
    total: np.ndarray = field(default_factory=lambda: np.zeros(0))
    raw: np.ndarray = field(default_factory=lambda: np.zeros(0))
    longest: float = 1.0
    past: list[np.ndarray] = field(default_factory=list)  # noise of earlier steps
    sums: list[np.ndarray] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)

    def normal(self) -> np.ndarray:
        return self.rng.standard_normal(self.size)

    def draw_batch(self) -> None:
        """Draw gradients with a common direction; canaries of length 1 are on a few coordinates."""
        self.batch_size = int(self.rng.poisson(BATCH))
        num_rows = max(self.batch_size, 1)
        directions = self.rng.standard_normal((num_rows, self.size)) / np.sqrt(self.size)
        if "mean" not in self.state:
            self.state["mean"] = self.rng.standard_normal(self.size) / np.sqrt(self.size)
        lengths = np.exp(0.2 * self.rng.standard_normal(num_rows) - 0.55)  # the longest is often below 1
        rows = lengths[:, None] * (0.95 * directions + 0.3 * self.state["mean"])
        norms = np.linalg.norm(rows, axis=1)
        clipped = rows / np.maximum(1.0, norms)[:, None]
        present = self.rng.random(16) < 0.5
        self.longest = float(min(1.0, norms.max()))
        self.raw, self.total = rows.sum(axis=0), clipped.sum(axis=0)
        self.total[np.arange(16) * (self.size // 16)] += present
        self.total = self.total.astype(np.float32).astype(np.float64)


def of_normal(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Run], np.ndarray]:
    return lambda run: change(run.normal())


def table(size: int) -> Callable[[Run], np.ndarray]:
    values = np.random.default_rng(1).standard_normal(size)
    return lambda run: values[run.rng.integers(size, size=run.size)]


def truncated(limit: float) -> Callable[[Run], np.ndarray]:
    scale = stats.truncnorm.std(-limit, limit)
    low, high = stats.norm.cdf([-limit, limit])
    return lambda run: stats.norm.ppf(run.rng.uniform(low, high, run.size)) / scale


def irwin_hall(count: int) -> Callable[[Run], np.ndarray]:
    return lambda run: (run.rng.random((count, run.size)) - 0.5).sum(axis=0) * np.sqrt(12 / count)


def bits(array: np.ndarray, mantissa: int) -> np.ndarray:
    fraction, exponent = np.frexp(array)
    return np.ldexp(np.rint(fraction * 2**mantissa) / 2**mantissa, exponent)


def box_muller(num_bits: int) -> Callable[[Run], np.ndarray]:
    def noise(run: Run) -> np.ndarray:
        half = run.size // 2
        u, v = (run.rng.integers(2**num_bits, size=(2, half)) + 0.5) / 2**num_bits
        radius = np.sqrt(-2 * np.log(u))
        return np.stack([radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)], axis=1).ravel()

    return noise


def rolled(distance: int) -> Callable[[Run], np.ndarray]:
    def noise(run: Run) -> np.ndarray:
        return run.normal() if run.step % 2 == 0 else np.roll(run.past[-1], distance)

    return noise


def leaf_shifted(correlation: float) -> Callable[[Run], np.ndarray]:
    def noise(run: Run) -> np.ndarray:
        found = run.normal()
        found[320:400] = correlation * found[15:95] + np.sqrt(1 - correlation**2) * found[320:400]
        return found

    return noise


def stream_twice(run: Run) -> np.ndarray:
    stream = run.rng.standard_normal(run.size - 40)
    return np.concatenate([stream[:400], stream[150 : 150 + run.size - 400]])


def half_permuted(run: Run) -> np.ndarray:
    found = run.normal()
    found[run.size // 2 :] = run.rng.permutation(found[: run.size // 2])
    return found


def few_places(share: float, after: int = 1) -> Callable[[Run], np.ndarray]:
    def noise(run: Run) -> np.ndarray:
        found = run.normal()
        if run.step >= after:
            where = run.rng.permutation(run.size)[: int(share * run.size)]
            found[where] = run.past[-after][run.rng.permutation(run.size)[: where.size]]
        return found

    return noise


def rolled_later(run: Run) -> np.ndarray:
    if run.step < 20:
        return run.normal()
    return np.roll(run.past[-20], int(run.rng.integers(run.size)))


def autoregressive(run: Run) -> np.ndarray:
    return run.normal() if not run.past else 0.05 * run.past[-1] + np.sqrt(1 - 0.05**2) * run.normal()


def antithetic(run: Run) -> np.ndarray:
    return run.normal() if run.step % 2 == 0 else -run.past[-1]


def low_rank(rank: int) -> Callable[[Run], np.ndarray]:
    basis = np.linalg.qr(np.random.default_rng(2).standard_normal((SIZE, rank)))[0]
    return lambda run: np.sqrt(SIZE / rank) * basis[: run.size] @ run.rng.standard_normal(rank)


def common_part(share: float) -> Callable[[Run], np.ndarray]:
    direction = np.random.default_rng(3).standard_normal(SIZE)

    def noise(run: Run) -> np.ndarray:
        sign = np.sqrt(share) * run.rng.choice([-1, 1])
        return np.sqrt(1 - share) * run.normal() + sign * direction[: run.size]

    return noise


def shared_blocks(run: Run) -> np.ndarray:
    return np.tile(run.rng.standard_normal(run.size // 4), 4)


def scaled_by(scale: Callable[[Run], Any]) -> Callable[[Run], np.ndarray]:
    return lambda run: scale(run) * run.normal()


def with_sum(part: Callable[[Run], Any]) -> Callable[[Run], np.ndarray]:
    return lambda run: run.normal() + part(run)


def earlier(run: Run, lag: int) -> np.ndarray:
    return run.sums[-lag] if len(run.sums) >= lag else np.zeros(run.size)


def new_direction(run: Run, length: float) -> np.ndarray:
    found = run.normal()
    return length * found / np.linalg.norm(found)


def fixed_direction(run: Run, length: float) -> np.ndarray:
    found = np.random.default_rng(4).standard_normal(run.size)
    return length * found / np.linalg.norm(found)


def bfloat16(array: np.ndarray) -> np.ndarray:
    return bits(array, 8)


FAULTS: dict[str, Callable[[Run], np.ndarray]] = {
    "noise x 0.9": of_normal(lambda x: 0.9 * x),
    "noise in bf16": of_normal(bfloat16),
    "noise in fp16": of_normal(lambda x: x.astype(np.float16)),
    "fixed point s/512": of_normal(lambda x: np.rint(512 * x) / 512),
    "fixed point s/65,536": of_normal(lambda x: np.rint(65536 * x) / 65536),
    "12 mantissa bits": of_normal(lambda x: bits(x, 12)),
    "binomial(256)": lambda run: (run.rng.binomial(256, 0.5, run.size) - 128) / 8,
    "table of 4,096": table(4096),
    "table of 2^17": table(2**17),
    "table of 10^6": table(10**6),
    "table of 10^7": table(10**7),
    "inverse cdf of 16 bits": lambda run: stats.norm.ppf(
        (run.rng.integers(2**16, size=run.size) + 0.5) / 2**16
    ),
    "Box-Muller of 12 bits": box_muller(12),
    "Box-Muller of 16 bits": box_muller(16),
    "cut at 2": truncated(2.0),
    "cut at 3": truncated(3.0),
    "cut at 4": truncated(4.0),
    "clamped at 2.5": of_normal(lambda x: np.clip(x, -2.5, 2.5)),
    "clamped at 3": of_normal(lambda x: np.clip(x, -3, 3)),
    "clamped at 4": of_normal(lambda x: np.clip(x, -4, 4)),
    "Irwin-Hall 4": irwin_hall(4),
    "Irwin-Hall 12": irwin_hall(12),
    "t(5)": lambda run: run.rng.standard_t(5, run.size) * np.sqrt(3 / 5),
    "logistic": lambda run: run.rng.logistic(size=run.size) * np.sqrt(3) / np.pi,
    "Laplace": lambda run: run.rng.laplace(scale=np.sqrt(0.5), size=run.size),
    "Laplace 5 %": lambda run: np.where(
        run.rng.random(run.size) < 0.05, run.rng.laplace(scale=np.sqrt(0.5), size=run.size), run.normal()
    ),
    "rolled by 7": rolled(7),
    "rolled by 101": rolled(101),
    "rolled at random after 20 steps": rolled_later,
    "leaf shifted": leaf_shifted(1.0),
    "leaf shifted, correlation 0.3": leaf_shifted(0.3),
    "leaf shifted, correlation 0.1": leaf_shifted(0.1),
    "stream read twice": stream_twice,
    "half permuted": half_permuted,
    "5 % of places reused": few_places(0.05),
    "2 % of places reused after 25 steps": few_places(0.02, 25),
    "shared blocks": shared_blocks,
    "autoregressive 0.05": autoregressive,
    "antithetic": antithetic,
    "rank 50": low_rank(50),
    "rank 300": low_rank(300),
    "rank 500": low_rank(500),
    "common part of 2 %, random signs": common_part(0.02),
    "std by sqrt(size)": scaled_by(lambda run: np.sqrt(run.batch_size / BATCH)),
    "std by 1/sqrt(size)": scaled_by(lambda run: np.sqrt(BATCH / max(run.batch_size, 1))),
    "std +-15 % by size": scaled_by(lambda run: 1.15 if run.batch_size > BATCH else 0.85),
    "std by the norm of the sum": scaled_by(lambda run: np.linalg.norm(run.total) / 22),
    "std by the longest norm": scaled_by(lambda run: run.longest),
    "std by coordinate from |S|": scaled_by(lambda run: 0.5 + np.abs(run.total)),
    "sum of the last step": with_sum(lambda run: earlier(run, 1)),
    "0.2 of the last sum": with_sum(lambda run: 0.2 * earlier(run, 1)),
    "0.3 of the sum 4 steps before": with_sum(lambda run: 0.3 * earlier(run, 4)),
    "0.3 of the sum 20 steps before": with_sum(lambda run: 0.3 * earlier(run, 20)),
    "0.1 of the sum after the noise": with_sum(lambda run: 0.1 * run.total),
    "0.1 of the raw gradient after the noise": with_sum(lambda run: 0.1 * run.raw),
    "0.1 of the sum lost": with_sum(lambda run: -0.1 * run.total),
    "0.5 of the sum, rolled by 1": with_sum(lambda run: 0.5 * np.roll(run.total, 1)),
    "0.03 of the sum": with_sum(lambda run: 0.03 * run.total),
    "2 C in a fixed direction (a note)": with_sum(lambda run: fixed_direction(run, 2.0)),
    "2 C in a new direction": with_sum(lambda run: new_direction(run, 2.0)),
}
TWINS: dict[str, Callable[[Run], np.ndarray]] = {
    "correct": of_normal(lambda x: x),
    "release in bf16": of_normal(lambda x: x),
    "all in bf16": of_normal(bfloat16),
    "all in fp16": of_normal(lambda x: x.astype(np.float16)),
    "noise 1.3": of_normal(lambda x: 1.3 * x),
    "noise 1 to 2 by leaf": lambda run: run.normal() * np.repeat([1.0, 1.5, 2.0], LEAVES),
    "noise 1 to 2 over time": lambda run: run.normal() * (1 + run.step / NUM_STEPS),
}


def simulate(name: str, seed: int, num_steps: int = NUM_STEPS) -> Diagnosis:
    """Return the diagnosis of a run with this fault, or of this correct twin."""
    fault = (FAULTS | TWINS)[name]
    run, log = Run(np.random.default_rng([seed, 7])), NoiseLog()
    for run.step in range(num_steps):
        run.draw_batch()
        if name.startswith("all in"):
            run.total = bfloat16(run.total) if "bf16" in name else run.total.astype(np.float16).astype(float)
        noise = np.asarray(fault(run), dtype=np.float32)
        released = (run.total.astype(np.float32) + noise).astype(np.float64)
        if "bf16" in name and name in TWINS:
            released = bfloat16(released)
        if name == "all in fp16":
            released = released.astype(np.float16).astype(np.float64)
        log.observe(
            released, run.total, LEAVES, norm=1.0, eps=2.0**-23,
            batch_size=run.batch_size, longest=run.longest, num_canaries=8,
        )  # fmt: skip
        run.past.append(noise.astype(np.float64))
        run.sums.append(run.total)
    return log.diagnose(noise_multiplier=1.0, confidence=1 - LEVEL)


def power(seeds: int, only: list[str]) -> None:
    for name in [*TWINS, *FAULTS]:
        if only and name not in only:
            continue
        found = [simulate(name, seed) for seed in range(seeds)]
        hits = sum(bool(one.findings) for one in found)
        firsts = Counter(one.findings[0].name for one in found if one.findings).most_common(2)
        every = Counter(finding.name for one in found for finding in one.findings)
        causes = Counter(one.likely_causes()[0][:60] for one in found if one.likely_causes()).most_common(1)
        print(f"| {name} | {hits} of {seeds} | {firsts} | {dict(every)} | {causes} | "
              f"{[len(one.notes) for one in found]}", flush=True)  # fmt: skip


@dataclass(frozen=True)
class Correct:
    """A correct training run: its generator, size and the precision of its arithmetic."""

    generator: str
    num_steps: int
    leaves: tuple[int, ...]
    sum_scale: float = 0.3
    dtype: str = "float32"
    divisor: float = 1.0

    def noise(self, seed: int) -> np.ndarray:
        shape = self.num_steps, sum(self.leaves)
        if self.generator == "torch":
            import torch  # noqa: PLC0415

            made = torch.Generator().manual_seed(seed)
            parts = [[torch.randn(n, generator=made) for n in self.leaves] for _ in range(self.num_steps)]
            return np.stack([torch.cat(part).numpy() for part in parts])
        if self.generator == "jax":
            import jax  # noqa: PLC0415

            return np.asarray(jax.random.normal(jax.random.key(seed), shape))
        dtype = np.float32 if self.generator == "numpy32" else np.float64
        return np.random.default_rng([seed, 11]).standard_normal(shape, dtype=dtype)

    def diagnose(self, seed: int) -> Diagnosis:
        rng, log = np.random.default_rng([seed, 12]), NoiseLog()
        eps = float(np.finfo(self.dtype).eps)
        divisor = np.asarray(self.divisor, dtype=self.dtype)
        for noise in self.noise(seed):
            total = (self.sum_scale * rng.standard_normal(noise.size)).astype(self.dtype)
            total[rng.random(noise.size) < 0.3] = 0.0
            total[:1] = rng.integers(2)
            released = (total + noise.astype(self.dtype)) / divisor
            log.observe(
                released, total, self.leaves, norm=1.0, eps=eps, divisor=self.divisor,
                batch_size=rng.poisson(64), longest=rng.random(), num_canaries=rng.binomial(8, 0.5),
            )  # fmt: skip
        return log.diagnose(noise_multiplier=1.0, confidence=0.95)


CORRECT = [
    Correct("numpy64", 40, (20, 5, 5)),
    Correct("numpy64", 1, (5,)),
    Correct("numpy32", 3, (1,)),
    Correct("jax", 10, (2, 1)),
    Correct("torch", 10, (2, 3), dtype="float64"),
    Correct("numpy32", 40, (150, 50)),
    Correct("torch", 40, (150, 50), divisor=48.0),
    Correct("jax", 40, (200,), sum_scale=1.0),
    Correct("jax", 100, (200,), sum_scale=0.0),
    Correct("torch", 100, (120, 80), dtype="float64"),
    Correct("jax", 300, (300, 100, 200)),
    Correct("torch", 300, (300, 100, 200), sum_scale=3.0, divisor=48.0),
    Correct("numpy64", 500, (40, 60), dtype="float64"),
]


def error(repetitions: int, only: list[str]) -> None:
    """Print how often correct runs have a finding, and the smallest p-values of each test."""
    small: dict[str, list[float]] = {}
    for number, size in enumerate(CORRECT):
        if only and str(number) not in only:
            continue
        found = Counter[float]()
        for seed in range(repetitions):
            diagnosis = size.diagnose(seed)
            for check in diagnosis.checks:
                small.setdefault(check.name, []).append(check.p_value)
            lowest = min((finding.adjusted for finding in diagnosis.findings), default=1.0)
            found.update(level for level in (0.05, 0.01) if lowest <= level)
            found["notes"] += len(diagnosis.notes)
        print(f"| {size} | {repetitions} | {dict(found)} |", flush=True)
    for name, values in small.items():
        numbers = np.asarray(values)
        shares = {level: float((numbers <= level).mean() / level) for level in (0.05, 0.01, 1e-3, 1e-4)}
        print(f"{name:24s} {numbers.size:6d} smallest {numbers.min():.1e}, rate / level {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["power", "error"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args(sys.argv[1:])
    if options.what == "power":
        power(options.seeds, options.only)
    else:
        error(options.repetitions, options.only)


if __name__ == "__main__":
    main()
