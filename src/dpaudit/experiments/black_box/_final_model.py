"""Black-box audit of one training run: the membership of many canaries is guessed from the final model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import nn

from dpaudit._types import BoolArray, FloatArray
from dpaudit.errors import InputError
from dpaudit.experiments._build import (
    Resolved,
    device_of,
    mechanism_of,
    model_for,
    settings_of,
    split_held_out,
)
from dpaudit.experiments.black_box._canary import canaries_for, first_model, first_weights, sample_membership
from dpaudit.experiments.config import Config
from dpaudit.experiments.config._schema import ExampleConfig, GivenConfig, OneRunConfig
from dpaudit.training import Training
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble import Score, log_odds, negative_loss

SCORES: Mapping[str, Score] = {"log-odds": log_odds, "loss": negative_loss}


@dataclass(frozen=True, eq=False)
class FinalModel:
    """Training run whose data contain each canary with probability 1/2."""

    config: Config
    resolved: Resolved
    training: Training
    canaries: Dataset
    present: BoolArray
    test: Dataset
    before: FloatArray
    """The scores at the initial weights if these are public; zeros otherwise."""
    live: ClassVar[None] = None  # there is no bound before the last step

    @classmethod
    def of(cls, config: Config, resolved: Resolved, data: tuple[Dataset, Dataset]) -> FinalModel:
        """Return the training run that a config describes, before its first step."""
        audit, seed = config.audit, resolved.audit_seed
        assert isinstance(audit, OneRunConfig)
        assert isinstance(audit.canary, ExampleConfig | GivenConfig)  # ensured by the config
        train, (test, held_out) = data[0], split_held_out(config, resolved, *data)
        assert held_out is not None  # ensured by the config
        count = audit.num_canaries or len(held_out)
        if audit.num_guesses is not None and audit.num_guesses > count:
            raise InputError(
                f"audit.num_guesses must be at most {count}, the number of canaries, got {audit.num_guesses}."
            )
        canaries = Dataset(*canaries_for(audit.canary, held_out, seed, count), train.num_classes)
        present = sample_membership(count, seed)
        build = model_for(config.model, train)
        weights = first_weights(audit.initialization, build, held_out, seed)
        seeds = resolved.training_seeds
        model = first_model(build, weights, seeds.initialization)
        before = np.zeros(count) if weights is None else _scores(model, canaries, audit.score)
        training = Training(
            model,
            train.followed_by(*canaries.at(torch.from_numpy(np.flatnonzero(present)))),
            settings_of(config.training, resolved),
            seeds=seeds,
            device=device_of(config.device),
            mechanism=mechanism_of(config.training, resolved),
            # the divisor of the gradient sum must not reveal the number of canaries
            expected_batch_size=resolved.sample_rate * len(train),
        )
        return cls(config, resolved, training, canaries, present, test, before)

    @cached_property
    def scores(self) -> FloatArray:
        """Confidence of the final model in each canary's class."""
        assert isinstance(self.config.audit, OneRunConfig)
        model = self.training.model
        return _scores(model, self.canaries.to(self.training.device), self.config.audit.score) - self.before

    @property
    def num_canaries(self) -> int:
        """The number of canaries, present or absent."""
        return len(self.present)


def _scores(model: nn.Module, canaries: Dataset, score: str | None) -> FloatArray:
    """Return each canary's score for its own class; a diverged model gets the smallest float."""
    inputs, targets = canaries.at(torch.arange(len(canaries)))
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        logits = model(inputs).cpu()
    model.train(was_training)
    score_one = SCORES[score or "log-odds"]
    scores = [score_one(row[None], int(target))[0] for row, target in zip(logits, targets.cpu(), strict=True)]
    values: FloatArray = torch.stack(scores).double().nan_to_num(nan=torch.finfo(torch.float32).min).numpy()
    return values
