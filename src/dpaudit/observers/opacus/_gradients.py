"""Gradient canaries: rows that join the optimizer's own clipping and sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit.canaries import Draws
from dpaudit.observers.opacus._aim import Aim, Aims
from dpaudit.observers.opacus._clips import Clip
from dpaudit.observers.opacus._look import Canaries, Look
from dpaudit.stats._types import IntArray

__all__ = ["GradientCanaries"]

_AT_ONCE = 2**24  # numbers of canaries' gradients that are in memory together


class GradientCanaries(Canaries):
    """Orthogonal directions of a length that is known."""

    def __init__(self, optimizer: DPOptimizer, draws: Draws, clip: Clip) -> None:
        self._draws, self._clip = draws, clip
        self._aims = Aims(optimizer, draws)
        self.num_canaries = draws.num_canaries

    def join(self, index: int, numbers: IntArray, *, inserts: bool) -> Look:
        aim = self._aims.at(index)
        length = self._draws.canary.scale * aim.reach
        if inserts:
            for some in _chunks(numbers, aim):
                self._clip.add(aim.vectors.rows(some, length))
        return aim


def _chunks(numbers: IntArray, aim: Aim) -> Iterator[Tensor]:
    """The numbers of the canaries that join, as many at once as fit."""
    all_of_them = torch.as_tensor(numbers, device=aim.vectors.values.device)
    most = max(1, _AT_ONCE // aim.vectors.num_parameters)
    return (all_of_them[start : start + most] for start in range(0, len(numbers), most))
