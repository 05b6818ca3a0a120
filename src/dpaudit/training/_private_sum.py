"""The subsampled Gaussian mechanism of a DP-SGD step: sample, clip, sum, add noise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dpaudit import _validate
from dpaudit.training._settings import DPSGD
from dpaudit.training.gradients import Rows, add_clipped


class PrivateSum(Protocol):
    """Private sum; to test an audit, pass a broken one to ``Training``."""

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        """Clip each gradient and add it to ``out``; return the norms before clipping."""
        ...

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:
        """Return the sum to which noise is added: ``total`` itself if every gradient was clipped."""
        ...

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        """Return the noise of one step."""
        ...


@dataclass(frozen=True, kw_only=True)
class GaussianSum:
    """Sum of gradients clipped to ``max_grad_norm``, plus Gaussian noise.

    The standard deviation of the noise is ``noise_multiplier * max_grad_norm``.
    """

    noise_multiplier: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        _validate.at_least("noise_multiplier", self.noise_multiplier, 0.0)
        _validate.positive("max_grad_norm", self.max_grad_norm)

    @staticmethod
    def of(settings: DPSGD) -> GaussianSum:
        """Return the mechanism that the settings describe."""
        return GaussianSum(noise_multiplier=settings.noise_multiplier, max_grad_norm=settings.max_grad_norm)

    def add(self, rows: Iterable[Rows], out: Tensor) -> Tensor:
        return add_clipped(rows, self.max_grad_norm, out)

    def finish(self, total: Tensor, num_gradients: int) -> Tensor:  # noqa: ARG002
        return total

    def noise(self, like: Tensor, generator: torch.Generator) -> Tensor:
        drawn = torch.empty_like(like).normal_(generator=generator)
        return drawn.mul_(self.noise_multiplier * self.max_grad_norm)


class Sampler(Protocol):
    """Sampling scheme that selects the examples of a step."""

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        """Return the indices of the sampled examples; there may be none."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """Sampling scheme with state that belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``."""
        ...


@dataclass(frozen=True)
class PoissonSampling:
    """Poisson subsampling: each example is drawn independently with probability ``sample_rate``.

    This is the sampling that privacy accounting assumes.
    """

    sample_rate: float

    def __post_init__(self) -> None:
        _validate.sample_rate(self.sample_rate)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:
        # 53 random bits per coin: the 24 bits of single precision would round a small rate
        coins = torch.rand(num_examples, generator=generator, dtype=torch.float64)
        return (coins < self.sample_rate).nonzero().view(-1)
