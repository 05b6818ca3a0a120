"""Steps that are a function of per-example gradients, in numpy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dpaudit.canaries import Constant, GradientCanary
from dpaudit.diagnostics import Diagnostics
from dpaudit.observers._residuals import clipped_sum, residual
from dpaudit.observers.step import observe_step
from dpaudit.stats._types import FloatArray
from dpaudit.zoo._evidence import Evidence, Scores, looks
from dpaudit.zoo.specimens._claim import NOISE, papers_claim

__all__ = ["PlainStep", "Step"]

Step: TypeAlias = Callable[[FloatArray, tuple[int, ...], np.random.Generator], FloatArray]
"""From gradients, whose parameters have these sizes, to a noisy sum; the clipping norm is 1."""

_CONSTANT = Constant()


def correct_step(rows: FloatArray, leaves: tuple[int, ...], rng: np.random.Generator) -> FloatArray:
    """Clip each gradient as a whole, add them up, add noise."""
    noise: FloatArray = NOISE * rng.standard_normal(sum(leaves))
    return clipped_sum(rows, 1.0) + noise


@dataclass(frozen=True, kw_only=True)
class PlainStep:
    """Canaries that reach into all parameters, and the paper's claim, epsilon = 1.27 for each step."""

    broken: Step
    leaves: tuple[int, ...]
    canary: GradientCanary = _CONSTANT
    num_canaries: int = 16
    num_steps: int = 300

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        rng = np.random.default_rng(seed)
        step = self.broken if is_broken else correct_step
        record, seen = Diagnostics(), dict[int, Diagnostics]()

        def observed(rows: FloatArray) -> FloatArray:
            released = step(rows, self.leaves, rng)
            record.observe_noise(residual(released, rows, max_grad_norm=1.0, std=NOISE), self.leaves)
            done.append(None)
            if len(done) in looks(self.num_steps):
                seen[len(done)] = copy.deepcopy(record)
            return released

        done: list[None] = []
        recorder = observe_step(
            observed,
            np.zeros((0, sum(self.leaves))),
            claim=papers_claim(),
            max_grad_norm=1.0,
            num_steps=self.num_steps,
            canary=self.canary,
            num_canaries=self.num_canaries,
            seed=seed,
        )
        return Evidence(
            claim=papers_claim(), num_steps=self.num_steps, scores=Scores.of(recorder), diagnostics=seen
        )
