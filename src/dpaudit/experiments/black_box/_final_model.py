"""Many canaries in the data of one training, and one look at its final model.

What guesses about the canaries of one training say of its claim.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.experiments._build import device_of, mechanism_of, model_for, settings_of, split_held_out
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.black_box._canary import canaries_for, coins, first_weights
from dpaudit.experiments.config import Config, ExampleConfig, GivenConfig, OneRunConfig
from dpaudit.stats import Bound, Guesses, Power, Verdict, one_run_bound, one_run_fdp_bound
from dpaudit.stats._bound import plain
from dpaudit.stats._one_run import too_many_correct
from dpaudit.stats._rootfinding import last_true
from dpaudit.stats._serialization import SCHEMA_VERSION
from dpaudit.training import Training, accuracy, initialize
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble import log_odds, negative_loss, with_weights

_PROBABILITY = 0.8


@dataclass(frozen=True, kw_only=True)
class GuessJudge:
    """Two bounds that hold for canaries that share a training, and a verdict that rests on the second.

    The first says nothing of the mechanism (Steinke et al. 2023); the second is of the claimed training's own
    curve (Mahloujifar et al. 2024).
    """

    noise_multiplier: float
    curve: SubsampledGaussian
    delta: float
    confidence: float

    @property
    def _claim(self) -> Claim:
        return Claim.dpsgd(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.curve.sample_rate,
            num_steps=self.curve.num_steps,
            delta=self.delta,
        )

    def values(self, guesses: Guesses) -> dict[str, Any]:
        """The result as plain values."""
        universal = one_run_bound(guesses, delta=self.delta, confidence=self.confidence)
        bound = one_run_fdp_bound(guesses, tradeoff=self.curve, delta=self.delta, confidence=self.confidence)
        claim, verdict = self._claim, self._verdict(bound, guesses)
        rows = {"f-DP(one-run)": bound, "(eps,delta)(one-run)": universal}
        return {
            "verdict": verdict.name,
            "sentence": verdict.value,
            "claim": {
                "summary": claim.summary,
                "epsilon": plain(claim.epsilon),
                "delta": self.delta,
                "parameter": self._claimed,
            },
            "bound": bound.to_dict(),
            "power": self._power(guesses).to_dict(),
            "not_covered": [],
            "delta": self.delta,
            "confidence": self.confidence,
            "notes": [],
            "methods": [
                {"name": name, **row.to_dict(), "training_epsilon": None} for name, row in rows.items()
            ],
        }

    @property
    def _claimed(self) -> float:
        return 1 / self.noise_multiplier

    def _refutes(self, guesses: Guesses, num_correct: int) -> bool:
        """Whether so many of these guesses, had they been right, would refute the claim."""
        found = Guesses(
            num_canaries=guesses.num_canaries, num_guesses=guesses.num_guesses, num_correct=num_correct
        )
        return too_many_correct(found, self.curve, self._claimed, 1 - self.confidence)

    def _verdict(self, bound: Bound, guesses: Guesses) -> Verdict:
        if bound.parameter > self._claimed:
            return Verdict.VIOLATION
        if not self._refutes(guesses, guesses.num_guesses):
            return Verdict.UNDERPOWERED
        return Verdict.NO_VIOLATION

    def _power(self, guesses: Guesses) -> Power:
        """Of an attack that reaches the curve of a noisier or leakier training, with independent guesses."""
        hypothesis = self._claim.hypothesis(self.curve)
        if not self._refutes(guesses, guesses.num_guesses):
            return Power.of(math.inf, hypothesis, _PROBABILITY)
        fewest = guesses.num_guesses
        while self._refutes(guesses, fewest - 1):
            fewest -= 1

        def is_seen_less(excess: float) -> bool:
            right = self._accuracy(guesses, self._claimed + excess)
            return bool(stats.binom.sf(fewest - 1, guesses.num_guesses, right) < _PROBABILITY)

        smallest = self._claimed + last_true(is_seen_less, tolerance=1e-2)
        return Power.of(smallest, hypothesis, _PROBABILITY)

    def _accuracy(self, guesses: Guesses, parameter: float) -> float:
        """The share of the most certain guesses that are right where a training has this parameter."""
        share = guesses.num_guesses / guesses.num_canaries

        def above(fpr: float) -> float:
            return 1 - float(self.curve.fnr(parameter, np.asarray(fpr)))

        fpr = last_true(lambda one: one < 1 and one + above(one) < share, start=share / 2, tolerance=1e-4)
        # where no rate is small enough, so many are recognised before the first is mistaken
        return above(fpr) / (fpr + above(fpr)) if fpr > 0 else 1.0


_SCORES = {"log-odds": log_odds, "loss": negative_loss}


@dataclass(frozen=True, eq=False)
class FinalModel:
    """A training whose data have about half of the canaries, each by a fair coin."""

    config: Config
    resolved: Resolved
    training: Training
    canaries: Dataset
    present: BoolArray
    test: Dataset
    before: FloatArray
    """The scores at the first weights, if everybody knows these; else zeros."""

    @classmethod
    def of(cls, config: Config, resolved: Resolved, data: tuple[Dataset, Dataset]) -> FinalModel:
        """Everything in place, nothing trained yet."""
        audit, seed = config.audit, resolved.audit_seed
        assert isinstance(audit, OneRunConfig)
        assert isinstance(audit.canary, ExampleConfig | GivenConfig)  # the config has no other here
        train, (test, held_out) = data[0], split_held_out(config, resolved, *data)
        assert held_out is not None  # the config has a number of them
        count = audit.num_canaries or len(held_out)
        if audit.num_guesses is not None and audit.num_guesses > count:
            raise InputError(
                f"Expected audit.num_guesses={audit.num_guesses} to be at most {count}, the number of "
                "canaries."
            )
        canaries = Dataset(*canaries_for(audit.canary, held_out, seed, count), train.num_classes)
        present = coins(count, seed)
        build = model_for(config.model, train)
        weights = first_weights(audit.initialization, build, held_out, seed)
        seeds = resolved.training_seeds
        model = initialize(build, seeds.initialization) if weights is None else with_weights(build, weights)
        before = np.zeros(count) if weights is None else _scores(model, canaries, audit.score)
        training = Training(
            model,
            _with(train, canaries, present),
            settings_of(config.training, resolved),
            seeds=seeds,
            device=device_of(config.device),
            mechanism=mechanism_of(config.training, resolved),
            # how many canaries there are must not show in what the sum is divided by
            expected_batch_size=resolved.sample_rate * len(train),
        )
        return cls(config, resolved, training, canaries, present, test, before)

    @cached_property
    def scores(self) -> FloatArray:
        """How sure the final model is of each canary's class."""
        assert isinstance(self.config.audit, OneRunConfig)
        model = self.training.model
        return _scores(model, self.canaries.to(self.training.device), self.config.audit.score) - self.before

    @property
    def guesses(self) -> Guesses:
        """Of the canaries that the scores say most about; how many was decided before."""
        assert isinstance(self.config.audit, OneRunConfig)
        count = self.config.audit.num_guesses or len(self.present)
        return Guesses.from_scores(self.scores, self.present, num_guesses=count)

    def outcome(self, seconds: float) -> dict[str, Any]:
        """Verdict, both bounds, power, accuracy and timing."""
        started = time.monotonic()
        settings, audit = self.training.settings, self.config.audit
        judge = GuessJudge(
            noise_multiplier=self.resolved.noise_multiplier,
            curve=SubsampledGaussian(settings.sample_rate, settings.num_steps),
            delta=self.config.training.delta,
            confidence=audit.confidence,
        )
        count = int(self.present.sum())
        return {
            "schema_version": SCHEMA_VERSION,
            **judge.values(self.guesses),
            "shapes": {"with_canary": [count], "without_canary": [len(self.present) - count]},
            "mode": audit.mode,
            "threat_model": self.config.threat_model,
            "noise_multiplier": self.resolved.noise_multiplier,
            "sample_rate": settings.sample_rate,
            "num_steps": settings.num_steps,
            "num_done": self.training.num_done,
            "stopped_early": False,
            "num_parameters": self.training.num_parameters,
            "num_canaries": len(self.present),
            "accuracy": accuracy(self.training.model, self.test.to(self.training.device)),
            "timing": {
                "training_seconds": round(seconds, 3),
                "steps_per_second": round(self.training.num_done / max(seconds, 1e-9), 3),
                "audit_seconds": round(time.monotonic() - started, 3),
            },
        }


def _with(train: Dataset, canaries: Dataset, present: BoolArray) -> Dataset:
    """The data with the canaries that are present behind the last example."""
    own, there = train.at(torch.arange(len(train))), canaries.at(torch.from_numpy(np.flatnonzero(present)))
    inputs, targets = (torch.cat([one, other.to(one)]) for one, other in zip(own, there, strict=True))
    return Dataset(inputs, targets, train.num_classes)


def _scores(model: nn.Module, canaries: Dataset, score: str | None) -> FloatArray:
    inputs, targets = canaries.at(torch.arange(len(canaries)))
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        logits = model(inputs).cpu()
    model.train(was_training)
    return _each(logits, targets.cpu(), score or "log-odds")


def _each(logits: Tensor, targets: Tensor, score: str) -> FloatArray:
    """The score of every row for its own class; a model that has diverged gets the smallest there is."""
    found = [_SCORES[score](row[None], int(target))[0] for row, target in zip(logits, targets, strict=True)]
    values: FloatArray = torch.stack(found).double().nan_to_num(nan=torch.finfo(torch.float32).min).numpy()
    return values
