"""Canaries in the steps of a training run: their gradients are added to the sum, and scored in the release.

``GradientInserter`` uses orthogonal directions that are fixed before training; ``InputInserter`` uses
examples, which are scored along their gradients at the weights of the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dpaudit._torch import CanaryVectors, HeldOutData, require_fitting
from dpaudit._torch._crafting import CanarySequence, Crafting, Examples, ProgressCallback
from dpaudit._types import FloatArray
from dpaudit.canaries import (
    STEPS_AT_ONCE,
    CanaryCoins,
    CanaryPlan,
    Directions,
    GradientCanary,
    InputCanary,
    ParameterLayout,
)
from dpaudit.recording import ObservedCanaries
from dpaudit.training._settings import generator
from dpaudit.training._training import Step, Training
from dpaudit.training.data import fingerprints_of
from dpaudit.training.gradients import Batch, Rows, per_example, refuse_batch_norm, trainable, vmap_rows

# purposes of random streams, besides those of CanaryPlan
SECOND_BATCH, CRAFTING, AUGMENTING, DROPPING = 2, 3, 4, 5
_ROOM_FOR_SQUARES = 16.0  # between the square root of the largest number and the longest canary
_MOST_PLANNED = 16_384  # canaries whose rows are kept for many steps
_MIN_NORM = 1e-12  # in clipping norms: a shorter gradient has no usable direction


class CanaryInserter(ABC):
    """Base class of objects that insert canaries into the steps of one training run and score them."""

    coupled: ClassVar[bool] = False
    """Whether a score depends on which other canaries were present, because canaries overlap."""

    draws: CanaryPlan | CanaryCoins
    """The membership of canaries and the random streams of the audit."""

    lengths: FloatArray | None = None
    """Lengths of the scored step's canaries after clipping, in clipping norms; None if all are 1."""

    @abstractmethod
    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> Sequence[Rows]:
        """Return the unclipped gradients of the canaries with these numbers."""

    def rows_by_coins(self, index: int) -> Sequence[Rows]:
        """Return the unclipped gradients of the canaries that are present in a step."""
        return self.rows(index, np.flatnonzero(self.draws.coins(index)))

    @abstractmethod
    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        """Return the projection of the release on each canary, in units of the canary's contribution.

        The adversary knows all other examples. With ``residual``, their sum is subtracted: the score is then
        noise, plus 1 if the canary is present.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the seed and the weights do not determine."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # most need only the seed
        """Restore a state returned by ``state_dict``."""


class GradientInserter(CanaryInserter):
    """Gradient canaries of known length, scored in units of the clipping norm."""

    def __init__(self, training: Training, canary: GradientCanary, num_canaries: int, seed: int) -> None:
        self.draws: CanaryPlan = CanaryPlan(canary, num_canaries, seed)
        self._canary, self._norm = canary, training.settings.max_grad_norm
        parameters = trainable(training.model)
        shapes = tuple(tuple(value.shape) for value in parameters.values())
        self._like = next(iter(parameters.values())).detach()
        largest = math.sqrt(torch.finfo(self._like.dtype).max) / _ROOM_FOR_SQUARES / self._norm
        self._layout = ParameterLayout(tuple(parameters), shapes, largest)
        self._drawn: dict[int, tuple[Directions, CanaryVectors, Tensor]] = {}
        self._planned: dict[int, list[CanaryRows]] = {}
        self._num_steps = training.settings.num_steps
        self._draw(0)

    @property
    def observed(self) -> ObservedCanaries:
        """The canaries, for tests of what arrives of them."""
        eps = float(torch.finfo(self._like.dtype).eps)
        return ObservedCanaries(
            self._canary, lambda index: self._draw(index)[0], lambda: self._layout, lambda: eps
        )

    def vectors(self, index: int) -> CanaryVectors:
        """Return the directions of a step's canaries."""
        return self._draw(index)[1]

    def _draw(self, index: int) -> tuple[Directions, CanaryVectors, Tensor]:
        """Return the directions of a step's canaries, also as tensors, and their lengths."""
        variant = self._canary.variant(index)
        if variant not in self._drawn:
            if self._canary.moving:
                self._drawn.clear()
            directions = self.draws.directions(index, self._layout)
            lengths = self._like.new_tensor(self._norm * self._canary.lengths(directions))
            self._drawn[variant] = directions, CanaryVectors.of(directions, self._like), lengths
        return self._drawn[variant]

    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> list[CanaryRows]:
        numbers = torch.as_tensor(np.asarray(present, dtype=np.int64), device=self._like.device)
        if len(numbers) == 0:
            return []
        _, vectors, lengths = self._draw(index)
        return [CanaryRows(vectors, numbers, lengths.index_select(0, numbers))]

    def rows_by_coins(self, index: int) -> Sequence[Rows]:
        if self._canary.moving or self.draws.num_canaries > _MOST_PLANNED:
            return super().rows_by_coins(index)
        if index not in self._planned:  # many steps at once: after a step of training, caches are empty
            last = min(index - index % STEPS_AT_ONCE + STEPS_AT_ONCE, max(self._num_steps, index + 1))
            self._planned = {
                step: self.rows(step, np.flatnonzero(self.draws.coins(step))) for step in range(index, last)
            }
        return self._planned[index]

    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        example_sum = step.clipped_sum if residual else None
        return self._normalized(self.vectors(step.index).project(step.noisy_sum, without=example_sum))

    def read(self, step: Step) -> Callable[[], FloatArray]:
        """Return a function that computes the scores of the step later, without its vectors.

        Many steps in a row take less time than one after each step of training, which empties the caches.
        """
        vectors = self.vectors(step.index)
        if vectors.together is None:
            scores = self.scores(step)
            return lambda: scores
        readings = vectors.read(step.noisy_sum, step.clipped_sum)
        return lambda: self._normalized(vectors.products(readings))

    def _normalized(self, projections: Tensor) -> FloatArray:
        # NumPy is faster than torch for a few thousand numbers
        scores = projections.cpu().numpy().astype(np.float64)
        scores /= self._norm
        return scores


