"""One process, or several that share a step."""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed

__all__ = ["OneProcess", "Processes", "SamplingProcesses", "ranks_of"]


class OneProcess:
    """The usual case: nothing to exchange."""

    world_size = 1
    inserts = True

    def agreed(self, seed: int) -> int:
        """The same seed on all processes."""
        return seed

    def total(self, local: Tensor) -> Tensor:
        """The sum over all processes."""
        return local

    def inserted(self, local: Tensor) -> Tensor:
        """The vector that the canaries of all processes add up to, on all of them."""
        return local


class Processes(OneProcess):
    """Canaries go into the sum of the last process: from there only the reduction takes them to the noise."""

    def __init__(self) -> None:
        self.world_size = distributed.get_world_size()
        self._last = self.world_size - 1
        self.inserts = distributed.get_rank() == self._last

    def agreed(self, seed: int) -> int:
        seeds: list[Any] = [seed]
        distributed.broadcast_object_list(seeds, src=0)
        return int(seeds[0])

    def total(self, local: Tensor) -> Tensor:
        summed = local.clone()
        distributed.all_reduce(summed)
        return summed

    def inserted(self, local: Tensor) -> Tensor:
        shared = local if self.inserts else torch.empty_like(local)
        distributed.broadcast(shared, src=self._last)
        return shared


class SamplingProcesses(Processes):
    """Canaries go into the sum of the process whose sampler drew them."""

    def __init__(self) -> None:
        super().__init__()
        self.inserts = True

    def inserted(self, local: Tensor) -> Tensor:
        return self.total(local)


def ranks_of(optimizer: DPOptimizer, sampling: bool) -> OneProcess:
    """Whether the optimizer adds up the gradients of several processes, and who of them has canaries."""
    if not hasattr(optimizer, "reduce_gradients"):
        return OneProcess()
    return SamplingProcesses() if sampling else Processes()
