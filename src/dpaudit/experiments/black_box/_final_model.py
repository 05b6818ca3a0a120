"""Black-box audit of one training run: the membership of many canaries is guessed from the final model.

:class:`FinalModel` trains and scores; :class:`OneRunAnalysis` computes bounds, verdict and power.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from dpaudit._types import BoolArray, FloatArray
from dpaudit.accounting import Claim, SubsampledGaussian
from dpaudit.errors import InputError
from dpaudit.experiments._build import device_of, mechanism_of, model_for, settings_of, split_held_out
from dpaudit.experiments._resolved import Resolved
from dpaudit.experiments.black_box._canary import canaries_for, first_model, first_weights, sample_membership
from dpaudit.experiments.config import Config, ExampleConfig, GivenConfig, OneRunConfig
from dpaudit.stats import (
    GuessDesign,
    Guesses,
    Power,
    Verdict,
    guessed_p_value,
    one_run_bound,
    one_run_fdp_bound,
    plain,
    unrefuted,
)
from dpaudit.training import Training
from dpaudit.training.data import Dataset
from dpaudit.training.ensemble import Score, log_odds, negative_loss

_PROBABILITY = 0.8  # probability of detection at which the power is stated
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
                f"Expected audit.num_guesses={audit.num_guesses} to be at most {count}, the number of "
                "canaries."
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
            _with_canaries(train, canaries, present),
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
    def guesses(self) -> Guesses:
        """Guesses for the canaries with the most extreme scores; their number is fixed in advance."""
        assert isinstance(self.config.audit, OneRunConfig)
        count = self.config.audit.num_guesses or len(self.present)
        return Guesses.from_scores(self.scores, self.present, num_guesses=count)

    @property
    def num_canaries(self) -> int:
        """The number of canaries, present or absent."""
        return len(self.present)

    def values(self) -> dict[str, Any]:
        """Return the verdict, both bounds and the power."""
        settings, count = self.training.settings, int(self.present.sum())
        analysis = OneRunAnalysis(
            noise_multiplier=self.resolved.noise_multiplier,
            curve=SubsampledGaussian(settings.sample_rate, settings.num_steps),
            delta=self.config.training.delta,
            confidence=self.config.audit.confidence,
        )
        shapes = {"with_canary": [count], "without_canary": [self.num_canaries - count]}
        return {**analysis.values(self.guesses), "shapes": shapes}


def _with_canaries(train: Dataset, canaries: Dataset, present: BoolArray) -> Dataset:
    """Return the data followed by the present canaries."""
    own, added = train.at(torch.arange(len(train))), canaries.at(torch.from_numpy(np.flatnonzero(present)))
    inputs, targets = (torch.cat([one, other.to(one)]) for one, other in zip(own, added, strict=True))
    return Dataset(inputs, targets, train.num_classes)


def _scores(model: nn.Module, canaries: Dataset, score: str | None) -> FloatArray:
    """Return each canary's score for its own class; a diverged model gets the smallest float."""
    inputs, targets = canaries.at(torch.arange(len(canaries)))
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        logits = model(inputs).cpu()
    model.train(was_training)
    score_one = SCORES[score or "log-odds"]
    found = [score_one(row[None], int(target))[0] for row, target in zip(logits, targets.cpu(), strict=True)]
    values: FloatArray = torch.stack(found).double().nan_to_num(nan=torch.finfo(torch.float32).min).numpy()
    return values


@dataclass(frozen=True, kw_only=True)
class OneRunAnalysis:
    """Two bounds that are valid for canaries in the same training run, and a verdict based on the second.

    The first makes no assumption about the mechanism (Steinke et al. 2023); the second assumes the trade-off
    curve of the claimed training (Mahloujifar et al. 2024).
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
        """Return the result as plain values."""
        universal = one_run_bound(guesses, delta=self.delta, confidence=self.confidence)
        bound = one_run_fdp_bound(guesses, tradeoff=self.curve, delta=self.delta, confidence=self.confidence)
        claim, power = self._claim, self._power(guesses)
        refutes = bound.parameter > self._claimed
        verdict = Verdict.VIOLATION if refutes else unrefuted(power, claim.epsilon, self._claimed)
        rows = {"f-DP(one-run)": bound, "(eps,delta)(one-run)": universal}
        return {
            "verdict": verdict.name,
            "sentence": verdict.value,
            "p_value": guessed_p_value(guesses, self.curve, self._claimed),
            "claim": {
                "summary": claim.summary,
                "epsilon": plain(claim.epsilon),
                "delta": self.delta,
                "parameter": self._claimed,
            },
            "bound": bound.to_dict(),
            "power": power.to_dict(),
            **(
                {} if refutes else {"attack_power": self._power(guesses, self._efficiency(guesses)).to_dict()}
            ),
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

    def _power(self, guesses: Guesses, efficiency: float | None = None) -> Power:
        """Return the power of guesses by log-likelihood ratios, or by a share of their signal."""
        design = self._design(guesses)
        if efficiency is not None:
            design = design.weakened(efficiency)
        leak = design.smallest_leak(self._claimed, _PROBABILITY)
        hypothesis, is_ideal = self._claim.hypothesis(self.curve), efficiency is None
        return Power.of(leak, hypothesis, _PROBABILITY, is_ideal=is_ideal, efficiency=efficiency)

    def _design(self, guesses: Guesses) -> GuessDesign:
        return GuessDesign(guesses, self.curve, self.delta, 1 - self.confidence)

    def _efficiency(self, guesses: Guesses) -> float:
        """Return the share of the signal of log-likelihood ratios that the guesses show."""
        return self._design(guesses).efficiency(self._claimed)
