"""DP-SGD as a sequence of steps that hooks can observe (Nasr et al. 2023, Algorithm 2, arXiv:2302.07956).

``Training`` performs one ``Step`` after another; a ``Hook`` may add gradients to a step and observes its
result. :class:`Diagnose` is a hook without canaries, which tests the noise, the sums and the batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpaudit import _validate, diagnostics
from dpaudit._types import FloatArray, IntArray
from dpaudit.errors import InputError
from dpaudit.training import gradients
from dpaudit.training._settings import (
    DPSGD,
    GaussianSum,
    PoissonSampling,
    PrivateSum,
    Sampler,
    Seeds,
    Stateful,
    generators,
)
from dpaudit.training.data import Dataset


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """Step between noise and update, as observed by an audit.

    Only ``noisy_sum`` is released. The strongest adversary, who knows every example except the canary, also
    knows the other fields, except ``noise``, which is provided for tests.
    """

    index: int
    batch_size: int
    indices: Tensor
    """Indices of the batch in the data."""
    clipped_sum: Tensor
    """Sum of the clipped gradients of the batch."""
    noise: Tensor
    """Noise that the mechanism added to the sum."""
    noisy_sum: Tensor
    """Release of the mechanism: ``joined_sum`` plus noise."""

    @property
    def joined_sum(self) -> Tensor:
        """Sum of the clipped gradients of the batch and of all hooks, up to rounding.

        It is computed on demand, because storing it would cost another vector per step.
        """
        return self.noisy_sum - self.noise


class Hook:
    """Base class of hooks, which add gradients to a step and observe its result; all methods are optional.

    Added gradients are clipped, summed and noised by the audited mechanism, like those of examples. They are
    not part of the update: the model is trained as if there were no hook.
    """

    @property
    def num_entries(self) -> int:
        """Number of entries that the hook adds to the data set, which the audited sampling may draw."""
        return 0

    def attach(self, training: Training) -> None:
        """Prepare for this training run; called once, when ``Training`` is created."""

    def joining(self, index: int, entries: Sequence[int]) -> Iterable[gradients.Rows]:  # noqa: ARG002
        """Return unclipped gradients to add to step ``index``; ``entries`` are the drawn entries."""
        return ()

    def observe(self, step: Step) -> None:
        """Inspect a step; called before the model is updated."""

    def after(self, step: Step) -> None:
        """React to a step; called after the model is updated. It may raise to stop training."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``."""


