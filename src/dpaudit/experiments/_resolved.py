"""What a config leaves open, decided once for a run and kept with it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpaudit.accounting import noise_for_epsilon
from dpaudit.errors import InputError
from dpaudit.experiments.config import Config, TrainingConfig
from dpaudit.training import Seeds

__all__ = ["Resolved", "resolve"]

_AUDIT = 1  # the audit's own branch of the seed


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The numbers that the run really has."""

    noise_multiplier: float
    sample_rate: float
    num_examples: int
    seed: int

    @property
    def training_seeds(self) -> Seeds:
        """The seeds of the training."""
        return Seeds.of(self.seed)

    @property
    def audit_seed(self) -> int:
        """The seed of canaries and coins; another one, because the training must not know them."""
        words = np.random.SeedSequence(self.seed, spawn_key=(_AUDIT,)).generate_state(4, np.uint32)
        return int.from_bytes(words.tobytes(), "little")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "seeds": {**asdict(self.training_seeds), "audit": self.audit_seed}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Resolved:
        """The same again."""
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


def resolve(config: Config, num_examples: int) -> Resolved:
    """Calibrate the noise and draw the seed, where the config does not give them."""
    training = config.training
    rate = _sample_rate(training, num_examples)
    return Resolved(
        noise_multiplier=_noise_multiplier(training, rate),
        sample_rate=rate,
        num_examples=num_examples,
        seed=secrets.randbits(128) if config.seed is None else config.seed,
    )


def _sample_rate(training: TrainingConfig, num_examples: int) -> float:
    if training.batch_size is None:
        assert training.sample_rate is not None  # the config has exactly one of them
        return training.sample_rate
    if training.batch_size > num_examples:
        raise InputError(
            f"Expected training.batch_size={training.batch_size:g} to be at most {num_examples}, the number "
            "of examples."
        )
    return training.batch_size / num_examples


def _noise_multiplier(training: TrainingConfig, sample_rate: float) -> float:
    if training.target_epsilon is None:
        assert training.noise_multiplier is not None  # the config has exactly one of them
        return training.noise_multiplier
    return noise_for_epsilon(
        training.target_epsilon,
        sample_rate=sample_rate,
        num_steps=training.num_steps,
        delta=training.delta,
    )
