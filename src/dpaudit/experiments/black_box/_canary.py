"""Canaries of black-box audits and the initial weights of the models.

All models of a run share one :class:`SharedCanary`, which is stored in ``canary.json`` and sent to every
process. ``canaries_for`` creates many different canaries for a single training run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit import _io
from dpaudit._io import open_file, read_array, reading
from dpaudit._provenance import spawn_seed
from dpaudit._torch._crafting import Crafting
from dpaudit._types import BoolArray
from dpaudit.canaries import Blank, Mislabelled
from dpaudit.errors import InputError
from dpaudit.experiments._directory import require_checksum, with_checksum
from dpaudit.experiments.config._schema import ClipBkdConfig, ExampleConfig, GivenConfig, PretrainedConfig
from dpaudit.training import initialize
from dpaudit.training.data import Dataset, HeldOutData, as_inputs
from dpaudit.training.ensemble import Example, clip_bkd, pretrained_weights, with_weights
from dpaudit.training.gradients import cross_entropy

Build = Callable[[], nn.Module]

_CANARY, _WEIGHTS, _COINS = 1, 2, 3  # branches of the audit's seed
_EXAMPLES = {"blank": Blank, "mislabelled": Mislabelled}


@dataclass(frozen=True, eq=False)
class SharedCanary:
    """Canary, and the initial weights if all models share them.

    Both are computed only once: another machine, another number of threads or a changed file would yield
    other values, if only in the last digits.
    """

    canary: Example
    weights: Tensor | None

    @property
    def digest(self) -> str:
        """Hash of its values."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "inputs": _packed(self.canary.inputs),
            "target": self.canary.target,
            "weights": None if self.weights is None else _packed(self.weights),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SharedCanary:
        """Return the object that :meth:`to_dict` serialized."""
        weights = values["weights"]
        canary = Example(_unpacked(values["inputs"]), values["target"])
        return cls(canary, None if weights is None else _unpacked(weights))

    def write(self, folder: Path, run: str) -> None:
        """Write the file to the directory of the run with this digest."""
        values = with_checksum({**self.to_dict(), "run": run})
        _io.write_text(folder / "canary.json", json.dumps(values, allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: Path, run: str) -> SharedCanary | None:
        """Return the shared canary of the run with this digest; None if the run has not started."""
        path = folder / "canary.json"
        if not path.exists():
            return None
        try:
            with reading(path), open_file(path) as file:
                values = require_checksum(path, json.load(file), "delete it to compute it again")
            canary = cls.from_dict(values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError) and str(path) in str(error):
                raise
            raise InputError(f"{path} does not contain the canary of the run: {error}.") from error
        if values.get("run") != run:  # nothing else shows this before a trial
            raise InputError(
                f"{path} is the canary of another run; restore it or delete it to compute it again."
            )
        return canary


def as_data(held_out: HeldOutData) -> Dataset:
    """Return the held-out examples as training data."""
    return Dataset(held_out.inputs, held_out.targets, held_out.num_classes)


def first_weights(config: object, build: Build, held_out: HeldOutData, seed: int) -> Tensor | None:
    """Return the initial weights shared by all models; None if each has its own."""
    if not isinstance(config, PretrainedConfig):
        return None
    return pretrained_weights(
        build,
        as_data(held_out),
        num_steps=config.num_steps,
        batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        seed=spawn_seed(seed, _WEIGHTS),
    )


def first_model(build: Build, weights: Tensor | None, seed: int | None) -> nn.Module:
    """Return a model with these weights, or with random ones if ``weights`` is None."""
    return initialize(build, seed) if weights is None else with_weights(build, weights)


def canary_for(
    config: object, held_out: HeldOutData, seed: int, build: Build | None, weights: Tensor | None
) -> Example:
    """Return the example to insert; ``build`` returns the model, if any, which gets these ``weights``."""
    if isinstance(config, GivenConfig):
        return _given(config, held_out)
    if isinstance(config, ClipBkdConfig):
        assert build is not None  # ensured by the config
        return clip_bkd(as_data(held_out), first_model(build, weights, spawn_seed(seed, _WEIGHTS)))
    assert isinstance(config, ExampleConfig)  # ensured by the config
    inputs, targets = canaries_for(config, held_out, seed, 1)
    return Example(inputs[0], int(targets[0]))


def canaries_for(
    config: ExampleConfig | GivenConfig, held_out: HeldOutData, seed: int, count: int
) -> tuple[Tensor, Tensor]:
    """Return ``count`` canaries, each made from a different held-out example."""
    if count > len(held_out):
        raise InputError(
            f"audit.num_canaries must be at most {len(held_out)}, the number of held-out examples, got "
            f"{count}."
        )
    rng = np.random.default_rng(spawn_seed(seed, _CANARY))
    if isinstance(config, GivenConfig):
        indices = torch.from_numpy(rng.choice(len(held_out), count, replace=False))
        return held_out.inputs[indices], held_out.targets[indices]
    craft = Crafting(model=nn.Identity(), loss=cross_entropy, data=held_out, max_grad_norm=1.0)
    crafted = craft(_EXAMPLES[config.kind](), count, rng)
    return crafted.inputs, crafted.targets


def sample_membership(count: int, seed: int) -> BoolArray:
    """Return which canaries are in the data, each with probability 1/2."""
    return np.random.default_rng(spawn_seed(seed, _COINS)).random(count) < 0.5


def _given(config: GivenConfig, held_out: HeldOutData) -> Example:
    if config.file is not None:
        assert config.target is not None  # ensured by the config
        return _checked(Example(_read(config.file), config.target), held_out)
    assert config.index is not None  # ensured by the config
    if config.index >= len(held_out):
        raise InputError(
            f"audit.canary.index must be below {len(held_out)}, the number of held-out examples, got "
            f"{config.index}."
        )
    target = int(held_out.targets[config.index])
    example = Example(held_out.inputs[config.index], target if config.target is None else config.target)
    return _checked(example, held_out)


def _checked(example: Example, held_out: HeldOutData) -> Example:
    shape = tuple(held_out.inputs.shape[1:])
    if tuple(example.inputs.shape) != shape:
        raise InputError(f"The canary must have shape {shape}, got {tuple(example.inputs.shape)}.")
    if example.target >= held_out.num_classes:
        raise InputError(
            f"audit.canary.target must be below {held_out.num_classes}, the number of classes, got "
            f"{example.target}."
        )
    return example


def _read(name: str) -> Tensor:
    array = read_array(_io.expanded(name), "buif")
    if array is None:
        raise InputError(f"audit.canary.file={name!r} does not exist.")
    return as_inputs(torch.from_numpy(array if array.dtype == np.uint8 else array.astype(np.float32)))


def _packed(values: Tensor) -> dict[str, Any]:
    array = values.detach().cpu().contiguous().numpy().astype("<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}


def _unpacked(values: Mapping[str, Any]) -> Tensor:
    raw = base64.b64decode(values["float32"], validate=True)
    return torch.from_numpy(np.frombuffer(raw, dtype="<f4").astype(np.float32).reshape(values["shape"]))
