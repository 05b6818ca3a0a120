"""Many canaries in the data of one training, and one look at its final model."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit.accounting import SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.experiments._build import device_of, mechanism_of, settings_of
from dpaudit.experiments._directory import SCHEMA_VERSION
from dpaudit.experiments._held_out import split_held_out
from dpaudit.experiments._models import model_for
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.black_box._canary import canaries_for, coins, first_weights
from dpaudit.experiments.black_box._guessing import GuessJudge
from dpaudit.experiments.config import Config, ExampleConfig, GivenConfig, OneRunConfig
from dpaudit.stats import Guesses
from dpaudit.stats._types import BoolArray, FloatArray
from dpaudit.training import Training, accuracy, initialize
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble import log_odds, negative_loss, with_weights

__all__ = ["FinalModel"]

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
