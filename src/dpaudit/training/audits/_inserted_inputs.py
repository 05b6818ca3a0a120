"""Input canaries: examples, whose gradients at the weights of a step are the directions to look along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from dpaudit._torch import HeldOutData, require_fitting
from dpaudit._torch.crafting import Crafting, Examples, Tell, nobody
from dpaudit.canaries import Coins, InputCanary
from dpaudit.errors import InputError
from dpaudit.stats._types import FloatArray
from dpaudit.training._batch import Batch
from dpaudit.training._seeds import generator
from dpaudit.training._step import Step
from dpaudit.training._training import Training
from dpaudit.training.audits._inserted import AUGMENTING, CRAFTING, Inserted
from dpaudit.training.audits._weighed_rows import WeighedRows
from dpaudit.training.data._hold_out import fingerprints_of
from dpaudit.training.gradients import per_example
from dpaudit.training.gradients._vmap import refuse_batch_norm, vmap_rows

__all__ = ["InsertedInputs"]

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
