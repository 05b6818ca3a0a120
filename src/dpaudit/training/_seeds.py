"""Random seeds and RNGs, one per purpose, so that changing one does not affect the others."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from dpaudit import _validate

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
    """Return the model built with this seed; torch's global RNG is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed).get_state())
        return build()
