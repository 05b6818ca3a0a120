"""DP-SGD, step by step as in Algorithm 2 of Nasr et al. 2023 (arXiv:2302.07956)."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpaudit.training._batch import Batch
from dpaudit.training._hook import Hook
from dpaudit.training._mechanism import GaussianSum, Mechanism
from dpaudit.training._sampling import PoissonSampling, Sampling
from dpaudit.training._seeds import Seeds, generator
from dpaudit.training._settings import DPSGD
from dpaudit.training._step import Step
from dpaudit.training.data._dataset import Dataset
from dpaudit.training.gradients import Loss, cross_entropy, per_example
from dpaudit.training.gradients._flat import flat_zeros, set_flat_gradient, trainable

__all__ = ["Training"]


class Training:
    """A model, its data and the settings; ``run()`` trains, ``step()`` makes one step.

    The model is trained in place, on ``device``, to which it and the data are moved.

    ``sampling`` and ``mechanism`` are what the settings say, unless given: audits are tested with
    broken ones.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        settings: DPSGD,
        *,
        loss: Loss = cross_entropy,
        seeds: Seeds | None = None,
        device: torch.device | str = "cpu",
        hooks: Sequence[Hook] = (),
        sampling: Sampling | None = None,
        mechanism: Mechanism | None = None,
    ) -> None:
        seeds = seeds or Seeds()
        self.model = model.to(device).train()
        self.data = data.to(device)
        self.settings = settings
        self.hooks = list(hooks)
        self.num_done = 0
        self._loss = loss
        self._sampling = sampling or PoissonSampling(settings.sample_rate)
        self._mechanism = mechanism or GaussianSum(
            noise_multiplier=settings.noise_multiplier, max_grad_norm=settings.max_grad_norm
        )
        self._optimizer = settings.optimizer.build(trainable(model).values())
        self._generators = {
            "sampling": generator(seeds.sampling),
            "noise": generator(seeds.noise, device),
            "augmentation": generator(seeds.augmentation),
        }

    @property
    def expected_batch_size(self) -> float:
        """What the sum is divided by. Not the size of the batch, which would tell who is in it."""
        return self.settings.sample_rate * len(self.data)

    def run(self) -> Iterator[Step]:
        """Make all steps that are left, one for each turn of the caller's loop."""
        while self.num_done < self.settings.num_steps:
            yield self.step()

    def step(self) -> Step:
        """Sample, clip and sum, add noise, let hooks look, update."""
        batch = self._sample()
        clipped, joined = self._sums(batch)
        noise = self._mechanism.noise(clipped, self._generators["noise"])
        step = Step(
            index=self.num_done,
            batch_size=len(batch),
            clipped_sum=clipped,
            joined_sum=joined,
            noisy_sum=joined + noise,
        )
        for hook in self.hooks:
            hook.observe(step)
        # The same noise on the batch alone: exactly the update of a training without hooks.
        self._update(step.noisy_sum if joined is clipped else clipped + noise)
        self.num_done += 1
        return step

    def _sample(self) -> Batch:
        indices = self._sampling.indices(len(self.data), self._generators["sampling"])
        inputs, targets = self.data.at(indices)
        multiplicity, augmentation = self.settings.multiplicity, self.settings.augmentation
        inputs = inputs.repeat_interleave(multiplicity, dim=0) if multiplicity > 1 else inputs
        if augmentation is not None and len(indices) > 0:
            inputs = augmentation(inputs, self._generators["augmentation"])
        return Batch(inputs, targets, multiplicity)

    def _sums(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The clipped sum of the batch, and that of the batch and all that hooks let join."""
        total = flat_zeros(self.model)
        count = len(self._mechanism.add(per_example(self.model, self._loss, batch), total))
        rows = [rows for hook in self.hooks for rows in hook.joining(self.num_done)]
        if not rows:
            clipped = self._mechanism.finish(total, count)
            return clipped, clipped
        joined = total.clone()
        joined_count = count + len(self._mechanism.add(rows, joined))
        return self._mechanism.finish(total, count), self._mechanism.finish(joined, joined_count)

    def _update(self, noisy_sum: Tensor) -> None:
        set_flat_gradient(self.model, noisy_sum / self.expected_batch_size)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on from here; give it to ``load_state_dict`` of an equal training."""
        state = {
            "num_done": self.num_done,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generators": {name: made.get_state() for name, made in self._generators.items()},
        }
        return copy.deepcopy(state)  # the training may go on meanwhile

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where ``state_dict`` was taken."""
        self.num_done = state["num_done"]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        for name, made in self._generators.items():
            made.set_state(state["generators"][name])
