"""One example: the canary of a black-box audit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.training.data import Dataset

__all__ = ["Example", "joined"]


@dataclass(frozen=True, eq=False)
class Example:
    """An input, as the data have it, and its class."""

    inputs: Tensor
    target: int

    def __post_init__(self) -> None:
        _validate.whole("target", self.target, low=0)


def joined(data: Dataset, example: Example) -> Dataset:
    """The data as a model takes them, with the example behind the last one."""
    if tuple(example.inputs.shape) != data.shape:
        raise InputError(f"Expected a canary of shape {data.shape}, got {tuple(example.inputs.shape)}.")
    target = torch.tensor([example.target]).to(data.targets)
    alone = replace(data, inputs=example.inputs[None].to(data.inputs.device), targets=target)
    inputs = [part.at(torch.arange(len(part)))[0] for part in (data, alone)]
    return replace(data, inputs=torch.cat(inputs), targets=torch.cat([data.targets, target]))
