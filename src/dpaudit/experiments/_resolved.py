"""Values that a config may leave open (noise, sample rate, seed), resolved once and stored with the run."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dpaudit._provenance import digest, seed_digest, spawn_seed
from dpaudit.accounting import noise_for_epsilon
from dpaudit.errors import InputError
from dpaudit.experiments.config import Config
from dpaudit.experiments.config._schema import FunctionModel, TrainingConfig
from dpaudit.experiments.trials._trial_plan import source_digest
from dpaudit.training import Seeds
from dpaudit.training.data import Dataset


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Noise, sample rate and seed of a run, and hashes of its data and code."""

    noise_multiplier: float
    sample_rate: float
    num_examples: int
    data_digest: str
    code_digest: str
    """Hash of the user's training function; empty if there is none."""
    seed: int

    @property
    def training_seeds(self) -> Seeds:
        """The seeds of the training run."""
        return Seeds.of(self.seed)

    @property
    def audit_seed(self) -> int:
        """The seed of canaries and their membership, which must be independent of the training run."""
        return spawn_seed(self.seed, 1)  # branch 2 is that of trials

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "seeds": {**asdict(self.training_seeds), "audit": self.audit_seed}}

    def digests(self, config: Config) -> dict[str, Any]:
        """Return digests of what the numbers depend on; seeds are never stored outside private files."""
        values = {key: value for key, value in config.identity().items() if key != "seed"}
        seeds = {"run": self.seed, **asdict(self.training_seeds), "audit": self.audit_seed}
        return {
            "data": self.data_digest,
            "configuration": digest(values),
            **({"code": self.code_digest} if self.code_digest else {}),
            "seeds": {name: seed_digest(name, seed) for name, seed in seeds.items()},
        }

    def run_digest(self, config: Config) -> str:
        """Return the digest by which files know their run: of the config, the data and the seeds."""
        return digest([config.identity(), self.to_dict()])

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any], source: str = "the config.json of the run") -> Resolved:
        """Return the object that :meth:`to_dict` serialized; errors name ``source``."""
        missing = [name for name in cls.__dataclass_fields__ if name not in stored]
        if missing:
            raise InputError(
                f"Expected {', '.join(missing)} in {source}, got none: the run was started by another "
                "version of dpaudit; choose another output directory."
            )
        return cls(**{name: stored[name] for name in cls.__dataclass_fields__})


def resolve(config: Config, data: Dataset) -> Resolved:
    """Calibrate the noise and draw the seed if the config does not specify them."""
    training, num_examples = config.training, len(data)
    rate = _sample_rate(training, num_examples)
    return Resolved(
        noise_multiplier=_noise_multiplier(training, rate),
        sample_rate=rate,
        num_examples=num_examples,
        data_digest=_digest(data),
        code_digest=_code_digest(config),
        seed=secrets.randbits(128) if config.seed is None else config.seed,
    )


def require_same_data(resolved: Resolved, data: Dataset) -> None:
    """Raise if the examples have changed: the claim and the checkpoint refer to the original ones."""
    if _digest(data) != resolved.data_digest:
        raise InputError(
            f"Expected the {resolved.num_examples} training examples that the run started with, got "
            f"{len(data)} different ones: the data files have changed; restore them or choose another output "
            "directory."
        )


def require_same_code(resolved: Resolved, config: Config) -> None:
    """Raise if the training function has changed: the scores of two versions must not be mixed."""
    if isinstance(config.model, FunctionModel) and _code_digest(config) != resolved.code_digest:
        raise InputError(
            f"Expected model.function={config.model.function!r} to be unchanged since the run started, but "
            "its file has changed; restore it or choose another output directory."
        )


def _code_digest(config: Config) -> str:
    return source_digest(config.model.function) if isinstance(config.model, FunctionModel) else ""


def _digest(data: Dataset) -> str:
    """Return a hash of the examples."""
    hasher = hashlib.sha256()
    for tensor in (data.inputs, data.targets):
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.contiguous().numpy().data)
    return hasher.hexdigest()


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
    try:
        return noise_for_epsilon(
            training.target_epsilon,
            sample_rate=sample_rate,
            num_steps=training.num_steps,
            delta=training.delta,
        )
    except InputError as error:
        raise InputError(f"No noise was found for training.target_epsilon: {error}") from error
