"""Examples that no training sees: what canaries are made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpaudit.errors import InputError

__all__ = ["HeldOutData", "fingerprints", "held_out", "require_fitting"]

_SPLIT = object()  # the mark of what was split off


@dataclass(frozen=True, eq=False)
class HeldOutData:
    """Inputs, ready for a model, and their classes; only splitting a data set makes one.

    Canaries are crafted from this type and from nothing else. So nobody crafts them from a batch by mistake:
    the adversary of the paper knows examples like those of the training, and not the training's own.
    """

    inputs: Tensor
    targets: Tensor
    num_classes: int
    _mark: object = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self._mark is not _SPLIT:
            raise InputError(
                "Expected held-out examples to be split off by hold_out(data, ...), got tensors: canaries "
                "must not be made from what the training sees."
            )

    def __repr__(self) -> str:
        return f"HeldOutData({len(self):,} examples, {self.num_classes} classes)"

    def __len__(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device | str) -> HeldOutData:
        """The same on another device."""
        return replace(self, inputs=self.inputs.to(device), targets=self.targets.to(device))

    def num_among(self, others: set[int]) -> int:
        """How many of the inputs have one of these fingerprints."""
        return sum(one in others for one in fingerprints(self.inputs))

    def apart_from(self, others: set[int]) -> HeldOutData:
        """Those whose inputs have none of these fingerprints."""
        kept = torch.tensor([one not in others for one in fingerprints(self.inputs)])
        if not kept.any():
            raise InputError(
                f"Expected held-out examples that the training does not see, but it sees all {len(self)}."
            )
        places = kept.nonzero().view(-1).to(self.inputs.device)
        return replace(self, inputs=self.inputs[places], targets=self.targets[places])


def held_out(inputs: Tensor, targets: Tensor, num_classes: int) -> HeldOutData:
    """For those who split a data set: the part that its training does not get."""
    return HeldOutData(inputs, targets, num_classes, _SPLIT)


def require_fitting(model: nn.Module, loss: Callable[..., Any], data: HeldOutData) -> None:
    """Let the model and its loss look at one example, so that others than it takes are told at once."""
    target = torch.full_like(data.targets[:1], data.num_classes - 1)
    was_training = model.training
    model.eval()  # nothing is remembered of what is only looked at
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            loss(model(data.inputs[:1]), target)
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        shape, reason = tuple(data.inputs.shape[1:]), str(error).strip().partition("\n")[0]
        raise InputError(
            f"Expected held-out examples that the model and its loss take, but inputs of shape {shape} with "
            f"{data.num_classes} classes raise {type(error).__name__}: {reason}"
        ) from error
    finally:
        model.train(was_training)


def fingerprints(inputs: Tensor) -> list[int]:
    """A number for each input, the same for equal ones; others have the same once in 2**64."""
    rows: Any = np.ascontiguousarray(inputs.detach().cpu().numpy())
    return [hash(row.tobytes()) for row in rows]
