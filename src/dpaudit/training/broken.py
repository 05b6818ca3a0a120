"""Bugs found in real DP-SGD implementations, to be injected into training: an audit must detect them.

Each is a broken ``mechanism`` or ``sampling`` for :class:`dpaudit.training.Training`: first faults in
clipping, then in the noise and in the sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit.training._settings import GaussianSum
from dpaudit.training.gradients import Rows

__all__ = [
    "AveragedNoise",
    "ClippedAfterMean",
    "ConstantSeed",
    "FewSeeds",
    "NoNoiseWhenEmpty",
    "NoiseForTheMean",
    "NoiseTooSmall",
    "Noiseless",
    "RawMeanMixed",
    "SameSeedForLeaves",
    "ShuffledBatches",
    "Silent",
    "Unclipped",
    "UnnoisedCoordinates",
]


def _add_unclipped(_mechanism: GaussianSum, rows: Iterable[Rows], out: Tensor) -> Tensor:
    return _add_weighted(rows, torch.ones_like, out)


def _no_noise(_mechanism: GaussianSum, like: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG001
    return torch.zeros_like(like)


def _add_weighted(rows: Iterable[Rows], weights: Callable[[Tensor], Tensor], out: Tensor) -> Tensor:
    """Add gradients with ``weights`` computed from their norms; return the norms."""
    norms = [out.new_zeros(0)]
    for chunk in rows:
        norms.append(chunk.norms())
        chunk.add_weighted(weights(norms[-1]), out)
    return torch.cat(norms)


@dataclass(frozen=True, kw_only=True)
class Unclipped(GaussianSum):
    """Gradients are summed without clipping."""

    add = _add_unclipped


@dataclass(frozen=True, kw_only=True)
class ClippedAfterMean(GaussianSum):
    """The mean is clipped instead of each gradient (the paper's first violation)."""

    add = _add_unclipped

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:
        mean_norm = float(total.norm()) / max(num_gradients, 1)
        return total if mean_norm <= self.max_grad_norm else total * (self.max_grad_norm / mean_norm)


@dataclass(frozen=True, kw_only=True)
class RawMeanMixed(GaussianSum):
    """The private gradient is added to the raw one, which was not cleared."""

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        return _add_weighted(rows, lambda norms: 1.0 + (self.max_grad_norm / norms).clamp(max=1.0), out)


@dataclass(frozen=True, kw_only=True)
class Silent(GaussianSum):
    """Gradients are neither clipped nor noised: the private step is never called."""

    add = _add_unclipped
    noise = _no_noise


@dataclass(frozen=True, kw_only=True)
class NoiseTooSmall(GaussianSum):
    """The noise has ``factor`` times the claimed standard deviation (the paper's third violation)."""

    factor: float = 0.8

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return super().noise(like, generator).mul_(self.factor)


@dataclass(frozen=True, kw_only=True)
class Noiseless(GaussianSum):
    """Gradients are recomputed after the noise was added, and released without it."""

    noise = _no_noise


@dataclass(frozen=True, kw_only=True)
class NoiseForTheMean(GaussianSum):
    """Noise calibrated to the mean of a batch is added to its sum."""

    batch_size: float

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        return super().noise(like, generator).div_(self.batch_size)


@dataclass(frozen=True, kw_only=True)
class AveragedNoise(GaussianSum):
    """Each of ``num_parts`` accumulation steps adds the noise of a whole step, and they are averaged."""

    num_parts: int = 4

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        drawn = [super(AveragedNoise, self).noise(like, generator) for _ in range(self.num_parts)]
        return torch.stack(drawn).mean(dim=0)


@dataclass(frozen=True, kw_only=True)
class FewSeeds(GaussianSum):
    """The RNG is reseeded in every step with one of ``num_seeds`` seeds (the paper's second violation)."""

    num_seeds: int = 100

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        seed = int(torch.randint(self.num_seeds, (1,), generator=generator, device=generator.device))
        return super().noise(like, torch.Generator(like.device).manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class ConstantSeed(GaussianSum):
    """Every training run draws its noise from an RNG with the same seed, which was meant to be the time.

    The seed is the logarithm of the time in seconds, rounded down: it stays the same for decades.
    """

    time: float = 1.7e9
    _own: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "_own", torch.Generator().manual_seed(math.floor(math.log(self.time))))

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        return super().noise(like, self._own)


@dataclass(frozen=True, kw_only=True)
class SameSeedForLeaves(GaussianSum):
    """Every parameter tensor gets the same key and thus the same noise; ``leaves`` are their sizes."""

    leaves: tuple[int, ...]

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        keys = [torch.Generator(like.device).manual_seed(seed) for _ in self.leaves]
        pieces = like.split_with_sizes(self.leaves)
        return torch.cat(
            [super(SameSeedForLeaves, self).noise(p, k) for p, k in zip(pieces, keys, strict=True)]
        )


@dataclass(frozen=True, kw_only=True)
class UnnoisedCoordinates(GaussianSum):
    """The last ``count`` coordinates are released without noise."""

    count: int

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        drawn = super().noise(like, generator)
        drawn[-self.count :] = 0.0
        return drawn


@dataclass(frozen=True, kw_only=True)
class NoNoiseWhenEmpty(GaussianSum):
    """The release of an empty batch is zero, which reveals that the batch was empty."""

    _num_gradients: int = field(default=0, init=False, repr=False, compare=False)  # in the latest sum

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:
        object.__setattr__(self, "_num_gradients", num_gradients)
        return super().finish(total, num_gradients)

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        drawn = super().noise(like, generator)
        return drawn if self._num_gradients else drawn.zero_()


@dataclass
class ShuffledBatches:
    """Every epoch is shuffled and cut into batches, but accounted for as Poisson sampling.

    The object holds the rest of its epoch, so each training run needs its own.
    """

    sample_rate: float
    _left: list[Tensor] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        _validate.sample_rate(self.sample_rate)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        if not self._left:
            order = torch.randperm(num_examples, generator=generator)
            self._left = list(order.tensor_split(round(1 / self.sample_rate)))
        return self._left.pop().sort().values

    def state_dict(self) -> dict[str, Any]:
        """Return the remaining batches of this epoch."""
        return {"left": list(self._left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the remaining batches."""
        self._left = list(state["left"])
