"""Settings of a training run: its random seeds, DP-SGD parameters, optimizer, sampling and private sum.

Each purpose has a seed and an RNG of its own, so that changing one does not affect the others. Sampling and
:class:`PrivateSum` are the subsampled Gaussian mechanism of a step: sample, clip, sum, add noise.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.training.gradients import Rows, add_clipped

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """Seeds of a training run; None means fresh entropy from the operating system.

    A known seed makes a run reproducible and its noise predictable. To train a model that must be private,
    use ``Seeds()``.
    """

    initialization: int | None = None
    sampling: int | None = None
    noise: int | None = None
    augmentation: int | None = None

    def __post_init__(self) -> None:
        for name in ("initialization", "sampling", "noise", "augmentation"):
            if (value := getattr(self, name)) is not None:
                _validate.integer(name, value, low=0)

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """Derive independent seeds from a single number.

        >>> Seeds.of(1) == Seeds.of(1), Seeds.of(1).noise == Seeds.of(1).sampling
        (True, False)
        """
        _validate.integer("seed", seed, low=0)
        values = [int(value) for value in np.random.SeedSequence(seed).generate_state(4, np.uint64)]
        return cls(initialization=values[0], sampling=values[1], noise=values[2], augmentation=values[3])


def generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new RNG, seeded with ``seed`` or with entropy from the operating system.

    torch's CPU generator uses only 32 bits of a seed: its noise would be one of four billion streams, few
    enough for an exhaustive search. Its whole state is therefore filled here.
    """
    entropy = secrets.randbits(256) if seed is None else _validate.integer("seed", seed, low=0)
    sequence = np.random.SeedSequence(entropy)
    rng = torch.Generator(device)
    rng.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
    if rng.device.type == "cpu":
        num_words = 624  # state of the Mersenne Twister
        start = 24  # bytes before the words in torch's state: seed, words left, flag, next
        state, words = rng.get_state(), sequence.generate_state(num_words, np.uint32).astype(np.uint64)
        state[start : start + 8 * num_words] = torch.from_numpy(words.view(np.uint8).copy())
        rng.set_state(state)
    return rng


def generators(seeds: Seeds, device: torch.device | str = "cpu") -> dict[str, torch.Generator]:
    """Return the RNGs of a training run."""
    return {
        "sampling": generator(seeds.sampling),
        "noise": generator(seeds.noise, device),
        "augmentation": generator(seeds.augmentation),
    }


def initialize(build: Callable[[], Model], seed: int | None) -> Model:
    """Return a model whose initial weights come from a seed; torch's global RNG is not changed.

    Args:
        build: A function that creates the model.
        seed: The seed, or None for fresh entropy.

    Returns:
        The model.

    Example:
        ``initialize(lambda: mlp(64, 32, 10), Seeds.of(1).initialization)``

    """
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed).get_state())
        return build()


@dataclass(frozen=True, kw_only=True)
class DPSGD:
    """DP-SGD parameters, from which a privacy claim is derived, and the optimizer.

    The gradients of ``multiplicity`` augmentations of an example are averaged before clipping.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    num_steps: int
    optimizer: Optimizer
    multiplicity: int = 1
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        _validate.at_least("noise_multiplier", self.noise_multiplier, 0.0)
        _validate.positive("max_grad_norm", self.max_grad_norm)
        _validate.sample_rate(self.sample_rate)
        _validate.integer("num_steps", self.num_steps)
        if _validate.integer("multiplicity", self.multiplicity) > 1 and self.augmentation is None:
            raise InputError(
                f"multiplicity={self.multiplicity} needs an augmentation: identical copies of an input have "
                "no effect."
            )


class Optimizer(Protocol):
    """Optimizer settings; ``build`` returns the torch optimizer."""

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the torch optimizer for these parameters."""
        ...


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent, optionally with momentum."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate.positive("learning_rate", self.learning_rate)
        _validate.at_least("momentum", self.momentum, 0.0)
        _validate.at_least("weight_decay", self.weight_decay, 0.0)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr=self.learning_rate, momentum=self.momentum, weight_decay=self.weight_decay
        )


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam optimizer (Kingma and Ba 2015, arXiv:1412.6980)."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _validate.positive("learning_rate", self.learning_rate)
        for beta in self.betas:
            _validate.fraction("betas", beta)
        _validate.at_least("weight_decay", self.weight_decay, 0.0)

    def build(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            parameters, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay
        )


class Augmentation(Protocol):
    """Random transformation, drawn independently for every input of a batch."""

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return the transformed inputs; row i depends only on input i."""
        ...


@dataclass(frozen=True)
class FlipAndCrop:
    """Random horizontal flip, and a random crop after ``padding`` by reflection (De et al. 2022)."""

    padding: int = 4

    def __post_init__(self) -> None:
        _validate.integer("padding", self.padding, low=0)

    def __call__(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        count, channels, height, width = inputs.shape
        padded = functional.pad(inputs, [self.padding] * 4, mode="reflect")
        rows = self._window(count, height, generator).to(inputs.device)
        columns = self._window(count, width, generator).to(inputs.device)
        mirrored = (torch.rand(count, generator=generator) < 0.5).to(inputs.device)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        padded = padded.gather(2, rows[:, None, :, None].expand(-1, channels, -1, padded.shape[3]))
        return padded.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1))

    def _window(self, count: int, length: int, generator: torch.Generator) -> Tensor:
        start = torch.randint(2 * self.padding + 1, (count, 1), generator=generator)
        return start + torch.arange(length)


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
