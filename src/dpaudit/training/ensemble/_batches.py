"""The Poisson batches of whole trainings, drawn before they begin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpaudit.training._seeds import Seeds
from dpaudit.training._settings import DPSGD

__all__ = ["DrawnBatches", "drawn_batches", "side_by_side"]

IntArray = NDArray[np.int64]


def drawn_batches(*, num_examples: int, present: bool, settings: DPSGD, seeds: Seeds) -> list[IntArray]:
    """The places of the examples of every step. The canary, if present, is the one behind the last.

    Every example by a coin of its own, as the accounting assumes. The coins of all steps are one long row,
    and only the gaps between heads are drawn: it costs what the batches cost, not what the data cost. The
    canary's coins are drawn apart, so that the rest of a batch does not depend on whether it is there.
    """
    others, canary = np.random.SeedSequence(seeds.sampling).spawn(2)
    heads = _heads(num_examples * settings.num_steps, settings.sample_rate, np.random.default_rng(others))
    ends = np.searchsorted(heads, num_examples * np.arange(1, settings.num_steps))
    batches = [part % num_examples for part in np.split(heads, ends)]
    if present:
        joins = np.random.default_rng(canary).random(settings.num_steps) < settings.sample_rate
        batches = [
            np.append(batch, num_examples) if join else batch
            for batch, join in zip(batches, joins, strict=True)
        ]
    return batches


def _heads(num_coins: int, probability: float, rng: np.random.Generator) -> IntArray:
    """The places of the heads in a row of coins."""
    if probability == 1.0:
        return np.arange(num_coins)
    found, last = [], -1
    while last < num_coins - 1:
        gaps = rng.geometric(probability, size=_enough(num_coins - 1 - last, probability))
        found.append(last + np.cumsum(gaps))
        last = int(found[-1][-1])
    places = np.concatenate([np.empty(0, np.int64), *found])
    return places[places < num_coins]


def _enough(num_coins: int, probability: float) -> int:
    """So many gaps that they nearly always reach the end; if not, more are drawn."""
    mean = num_coins * probability
    return int(mean + 5 * mean**0.5) + 1


class DrawnBatches:
    """A sampling that hands out batches drawn before; one object belongs to one training."""

    def __init__(self, batches: Sequence[IntArray]) -> None:
        self._batches = iter(batches)

    def indices(self, num_examples: int, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """The batch of the next step."""
        return torch.from_numpy(next(self._batches))


def side_by_side(models: Sequence[Sequence[IntArray]], filler: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For every step the batches of all models as rows of one table, and how long each is.

    Rows are filled up to the longest with the place ``filler``.
    """
    for batches in zip(*models, strict=True):
        sizes = np.array([len(batch) for batch in batches])
        table = np.full((len(batches), max(int(sizes.max()), 1)), filler)
        table[np.arange(table.shape[1]) < sizes[:, None]] = np.concatenate(batches)
        yield torch.from_numpy(table), torch.from_numpy(sizes)
