"""What all trainings of a run share, made once, kept with the run and handed to every process."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpaudit import _files
from dpaudit._foreign import open_file
from dpaudit.errors import InputError
from dpaudit.training.ensemble import Example

__all__ = ["Made"]

_NAME = "canary.json"


@dataclass(frozen=True, eq=False)
class Made:
    """The canary, and the first weights if all models have the same.

    Another machine, another number of threads or a file that has changed would make others, if only in the
    last digits: so nobody makes them a second time.
    """

    canary: Example
    weights: Tensor | None

    @property
    def digest(self) -> str:
        """What tells it from others."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "inputs": _packed(self.canary.inputs),
            "target": self.canary.target,
            "weights": None if self.weights is None else _packed(self.weights),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Made:
        """The same again."""
        weights = values["weights"]
        canary = Example(_unpacked(values["inputs"]), values["target"])
        return cls(canary, None if weights is None else _unpacked(weights))

    def write(self, folder: Path) -> None:
        """Keep it with the run."""
        _files.write_text(folder / _NAME, json.dumps(self.to_dict(), allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Made | None:
        """What a run has; None if it has not begun."""
        path = folder / _NAME
        if not path.exists():
            return None
        try:
            with open_file(path) as file:
                return cls.from_dict(json.load(file))
        except (OSError, ValueError, KeyError, TypeError, InputError) as error:
            raise InputError(
                f"Expected the canary of the run in {path}, but it cannot be read: {error}."
            ) from error


def _packed(values: Tensor) -> dict[str, Any]:
    array = values.detach().cpu().contiguous().numpy().astype("<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}


def _unpacked(values: Mapping[str, Any]) -> Tensor:
    raw = base64.b64decode(values["float32"], validate=True)
    return torch.from_numpy(np.frombuffer(raw, dtype="<f4").astype(np.float32).reshape(values["shape"]))
