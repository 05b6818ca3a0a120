"""How often the first printed cause of a clipping fault is right, for faults that are no candidates.

Each fault is a step with wrong clipping that was written after the candidates in
``dpaudit.diagnostics._clipping_causes`` were fixed. A cause counts as right if it contains one of the listed
phrases. Usage: ``python benchmarks/arrival_causes.py [seeds]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np

from dpaudit import Claim
from dpaudit.observers.step import observe_step

LEAVES = {
    "fc1.weight": 600,
    "fc1.bias": 30,
    "fc2.weight": 300,
    "fc2.bias": 10,
    "fc3.weight": 30,
    "fc3.bias": 3,
}
SIZE = sum(LEAVES.values())
STARTS = dict(zip(LEAVES, np.cumsum([0, *LEAVES.values()]), strict=False))
NOISE, STEPS = 1.0, 300
Rows = np.ndarray
Clip = Callable[[Rows], Rows]


def part(name: str) -> slice:
    return slice(STARTS[name], STARTS[name] + LEAVES[name])


def norms(rows: Rows, keep: np.ndarray | None = None) -> Rows:
    return np.linalg.norm(rows if keep is None else rows * keep, axis=1, keepdims=True)


def without(*places: slice) -> np.ndarray:
    keep = np.ones(SIZE)
    for place in places:
        keep[place] = 0
    return keep


def by(norm: Callable[[Rows], Rows]) -> Clip:
    return lambda rows: rows / np.maximum(1.0, norm(rows))


def in_parts(*places: slice) -> Clip:
    def clip(rows: Rows) -> Rows:
        out = rows.copy()
        for place in places:
            out[:, place] /= np.maximum(1.0, norms(rows[:, place]))
        return out

    return clip


def overflowing(rows: Rows) -> Rows:
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.square(rows.astype(np.float16)).sum(axis=1, keepdims=True, dtype=np.float16)
        factor = 1 / np.maximum(1.0, np.sqrt(squares.astype(np.float64)))
    return np.where(np.isfinite(squares), rows * factor, rows)


SEPARATELY = ("separately",)
FAULTS: dict[str, tuple[Clip, tuple[str, ...]]] = {
    "norm capped at 60 C": (by(lambda rows: np.minimum(norms(rows), 60)), ("capped at about",)),
    "norm saturates at 40 C (tanh)": (by(lambda rows: 40 * np.tanh(norms(rows) / 40)), ("capped at about",)),
    "norm in 8-bit fixed point": (
        by(lambda rows: np.minimum(np.round(norms(rows) * 16) / 16, 15.9)),
        ("capped at about",),
    ),
    "by value at 0.4 C": (lambda rows: np.clip(rows, -0.4, 0.4), ("by value",)),
    "tanh of each number": (np.tanh, ("by value",)),
    "parts of 190": (in_parts(*[slice(i, min(i + 190, SIZE)) for i in range(0, SIZE, 190)]), SEPARATELY),
    "each layer apart": (in_parts(slice(0, 630), slice(630, 940), slice(940, SIZE)), SEPARATELY),
    "norm of the weights only": (
        by(lambda rows: norms(rows, without(part("fc1.bias"), part("fc2.bias"), part("fc3.bias")))),
        ("leaves out fc1.bias and", "leaves out fc2.bias and", "leaves out fc3.bias and"),
    ),
    "last bias counted at half": (
        by(lambda rows: norms(rows, 1 - 0.999 * (1 - without(part("fc3.bias"))))),
        ("leaves out fc3.bias",),
    ),
    "first layer frozen in the norm": (
        by(lambda rows: norms(rows, without(slice(0, 630)))),
        ("leaves out fc1.weight and fc1.bias", "leaves out fc1.bias and fc1.weight"),
    ),
    "every second number of the norm": (
        by(lambda rows: norms(rows, np.arange(SIZE) % 2 == 0)),
        ("part of", "not clipped"),
    ),
    "clipped at 2.2 C": (by(lambda rows: norms(rows) / 2.2), ("clipped at about 2",)),
    "clipped at sqrt(d) C": (by(lambda rows: norms(rows) / SIZE**0.5), ("clipped at about 3",)),
    "scaled up below 2 C": (
        lambda rows: rows * np.where(norms(rows) < 2, 3.0, 1 / np.maximum(1.0, norms(rows))),
        ("multiplied by about 3", "shorter than"),
    ),
    "normalized to 1.2 C": (
        lambda rows: 1.2 * rows / np.maximum(norms(rows), 1e-12),
        ("normalized", "multiplied by about"),
    ),
    "clipped twice too late, x 4": (lambda rows: 4 * by(norms)(rows), ("multiplied by about",)),
    "norm in half precision, infinite norms skipped": (
        overflowing,
        ("gradients of 1,000 clipping norms are not clipped",),
    ),
    "only the first parameter": (by(lambda rows: norms(rows[:, :600])), ("that of fc1.weight alone",)),
    "log of the norm": (by(lambda rows: 1 + np.log(np.maximum(norms(rows), 1.0))), ("power", "capped")),
    "no clipping at all": (lambda rows: rows, ("not clipped",)),
}


def first_cause(clip: Clip, seed: int) -> tuple[bool, str]:
    rng = np.random.default_rng(seed)

    def step(rows: Rows) -> Rows:
        return clip(rows).sum(axis=0) + NOISE * rng.standard_normal(SIZE)

    claim = Claim.gaussian(noise_multiplier=NOISE, delta=1e-5)
    recorder = observe_step(
        step, np.zeros((1, SIZE)), claim=claim, max_grad_norm=1.0, num_steps=STEPS, leaves=LEAVES, seed=seed
    )
    found = recorder.diagnose(confidence=0.99)
    names = [finding.name for finding in found.findings]
    return "clipping" in names, (found.likely_causes() or ("none",))[0]


def main(num_seeds: int) -> None:
    right = 0
    for name, (clip, phrases) in FAULTS.items():
        results = [first_cause(clip, seed) for seed in range(num_seeds)]
        good = sum(any(phrase in cause for phrase in phrases) for _, cause in results)
        right += good
        found = sum(is_found for is_found, _ in results)
        print(f"{name}: found {found}, right {good} of {num_seeds}: {results[0][1]}", flush=True)
    print(f"first cause right in {right} of {num_seeds * len(FAULTS)}")
    print("correct:", first_cause(by(norms), 0))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
