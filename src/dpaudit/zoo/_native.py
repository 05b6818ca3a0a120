"""Training runs of the native engine, judged step by step, or end to end to test their sampling.

Their faulty mechanisms are in :mod:`dpaudit.training.broken`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from dpaudit import training as engine
from dpaudit.canaries import Dirac, GradientCanary
from dpaudit.recording import SupportsDiagnose
from dpaudit.stats import ClopperPearson, Fixed, Inference, ThresholdRule
from dpaudit.training import broken
from dpaudit.training.data import digits
from dpaudit.training.models import mlp
from dpaudit.zoo import _evidence as evidence

LEAVES = 64 * 16, 16, 16 * 10, 10
"""The sizes of the default model's parameters."""


@dataclass(frozen=True)
class NativeTraining:
    """Training on the digits with 1,210 parameters and the paper's claim of epsilon = 1.27 per step.

    ``mechanism`` creates the broken mechanism; ``num_runs`` training runs are judged together.
    """

    mechanism: Callable[..., engine.PrivateSum] | None
    num_steps: int = 300
    num_runs: int = 1
    canary: GradientCanary = Dirac()  # noqa: RUF009  # frozen
    num_canaries: int = 512
    inference: Inference | None = None
    threshold: ThresholdRule | None = None
    num_examples: int = 1000
    sample_rate: float = 0.05

    def __call__(self, is_broken: bool, seed: int) -> evidence.Evidence:
        tests, audits = engine.Diagnose(), []
        copies: dict[int, SupportsDiagnose] = {}
        total = self.num_runs * self.num_steps
        for run in range(self.num_runs):
            audits.append(
                engine.OneRun(
                    delta=evidence.DELTA, canary=self.canary, num_canaries=self.num_canaries, seed=seed + run
                )
            )
            training = self._training(is_broken, seed + run, audits[-1], tests)
            for _ in training.run():
                evidence.keep_checkpoint(copies, tests, run * self.num_steps + training.num_done, total)
        return evidence.Evidence(
            claim=evidence.paper_claim(), num_steps=total, scores=self._scores(audits), diagnostics=copies
        )

    def _scores(self, audits: list[engine.OneRun]) -> evidence.Scores:
        states = [audit.recorder.state_dict() for audit in audits]
        values, present = (
            np.concatenate([state[name] for state in states]) for name in ("scores", "present")
        )
        return evidence.Scores(
            values=values, present=present, inference=self.inference, threshold=self.threshold
        )

    def _training(
        self, is_broken: bool, seed: int, audit: engine.OneRun, tests: engine.Diagnose
    ) -> engine.Training:
        settings = engine.DPSGD(
            noise_multiplier=evidence.NOISE,
            max_grad_norm=1.0,
            sample_rate=self.sample_rate,
            num_steps=self.num_steps,
            optimizer=engine.SGD(learning_rate=0.5),
        )
        seeds, mechanism = engine.Seeds.of(seed), None
        if is_broken and self.mechanism is not None:
            mechanism = self.mechanism(noise_multiplier=evidence.NOISE, max_grad_norm=1.0)
        return engine.Training(
            engine.initialize(lambda: mlp(64, 16, 10), seeds.initialization),
            digits().split(self.num_examples)[0],
            settings,
            seeds=seeds,
            hooks=[audit, tests],
            mechanism=mechanism,
        )


@dataclass(frozen=True)
class WholeTraining:
    """Four epochs on the digits with 9,000 canaries added; ``sampling`` creates the broken batches."""

    sampling: Callable[[float], engine.Sampler]
    num_canaries: int = 9000
    sample_rate: float = 1 / 25

    def __call__(self, is_broken: bool, seed: int) -> evidence.Evidence:
        audit = engine.EndToEnd(delta=evidence.DELTA, num_canaries=self.num_canaries, seed=seed)
        tests, seeds = engine.Diagnose(), engine.Seeds.of(seed)
        settings = engine.DPSGD(
            noise_multiplier=0.5,
            max_grad_norm=1.0,
            sample_rate=self.sample_rate,
            num_steps=round(4 / self.sample_rate),
            optimizer=engine.SGD(learning_rate=0.5),
        )
        training = engine.Training(
            engine.initialize(lambda: mlp(64, 128, 10), seeds.initialization),
            digits().split(1500)[0],
            settings,
            seeds=seeds,
            hooks=[audit, tests],
            sampling=self.sampling(self.sample_rate) if is_broken else None,
        )
        for _ in training.run():
            pass
        recorder = audit.recorder
        ratios, present = (recorder.state_dict()[name] for name in ("ratios", "present"))
        scores = evidence.Scores(
            values=ratios, present=present, tradeoff=recorder.claim.training, threshold=Fixed(0.0)
        )
        return evidence.Evidence(
            claim=recorder.claim,
            num_steps=settings.num_steps,
            scores=scores,
            diagnostics={settings.num_steps: tests},
        )


SCENARIOS: Mapping[str, evidence.Scenario] = {
    "clip-after-mean": NativeTraining(broken.ClippedAfterMean, canary=Dirac(scale=30.0)),
    "noise-100-seeds": NativeTraining(broken.FewSeeds),
    "noise-too-small": NativeTraining(
        # a true epsilon of 1.35; the paper detects 1.57 and above
        partial(broken.NoiseTooSmall, factor=evidence.noise_of(1.35) / evidence.noise_of(evidence.EPSILON)),
        num_steps=500,
        num_canaries=1200,
        # the betting bound is 0.07 too low after 500 steps, whatever the number of canaries
        inference=ClopperPearson(),
        threshold=Fixed(0.5),
    ),
    "seed-per-leaf": NativeTraining(partial(broken.SameSeedForLeaves, leaves=LEAVES)),
    "seed-constant": NativeTraining(broken.ConstantSeed, num_steps=150, num_runs=2),
    "closure-clean": NativeTraining(broken.Noiseless),
    "silent-sgd": NativeTraining(broken.Silent),
    "raw-gradient-mixed": NativeTraining(broken.RawMeanMixed),
    "sum-mean": NativeTraining(partial(broken.NoiseForTheMean, batch_size=50)),
    "accumulate-noise": NativeTraining(broken.AveragedNoise),
    "unnoised-coordinates": NativeTraining(partial(broken.UnnoisedCoordinates, count=64)),
    "empty-batch": NativeTraining(
        broken.NoNoiseWhenEmpty, num_canaries=1, num_examples=100, sample_rate=0.01
    ),
    "not-poisson": WholeTraining(broken.ShuffledBatches),
}
