"""What all audits share: canaries in the steps of one training, whatever they are.

Gradient canaries: orthogonal directions, known before the training. Input canaries: examples, whose gradients
at the weights of a step are the directions to look along. Canaries as gradients that a mechanism can clip and
add, without their zeros. Gradients that remember what a mechanism made of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dpaudit._torch import CanaryVectors, HeldOutData, require_fitting
from dpaudit._torch._crafting import Crafting, Examples, Tell, nobody
from dpaudit._types import BoolArray, FloatArray
from dpaudit.canaries import Coins, Draws, GradientCanary, InputCanary
from dpaudit.errors import InputError
from dpaudit.training._seeds import generator
from dpaudit.training._settings import Batch
from dpaudit.training._training import Step, Training
from dpaudit.training.data._dataset import fingerprints_of
from dpaudit.training.gradients import Rows, per_example, refuse_batch_norm, trainable, vmap_rows

# purposes of chance, besides those of Draws
SECOND_BATCH, CRAFTING, AUGMENTING, DROPPING = 2, 3, 4, 5


class Inserted(ABC):
    """Canaries in the steps of one training."""

    shares_noise: ClassVar[bool] = False
    """Whether the scores of one step depend on each other: canaries that are not orthogonal."""

    def __init__(self, draws: Draws | Coins) -> None:
        self._chance = draws

    @property
    def num_canaries(self) -> int:
        """How many there are."""
        return self._chance.num_canaries

    def chance(self, index: int, purpose: int = 0) -> np.random.Generator:
        """The generator of one step, or of whatever else is counted by ``index``."""
        return self._chance.chance(index, purpose)

    def coins(self, index: int) -> BoolArray:
        """Whether each canary is present: a fair coin each."""
        return self._chance.coins(index)

    def in_data(self) -> BoolArray:
        """Whether each canary is an entry of the data set: a fair coin each."""
        return self._chance.entries()

    @abstractmethod
    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> Sequence[Rows]:
        """The gradients of the canaries with these numbers, not clipped yet."""

    @abstractmethod
    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        """What the step released along each canary, in units of what it may add to the sum.

        The adversary knows all other examples. With ``residual`` it takes their sum off: what is left is
        noise, and 1 where the canary is.
        """

    def state_dict(self) -> dict[str, Any]:
        """What chance and the weights do not give again."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # chance is enough for most
        """Go on from where ``state_dict`` was taken."""


@dataclass(frozen=True, eq=False)
class CanaryRows:
    """Those canaries that are present, of ``length`` each."""

    vectors: CanaryVectors
    present: Tensor  # their numbers
    length: float

    def norms(self) -> Tensor:
        return self.vectors.values.new_full(self.present.shape, self.length)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        lengths = weights * self.length
        self.vectors.add(out.new_zeros(self.vectors.num_canaries).index_copy_(0, self.present, lengths), out)


class InsertedGradients(Inserted):
    """Gradients of a length that is known; their scores are in clipping norms."""

    def __init__(self, training: Training, canary: GradientCanary, num_canaries: int, seed: int) -> None:
        self._draws = Draws(canary, num_canaries, seed)
        super().__init__(self._draws)
        self._canary = canary
        self._size = training.num_parameters
        self._norm = training.settings.max_grad_norm
        self._like = next(iter(trainable(training.model).values())).detach()
        self._index = -1
        self._vectors = self._aim(0)

    def vectors(self, index: int) -> CanaryVectors:
        """Where the canaries of a step point."""
        if self._canary.moving and index != self._index:
            self._index, self._vectors = index, self._aim(index)
        return self._vectors

    def _aim(self, index: int) -> CanaryVectors:
        return CanaryVectors.of(self._draws.directions(index, self._size), self._like)

    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> list[CanaryRows]:
        numbers = torch.as_tensor(np.asarray(present, dtype=np.int64), device=self._like.device)
        if len(numbers) == 0:
            return []
        return [CanaryRows(self.vectors(index), numbers, self._canary.scale * self._norm)]

    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        known = step.clipped_sum if residual else None
        released = self.vectors(step.index).project(step.noisy_sum, without=known)
        # numpy is quicker than torch with a few hundred numbers
        scores: FloatArray = released.cpu().numpy().astype(np.float64) / self._norm
        return scores


