"""A training with the native engine that is judged as a whole, so that its sampling shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpaudit.stats import Fixed
from dpaudit.training import DPSGD, SGD, Diagnose, EndToEnd, Sampling, Seeds, Training, initialize
from dpaudit.training.data import digits
from dpaudit.training.models import mlp
from dpaudit.zoo._evidence import Evidence, Scores
from dpaudit.zoo.specimens._claim import DELTA

__all__ = ["WholeTraining"]

_RATE, _EPOCHS = 1 / 25, 4


@dataclass(frozen=True)
class WholeTraining:
    """Four epochs on the digits, with 9,000 canaries among them; ``sampling`` makes the broken batches."""

    sampling: Callable[[float], Sampling]
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