@dataclass(frozen=True, eq=False)
class CanaryRows:
    """Present gradient canaries as sparse rows with norms ``lengths``."""

    vectors: CanaryVectors
    present: Tensor  # canary numbers
    lengths: Tensor

    def norms(self) -> Tensor:
        return self.lengths.clone()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self.vectors.add_some(self.present, weights * self.lengths, out)


class InputInserter(CanaryInserter):
    """Examples inserted into the batch of a step; the audited code computes and clips their gradients.

    The direction of a canary is its gradient, recomputed here and clipped to the claimed norm. The score is
    the inner product of the release with it, divided by its squared length: noise, plus 1 if the canary is
    present, and more if it was not clipped. Noise with the claimed multiplier has standard deviation
    noise_multiplier * max_grad_norm / length in the score. This is smallest for a gradient of the clipping
    norm: a shorter one reveals less, and none reveals more than the claim allows.
    """

    coupled: ClassVar[bool] = True

    def __init__(
        self,
        training: Training,
        canary: InputCanary,
        num_canaries: int,
        seed: int,
        *,
        data: HeldOutData,
        on_step: ProgressCallback | None = None,
    ) -> None:
        self.draws = CanaryCoins(num_canaries, seed)
        data.require_apart(
            fingerprints_of(training.data), "the training data", advice=", or pass apart_from= to it"
        )
        refuse_batch_norm(training.model)
        data = data.to(training.device)
        require_fitting(training.model, training.loss, data)
        self._training = training
        self._norm = training.settings.max_grad_norm
        self._canaries = CanarySequence(canary, self.draws, CRAFTING)
        self._craft = Crafting(
            model=training.model, loss=training.loss, data=data, max_grad_norm=self._norm, on_step=on_step
        )
        self._index = -1
        self._joined = torch.zeros(0, dtype=torch.long)
        self._rows: list[WeightRecordingRows] = []

    def examples(self, index: int) -> Examples:
        """Return the canaries of a step."""
        return self._canaries.at(index, self._craft)

    def _find_gradients(self, index: int) -> None:
        """Compute the gradients of all canaries at the current weights, once per step."""
        if index == self._index:
            return
        examples, training = self.examples(index), self._training
        rng = generator(int(self.draws.rng(index, AUGMENTING).integers(2**63)))
        self._batch = training.examples(examples.inputs, examples.targets, rng)
        with torch.random.fork_rng(devices=[]):  # the RNG of the audited code is not affected
            chunks = [rows.gradients for rows in vmap_rows(training.model, training.loss, self._batch)]
        self._gradients = torch.cat(
            [torch.cat([leaf.flatten(1) for leaf in chunk], dim=1) for chunk in chunks]
        )
        self._index = index
        self._joined, self._rows = self._joined[:0], []

    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> list[WeightRecordingRows]:
        self._find_gradients(index)
        numbers = torch.as_tensor(np.asarray(present, dtype=np.int64), device=self._gradients.device)
        model, loss, batch = self._training.model, self._training.loss, _select(self._batch, numbers)
        with torch.random.fork_rng(devices=[]):
            self._rows = [WeightRecordingRows(rows) for rows in per_example(model, loss, batch)]
        self._joined = numbers
        return self._rows

    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        self._find_gradients(step.index)
        norms = torch.linalg.vector_norm(self._gradients, dim=1)
        is_usable = norms.isfinite() & (norms > _MIN_NORM * self._norm)
        gradients = self._gradients.masked_fill(~is_usable[:, None], 0.0)
        released, weighted = step.noisy_sum, norms.new_zeros(len(norms))
        if residual:
            weights = self._weights()
            released = released - step.clipped_sum - weights @ gradients
            weighted = weights * norms.nan_to_num(posinf=0.0)
        self.lengths = torch.where(is_usable, norms.clamp(max=self._norm) / self._norm, 0.0).cpu().numpy()
        along = gradients @ released / norms + weighted
        scores = torch.where(is_usable, along / norms.clamp(max=self._norm), 0.0)
        values: FloatArray = scores.cpu().numpy().astype(np.float64)
        return values

    def _weights(self) -> Tensor:
        """Return the weight with which each canary was added; zero for absent canaries."""
        weights = self._gradients.new_zeros(len(self._gradients))
        recorded = [rows.weights for rows in self._rows if rows.weights is not None]
        return weights.index_copy_(0, self._joined, torch.cat(recorded)) if recorded else weights

    def state_dict(self) -> dict[str, Any]:
        examples = self._canaries.current
        if examples is None:
            return {}
        return {"inputs": examples.inputs, "targets": examples.targets, "crafted_at": self._canaries.made_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index = -1
        if state:
            device = self._training.device
            self._canaries.current = Examples(state["inputs"].to(device), state["targets"].to(device))
            self._canaries.made_at = state["crafted_at"]


class WeightRecordingRows:
    """Gradients of some examples, with a record of the weights that a mechanism applied to them.

    The adversary knows how the other canaries of a step were weighted, even by a mechanism that clips
    incorrectly.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.weights: Tensor | None = None

    def norms(self) -> Tensor:
        return self._rows.norms()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self.weights = weights if self.weights is None else self.weights + weights
        self._rows.add_weighted(weights, out)


def _select(batch: Batch, numbers: Tensor) -> Batch:
    """Return the examples with these numbers, each with all its augmentations."""
    inputs = batch.views.index_select(0, numbers).flatten(0, 1)
    return Batch(inputs, batch.targets.index_select(0, numbers), batch.multiplicity)
