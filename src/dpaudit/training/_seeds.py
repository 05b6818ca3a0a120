"""Random seeds and generators: one for each purpose, so that changing one leaves the others as they were."""

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

_WORDS = 624  # of the Mersenne twister
_STATE_AT = 24  # bytes before them in torch's state: seed, words left, flag, next


@dataclass(frozen=True, kw_only=True)
class Seeds:
    """The seeds of a training; None takes fresh entropy from the operating system.

    A known seed makes a run repeatable and its noise predictable. Train a model that is to be private with
    ``Seeds()``.
    """

    initialization: int | None = None
    sampling: int | None = None
    noise: int | None = None
    augmentation: int | None = None

    def __post_init__(self) -> None:
        for name in ("initialization", "sampling", "noise", "augmentation"):
            if (value := getattr(self, name)) is not None:
                _validate.whole(name, value, low=0)

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """Derive all of them from one number, independent of each other.

        >>> Seeds.of(1) == Seeds.of(1), Seeds.of(1).noise == Seeds.of(1).sampling
        (True, False)
        """
        _validate.whole("seed", seed, low=0)
        values = [int(value) for value in np.random.SeedSequence(seed).generate_state(4, np.uint64)]
        return cls(initialization=values[0], sampling=values[1], noise=values[2], augmentation=values[3])


def generator(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator, from ``seed`` or from the operating system's entropy.

    torch's generator for the CPU uses 32 bits of a seed: all noise that it could ever give is one of four
    billion streams, few enough to try them all. So its whole state is filled here instead.
    """
    entropy = secrets.randbits(256) if seed is None else _validate.whole("seed", seed, low=0)
    sequence = np.random.SeedSequence(entropy)
    made = torch.Generator(device)
    made.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
    if made.device.type == "cpu":
        state, words = made.get_state(), sequence.generate_state(_WORDS, np.uint32).astype(np.uint64)
        state[_STATE_AT : _STATE_AT + 8 * _WORDS] = torch.from_numpy(words.view(np.uint8).copy())
        made.set_state(state)
    return made


def generators(seeds: Seeds, device: torch.device | str = "cpu") -> dict[str, torch.Generator]:
    """Return the generators of a training."""
    return {
        "sampling": generator(seeds.sampling),
        "noise": generator(seeds.noise, device),
        "augmentation": generator(seeds.augmentation),
    }


def initialize(build: Callable[[], Model], seed: int | None) -> Model:
    """Return the model that ``build`` makes from this seed; torch's global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed).get_state())
        return build()
