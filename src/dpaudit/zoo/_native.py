"""Training runs of the native engine, judged step by step, or end to end to test their sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpaudit.canaries import Dirac, GradientCanary
from dpaudit.diagnostics import Diagnostics
from dpaudit.stats import Fixed, Inference, ThresholdRule
from dpaudit.training import (
    DPSGD,
    SGD,
    Diagnose,
    EndToEnd,
    OneRun,
    PrivateSum,
    Sampler,
    Seeds,
    Training,
    initialize,
)
from dpaudit.training.data import digits
from dpaudit.training.models import mlp
from dpaudit.zoo._entry import DELTA, NOISE, Evidence, Scores, keep_checkpoint, paper_claim

_DIRAC = Dirac()
_HIDDEN = 16
LEAVES = 64 * _HIDDEN, _HIDDEN, _HIDDEN * 10, 10
"""The sizes of the default model's parameters."""
_RATE, _EPOCHS = 1 / 25, 4  # for training runs that are judged end to end


@dataclass(frozen=True, kw_only=True)
class NativeTraining:
    """Training on the digits with 1,210 parameters and the paper's claim of epsilon = 1.27 per step.

    ``mechanism`` creates the broken mechanism; ``num_runs`` training runs are judged together.
    """

    mechanism: Callable[..., PrivateSum]
    num_steps: int = 300
    num_runs: int = 1
    canary: GradientCanary = _DIRAC
    num_canaries: int = 512
    inference: Inference | None = None
    threshold: ThresholdRule | None = None
    num_examples: int = 1000
    sample_rate: float = 0.05

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        tests, audits = Diagnose(), []
        seen: dict[int, Diagnostics] = {}
        total = self.num_runs * self.num_steps
        for run in range(self.num_runs):
            audits.append(
                OneRun(delta=DELTA, canary=self.canary, num_canaries=self.num_canaries, seed=seed + run)
            )
            training = self._training(is_broken, seed + run, audits[-1], tests)
            for _ in training.run():
                keep_checkpoint(seen, tests.record, run * self.num_steps + training.num_done, total)
        return Evidence(claim=paper_claim(), num_steps=total, scores=self._scores(audits), diagnostics=seen)

    def _scores(self, audits: list[OneRun]) -> Scores:
        states = [audit.recorder.state_dict() for audit in audits]
        values, present = (
            np.concatenate([state[name] for state in states]) for name in ("scores", "present")
        )
        return Scores(values=values, present=present, inference=self.inference, threshold=self.threshold)

    def _training(self, is_broken: bool, seed: int, audit: OneRun, tests: Diagnose) -> Training:
        settings = DPSGD(
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
            sample_rate=self.sample_rate,
            num_steps=self.num_steps,
            optimizer=SGD(learning_rate=0.5),
        )
        seeds = Seeds.of(seed)
        return Training(
            initialize(lambda: mlp(64, _HIDDEN, 10), seeds.initialization),
            digits().split(self.num_examples)[0],
            settings,
            seeds=seeds,
            hooks=[audit, tests],
            mechanism=self.mechanism(noise_multiplier=NOISE, max_grad_norm=1.0) if is_broken else None,
        )


@dataclass(frozen=True)
class WholeTraining:
    """Four epochs on the digits with 9,000 canaries added; ``sampling`` creates the broken batches."""

    sampling: Callable[[float], Sampler]
    num_canaries: int = 9000

    def __call__(self, is_broken: bool, seed: int) -> Evidence:
        audit = EndToEnd(delta=DELTA, num_canaries=self.num_canaries, seed=seed)
        tests, seeds = Diagnose(), Seeds.of(seed)
        settings = DPSGD(
            noise_multiplier=0.5,
            max_grad_norm=1.0,
            sample_rate=_RATE,
            num_steps=round(_EPOCHS / _RATE),
            optimizer=SGD(learning_rate=0.5),
        )
        training = Training(
            initialize(lambda: mlp(64, 128, 10), seeds.initialization),
            digits().split(1500)[0],
            settings,
            seeds=seeds,
            hooks=[audit, tests],
            sampling=self.sampling(_RATE) if is_broken else None,
        )
        for _ in training.run():
            pass
        recorder = audit.recorder
        ratios, present = (recorder.state_dict()[name] for name in ("ratios", "present"))
        scores = Scores(values=ratios, present=present, tradeoff=recorder.tradeoff, threshold=Fixed(0.0))
        return Evidence(
            claim=recorder.claim,
            num_steps=settings.num_steps,
            scores=scores,
            diagnostics={settings.num_steps: tests.record},
        )
