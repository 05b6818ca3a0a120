"""The mechanism of a step, for many models at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpaudit.training._mechanism import GaussianSum, Mechanism
from dpaudit.training.ensemble._stack import StackedRows

__all__ = ["private_sum"]


def private_sum(
    mechanism: Mechanism,
    rows: StackedRows,
    sizes: Tensor,
    generators: Sequence[torch.Generator],
    out: Tensor,
) -> Tensor:
    """Fill ``out`` with every model's noisy sum, each with noise of its own generator."""
    kind = type(mechanism)
    if kind.finish is GaussianSum.finish:  # a sum that only adds up may begin with its noise
        _fill_with_noise(mechanism, generators, out)
        mechanism.add([rows], out)
        return out
    mechanism.add([rows], out.zero_())
    for total, size, generator in zip(out, sizes.tolist(), generators, strict=True):
        finished = mechanism.finish(total, size)
        total.copy_(finished + mechanism.noise(finished, generator))
    return out


def _fill_with_noise(mechanism: Mechanism, generators: Sequence[torch.Generator], out: Tensor) -> None:
    if isinstance(mechanism, GaussianSum) and type(mechanism).noise is GaussianSum.noise:
        scale = mechanism.noise_multiplier * mechanism.max_grad_norm
        for row, generator in zip(out, generators, strict=True):  # in place, which saves a pass over memory
            row.normal_(std=scale, generator=generator)
        return
    for row, generator in zip(out, generators, strict=True):
        row.copy_(mechanism.noise(row, generator))