class WeighedRows:
    """The gradients of some examples, and what a mechanism multiplied each with when it added them.

    The others that joined a step are known to the adversary, as the mechanism added them: also where it
    does not clip as it should.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.weights: Tensor | None = None

    def norms(self) -> Tensor:
        return self._rows.norms()

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        self.weights = weights if self.weights is None else self.weights + weights
        self._rows.add_weighted(weights, out)


_SHORTEST = 1e-12  # in clipping norms: along a gradient that is shorter nothing can be said


class InsertedInputs(Inserted):
    """Examples that join the batch of a step; the training's own code finds and clips their gradients.

    The direction of a canary is its gradient, found here once more, and clipped to the norm that the
    training claims. A score is what was released along it over its squared length: 1 where the canary is, and
    more where it was not clipped. Noise of the claimed multiplier has deviation noise_multiplier *
    max_grad_norm / length in it. That is never less than for the longest gradient, so that a short canary
    tells less, and never more than the claim allows.
    """

    shares_noise: ClassVar[bool] = True

    def __init__(
        self,
        training: Training,
        canary: InputCanary,
        num_canaries: int,
        seed: int,
        *,
        data: HeldOutData,
        tell: Tell = nobody,
    ) -> None:
        super().__init__(Coins(num_canaries, seed))
        _refuse_shared(data, training)
        refuse_batch_norm(training.model)
        require_fitting(training.model, training.loss, data.to(training.device))
        self._training = training
        self._canary = canary
        self._norm = training.settings.max_grad_norm
        self._data, self._tell = data.to(training.device), tell
        self._examples: Examples | None = None
        self._crafted_at: int | None = None
        self._index = -1
        self._joined = torch.zeros(0, dtype=torch.long)
        self._rows: list[WeighedRows] = []

    def examples(self, index: int) -> Examples:
        """The canaries of a step: made before the first one, and anew when it is time for it."""
        if self._examples is None or self._canary.is_due(index, self._crafted_at):
            self._examples, self._crafted_at = self._craft(index), index
        return self._examples

    def _craft(self, index: int) -> Examples:
        training = self._training
        crafting = Crafting(
            model=training.model,
            loss=training.loss,
            data=self._data,
            max_grad_norm=self._norm,
            tell=self._tell,
        )
        return crafting(self._canary, self.num_canaries, self.chance(index, CRAFTING))

    def _aim(self, index: int) -> None:
        """Find the gradients of all canaries at the present weights, once a step."""
        if index == self._index:
            return
        examples, training = self.examples(index), self._training
        chance = generator(int(self.chance(index, AUGMENTING).integers(2**63)))
        self._batch = training.examples(examples.inputs, examples.targets, chance)
        with torch.random.fork_rng(devices=[]):  # the training's own chance stays as it is
            chunks = [rows.gradients for rows in vmap_rows(training.model, training.loss, self._batch)]
        self._gradients = torch.cat([torch.cat([part.flatten(1) for part in one], dim=1) for one in chunks])
        self._index = index
        self._joined, self._rows = self._joined[:0], []

    def rows(self, index: int, present: Sequence[int] | np.ndarray) -> list[WeighedRows]:
        self._aim(index)
        numbers = torch.as_tensor(np.asarray(present, dtype=np.int64), device=self._gradients.device)
        training = self._training
        with torch.random.fork_rng(devices=[]):
            found = list(per_example(training.model, training.loss, _some(self._batch, numbers)))
        self._joined, self._rows = numbers, [WeighedRows(rows) for rows in found]
        return self._rows

    def scores(self, step: Step, *, residual: bool = True) -> FloatArray:
        self._aim(step.index)
        norms = torch.linalg.vector_norm(self._gradients, dim=1)
        can_tell = norms.isfinite() & (norms > _SHORTEST * self._norm)
        gradients = self._gradients.masked_fill(~can_tell[:, None], 0.0)
        released, own = step.noisy_sum, norms.new_zeros(len(norms))
        if residual:
            weights = self._weights()
            released = released - step.clipped_sum - weights @ gradients
            own = weights * norms.nan_to_num(posinf=0.0)
        along = gradients @ released / norms + own
        scores = torch.where(can_tell, along / norms.clamp(max=self._norm), 0.0)
        found: FloatArray = scores.cpu().numpy().astype(np.float64)
        return found

    def _weights(self) -> Tensor:
        """What each canary was multiplied with when it was added; zero for those that were not."""
        weights = self._gradients.new_zeros(len(self._gradients))
        parts = [rows.weights for rows in self._rows if rows.weights is not None]
        return weights.index_copy_(0, self._joined, torch.cat(parts)) if parts else weights

    def state_dict(self) -> dict[str, Any]:
        if self._examples is None:
            return {}
        inputs, targets = self._examples.inputs, self._examples.targets
        return {"inputs": inputs, "targets": targets, "crafted_at": self._crafted_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._index = -1
        if state:
            device = self._training.device
            self._examples = Examples(state["inputs"].to(device), state["targets"].to(device))
            self._crafted_at = state["crafted_at"]


def _refuse_shared(data: HeldOutData, training: Training) -> None:
    count = data.num_among(fingerprints_of(training.data))
    if count:
        raise InputError(
            f"Expected held_out to be apart from the training's data, but {count} of its {len(data)} "
            "examples are in both; train on the first part that hold_out() returns, or tell it apart_from=."
        )


def _some(batch: Batch, numbers: Tensor) -> Batch:
    """The examples with these numbers, each with all its augmentations."""
    inputs = batch.views.index_select(0, numbers).flatten(0, 1)
    return Batch(inputs, batch.targets.index_select(0, numbers), batch.multiplicity)