class Training:
    """Training run with a model, data and settings; ``run()`` trains, ``step()`` performs one step.

    The model is trained in place on ``device``, to which it and the data are moved.

    ``sampling`` and ``mechanism`` default to those of the settings; pass broken ones to test audits. Pass
    ``expected_batch_size`` if it must not depend on whether a canary is in the data.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        settings: DPSGD,
        *,
        loss: gradients.Loss = gradients.cross_entropy,
        seeds: Seeds | None = None,
        device: torch.device | str = "cpu",
        hooks: Sequence[Hook] = (),
        sampling: Sampler | None = None,
        mechanism: PrivateSum | None = None,
        expected_batch_size: float | None = None,
    ) -> None:
        _require_memory(data, settings, model)
        seeds = seeds or Seeds()
        self.model = model.to(device).train()
        self.data = data.to(device)
        self.settings = settings
        self.device = device
        self.hooks = list(hooks)
        self.num_done = 0
        self.loss = loss
        self._sampling = sampling or PoissonSampling(settings.sample_rate)
        self._other_sampling: Sampler | None = None
        self._mechanism = mechanism or GaussianSum.of(settings)
        # If the whole sum is not post-processed, gradients can be added to it at any time.
        self._adds_up = type(self._mechanism).finish is GaussianSum.finish
        self._expected_batch_size = expected_batch_size
        self._optimizer = settings.optimizer.build(gradients.trainable(model).values())
        self._generators = generators(seeds, device)
        for hook in self.hooks:
            hook.attach(self)

    @property
    def num_parameters(self) -> int:
        """The number of trainable parameters."""
        return gradients.num_parameters(self.model)

    @property
    def expected_batch_size(self) -> float:
        """The divisor of the sum. The actual batch size would reveal membership."""
        if self._expected_batch_size is not None:
            return self._expected_batch_size
        return self.settings.sample_rate * len(self.data)

    def run(self) -> Iterator[Step]:
        """Perform all remaining steps, one per iteration of the caller's loop."""
        while self.num_done < self.settings.num_steps:
            yield self.step()

    def step(self) -> Step:
        """Sample, clip and sum, add noise, call the hooks and update the model."""
        indices, entries = self._sample(self._generators)
        rows = [
            rows
            for hook, drawn in zip(self.hooks, entries, strict=True)
            for rows in hook.joining(self.num_done, drawn)
        ]
        step, update = self._privatize(indices, rows, self._generators)
        for hook in self.hooks:
            hook.observe(step)
        gradients.set_flat_gradient(self.model, update)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_done += 1
        for hook in self.hooks:
            hook.after(step)
        return step

    def draw(self, rows: Sequence[gradients.Rows], generators: Mapping[str, torch.Generator]) -> Step:
        """Return a step at the current weights with another batch and noise, without an update."""
        if self._other_sampling is None:  # a copy, because sampling may hold the rest of an epoch
            self._other_sampling = copy.deepcopy(self._sampling)
        indices = self._other_sampling.indices(len(self.data), generators["sampling"])
        return self._privatize(indices, rows, generators)[0]

    def examples(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> gradients.Batch:
        """Return these examples as a batch, augmented according to the settings."""
        multiplicity, augmentation = self.settings.multiplicity, self.settings.augmentation
        inputs = inputs.repeat_interleave(multiplicity, dim=0) if multiplicity > 1 else inputs
        if augmentation is not None and len(targets) > 0:
            inputs = augmentation(inputs, generator)
        return gradients.Batch(inputs, targets, multiplicity)

    def _sample(self, generators: Mapping[str, torch.Generator]) -> tuple[Tensor, list[list[int]]]:
        """Return the indices of a batch, and for each hook which of its entries were drawn."""
        counts = [hook.num_entries for hook in self.hooks]
        size = len(self.data)
        indices = self._sampling.indices(size + sum(counts), generators["sampling"])
        entries, first = [], size
        for count in counts:
            is_own = (indices >= first) & (indices < first + count) if count else None
            entries.append([] if is_own is None else (indices[is_own] - first).tolist())
            first += count
        return indices[indices < size] if sum(counts) else indices, entries

    def _privatize(
        self, indices: Tensor, rows: Sequence[gradients.Rows], generators: Mapping[str, torch.Generator]
    ) -> tuple[Step, Tensor]:
        """Return a step and its update, which is exactly the same as without ``rows``."""
        total = gradients.flat_zeros(self.model)
        batch = self.examples(*self.data.at(indices), generators["augmentation"])
        count = len(self._mechanism.add(gradients.per_example(self.model, self.loss, batch), total))
        apart = total.clone() if rows and not self._adds_up else None
        clipped = self._mechanism.finish(total, count)
        joined = None
        if apart is not None:  # the scored sum is finished last: the noise may depend on it
            joined = self._mechanism.finish(apart, count + len(self._mechanism.add(rows, apart)))
        noise = self._mechanism.noise(clipped, generators["noise"])
        noisy = clipped + noise
        update = noisy / self.expected_batch_size
        if joined is not None:
            noisy = joined + noise
        elif rows:  # the same sum in another order, without an additional vector
            self._mechanism.add(rows, noisy)
        step = Step(
            index=self.num_done,
            batch_size=len(indices),
            indices=indices,
            clipped_sum=clipped,
            noise=noise,
            noisy_sum=noisy,
        )
        return step, update

    def state_dict(self) -> dict[str, Any]:
        """Return the state needed to resume, for ``load_state_dict`` of an identically built ``Training``."""
        state = {
            "num_done": self.num_done,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "generators": {name: rng.get_state() for name, rng in self._generators.items()},
            "sampling": self._sampling.state_dict() if isinstance(self._sampling, Stateful) else {},
            "hooks": [hook.state_dict() for hook in self.hooks],
        }
        return copy.deepcopy(state)  # later steps must not change it

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``."""
        with _validate.state_dict_errors("a Training", state):
            self.num_done = _validate.integer("num_done", state["num_done"], low=0)
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            for name, rng in self._generators.items():
                rng.set_state(state["generators"][name])
            if isinstance(self._sampling, Stateful):
                self._sampling.load_state_dict(state["sampling"])
            for hook, hook_state in zip(self.hooks, state["hooks"], strict=True):
                hook.load_state_dict(hook_state)


def _require_memory(data: Dataset, settings: DPSGD, model: nn.Module) -> None:
    """Raise if the inputs of one batch, with all augmentations, or the vectors of a step are too large."""
    batch = max(settings.sample_rate * len(data), 1.0)
    inputs = batch * settings.multiplicity * math.prod(data.shape)
    copies = 3 if settings.augmentation is not None else 1  # padded, cropped and flipped
    _validate.fits_memory(
        f"Batches of {batch:,.0f} examples with multiplicity={settings.multiplicity} and {data!r}",
        4 * (inputs * copies + 4 * gradients.num_parameters(model)),  # bytes; weights, sum, noise and update
    )


def accuracy(model: nn.Module, data: Dataset) -> float:
    """Return the fraction of examples whose class has the largest output. Not private: use public data.

    Args:
        model: A model of classes.
        data: The examples.

    Returns:
        A number between 0 and 1.

    Example:
        ``accuracy(model, test)``

    """
    was_training = model.training
    model.eval()
    correct = 0
    with torch.inference_mode():
        for inputs, targets in data.chunks():
            correct += int((model(inputs).argmax(dim=1) == targets).sum())
    model.train(was_training)
    return correct / len(data)


_CHUNK_STEPS = 64  # steps that are recorded together, which takes less time than one at a time
# the number of the step, its noise and release at the sampled coordinates, its batch, and three numbers: the
# smallest and the largest noise of all coordinates, and the squared norm of the sum
_PendingStep = tuple[int, FloatArray, FloatArray, IntArray, tuple[Tensor, Tensor, Tensor]]


class Diagnose(Hook):
    """Hook that collects the noise, the sum and the batch of every step; ``diagnose()`` tests them.

    The noise is the release minus the sum of examples and canaries, so the hook can be combined with an
    audit. It is compared with the training settings. Of a large model, the noise of about a thousand
    coordinates is kept, and the largest noise of all. Attach the hook to several training runs in turn to
    test whether they share their noise.
    """

    def __init__(self) -> None:
        self._pending: list[_PendingStep] = []
        self.noise, self.sums, self.batches = (
            diagnostics.NoiseCheck(),
            diagnostics.SumRecord(),
            diagnostics.BatchRecord(),
        )
        self._claimed: tuple[float, float] | None = None  # noise multiplier and sample rate

    def attach(self, training: Training) -> None:
        settings = training.settings
        claimed = _validate.positive("noise_multiplier", settings.noise_multiplier), settings.sample_rate
        if self._claimed not in (None, claimed):
            raise InputError("One Diagnose can observe only training runs with equal noise and sample rate.")
        self._claimed, self._is_first = claimed, True
        self._num_examples, self._norm = len(training.data), settings.max_grad_norm
        parameters = gradients.trainable(training.model)
        self._eps = torch.finfo(next(iter(parameters.values())).dtype).eps
        sizes = {name: value.numel() for name, value in parameters.items()}
        self._num_parameters = sum(sizes.values())
        sample = diagnostics.CoordinateSample.of(list(sizes.values()))
        is_named = len(sample.leaves) == len(sizes)
        self._leaves: diagnostics.Leaves = (
            dict(zip(sizes, sample.leaves, strict=True)) if is_named else sample.leaves
        )
        self._indices = torch.as_tensor(sample.indices, device=training.device)

    def observe(self, step: Step) -> None:
        # a dot product is faster than the norm; the rest is computed later, with full caches
        numbers = *step.noise.aminmax(), torch.dot(step.clipped_sum, step.clipped_sum)
        indices = step.indices.cpu().numpy().copy()
        self._pending.append(
            (step.index, self._sampled(step.noise), self._sampled(step.noisy_sum), indices, numbers)
        )
        if self._is_first or len(self._pending) == _CHUNK_STEPS:
            self._flush()
            self._is_first = False

    def _sampled(self, vector: Tensor) -> FloatArray:
        """Return the numbers at the coordinates that are kept."""
        numbers: FloatArray = vector.index_select(0, self._indices).cpu().numpy()
        return numbers

    def _flush(self) -> None:
        """Pass the steps that were only read so far to the checks."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        lows, highs, squares = (
            torch.stack(column) for column in zip(*(step[-1] for step in pending), strict=True)
        )
        largest, norms = torch.stack([torch.maximum(-lows, highs), squares.sqrt()]).tolist()
        for (index, noise, released, batch, _), most, norm in zip(pending, largest, norms, strict=True):
            if not math.isfinite(most):
                raise InputError(f"Noise must be finite, got {most} in step {index}. Did training diverge?")
            self._check(noise, released, batch, most, norm)

    def _check(
        self, noise: FloatArray, released: FloatArray, batch: IntArray, most: float, norm: float
    ) -> None:
        step = diagnostics.ObservedStep(
            noise=noise / self._norm,
            leaves=self._leaves,
            total=(released - noise) / self._norm,
            released=released,
            release_unit=1 / self._norm,
            max_noise=diagnostics.NoiseMaximum(most / self._norm, self._num_parameters),
            sum_norm=norm / self._norm,
            num_rows=len(batch),
            clipping_norm=self._norm,
            example_sum_norm=norm / self._norm,
            batch=batch,
            num_examples=self._num_examples,
        )
        for check in (self.noise, self.sums, self.batches):
            check.observe(step)

    def diagnose(self, confidence: float = 0.95) -> diagnostics.Diagnosis:
        """Test the steps so far; the false alarm rate holds for a single diagnosis."""
        noise_multiplier, sample_rate = self._claimed or (1.0, None)
        claimed = diagnostics.ClaimedStep(
            noise_multiplier=noise_multiplier,
            sample_rate=sample_rate,
            confidence=_validate.confidence(confidence),
        )
        results = [check.results(claimed) for check in self.checks]
        if self.noise.num_steps == 0:
            raise InputError("No step was observed. Did training run?")
        return diagnostics.Diagnosis.of((), confidence=confidence).joined(*results)

    @property
    def checks(self) -> tuple[diagnostics.NoiseCheck, diagnostics.BatchRecord, diagnostics.SumRecord]:
        """The checks of all steps so far."""
        self._flush()
        return self.noise, self.batches, self.sums

    def state_dict(self) -> dict[str, Any]:
        return {type(check).__name__: check.state_dict() for check in self.checks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pending.clear()
        for check in self.checks:
            check.load_state_dict(state[type(check).__name__])


class ChecksOfHook:
    """The checks of a :class:`Diagnose` hook as one check of a recorder; the hook itself observes steps."""

    tests_noise = True

    def __init__(self, hook: Diagnose) -> None:
        self._hook = hook

    def results(self, claimed: diagnostics.ClaimedStep) -> diagnostics.CheckResults:
        """Return the results of all checks of the hook."""
        joined = diagnostics.Diagnosis.of((), confidence=claimed.confidence)
        results = [check.results(claimed) for check in self._hook.checks]
        joined = joined.joined(*results)
        return diagnostics.CheckResults(
            checks=joined.checks,
            certain=tuple(finding for result in results for finding in result.certain),
            to_check=joined.to_check,
            notes=joined.notes,
            not_covered=joined.not_covered,
            assumptions=joined.assumptions,
            noise=joined.noise,
        )
