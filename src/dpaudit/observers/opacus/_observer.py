"""Canaries in the steps of a private optimizer.

One process, or several that share a step. What a private optimizer, its loader and its accountant say of the
training.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed
from torch.utils.data import BatchSampler

from dpaudit._types import BoolArray
from dpaudit.errors import InputError
from dpaudit.observers._patching import replaced
from dpaudit.observers.opacus._gradient_canaries import Canaries, Look
from dpaudit.observers.opacus._sampling import Coins
from dpaudit.recording import CoordinateSample, DPSGDParams, Recorder, WholeRunRecorder


class OneProcess:
    """The usual case: nothing to exchange."""

    world_size = 1
    inserts = True

    def agreed(self, seed: int) -> int:
        """The same seed on all processes."""
        return seed

    def total(self, local: Tensor) -> Tensor:
        """The sum over all processes."""
        return local

    def inserted(self, local: Tensor) -> Tensor:
        """The vector that the canaries of all processes add up to, on all of them."""
        return local


class Processes(OneProcess):
    """Canaries go into the sum of the last process: from there only the reduction takes them to the noise."""

    def __init__(self) -> None:
        self.world_size = distributed.get_world_size()
        self._last = self.world_size - 1
        self.inserts = distributed.get_rank() == self._last

    def agreed(self, seed: int) -> int:
        seeds: list[Any] = [seed]
        distributed.broadcast_object_list(seeds, src=0)
        return int(seeds[0])

    def total(self, local: Tensor) -> Tensor:
        summed = local.clone()
        distributed.all_reduce(summed)
        return summed

    def inserted(self, local: Tensor) -> Tensor:
        shared = local if self.inserts else torch.empty_like(local)
        distributed.broadcast(shared, src=self._last)
        return shared


class SamplingProcesses(Processes):
    """Canaries go into the sum of the process whose sampler drew them."""

    def __init__(self) -> None:
        super().__init__()
        self.inserts = True

    def inserted(self, local: Tensor) -> Tensor:
        return self.total(local)


def ranks_of(optimizer: DPOptimizer, sampling: bool) -> OneProcess:
    """Whether the optimizer adds up the gradients of several processes, and who of them has canaries."""
    if not hasattr(optimizer, "reduce_gradients"):
        return OneProcess()
    return SamplingProcesses() if sampling else Processes()


class ReadTerms:
    """Reads the claim of an optimizer, now; ``note`` is to be called in every step."""

    def __init__(self, optimizer: DPOptimizer, loader: Any) -> None:
        self._optimizer = optimizer
        self._rate = None if loader is None else loader_rate(loader)
        self._noises: dict[float, None] = {}  # in the order of the steps

    def note(self) -> None:
        """The noise of this step."""
        self._noises[float(self._optimizer.noise_multiplier)] = None

    def __call__(self) -> DPSGDParams:
        noises = tuple(self._noises) or (float(self._optimizer.noise_multiplier),)
        rate = self._rate if self._rate is not None else accounted_rate(self._optimizer)
        if len(noises) > 1:  # there is no claim of equal steps: then it has to be given
            return DPSGDParams(sample_rate=rate, noises=noises)
        return DPSGDParams(noise_multiplier=noises[0], sample_rate=rate)


def loader_rate(loader: Any) -> float:
    """The sample rate of the loader that ``make_private`` or ``BatchMemoryManager`` gave."""
    place, has_one_size = loader, False
    for name in ("batch_sampler", "sampler", "sampler"):  # a sampler may be inside of one that splits
        rate = getattr(place, "sample_rate", None)
        if rate is not None:
            return float(rate)
        place = getattr(place, name, None)
        has_one_size = has_one_size or isinstance(place, BatchSampler)
    if has_one_size:
        raise InputError(
            f"Expected a loader that is Poisson-sampled, which the claim counts with, got a "
            f"{type(loader).__name__} whose batches have one size: make it by make_private with "
            "poisson_sampling=True."
        )
    raise InputError(
        f"Expected the loader that make_private returned, which knows its sample rate, got a "
        f"{type(loader).__name__} that does not: pass sample_rate=... instead."
    )


def accounted_rate(optimizer: DPOptimizer) -> float | None:
    """The rate that the accountant counts with, if its hook is attached to the optimizer.

    The hook is the only thing that knows both; what it knows are the variables around it.
    """
    hook = optimizer.step_hook
    if not inspect.isfunction(hook):
        return None
    known = inspect.getclosurevars(hook).nonlocals
    rates = {rate for _, rate, _ in getattr(known.get("self"), "history", ())}
    if len(rates) > 1:
        return None
    found = rates.pop() if rates else known.get("sample_rate")
    return None if found is None else float(found)


@dataclass(frozen=True, eq=False)
class _Step:
    """What is known between the noise and the update."""

    look: Look
    present: BoolArray
    sums: list[Tensor]  # the clipped sum of the examples, as the optimizer had it
    known: Tensor  # the same along each canary, and the other canaries that are present
    joined: Tensor  # the sum with the canaries, at the places where noise is looked at
    inserted: Tensor  # what clipping left of the canaries, added up


class Observer:
    """Lets canaries join the sum before the noise, and takes them off before the update.

    ``joining`` says which ones join a step, by their numbers. The noise is where a logical step begins,
    however many physical batches it has. The update is where the step's release is read: after the noise,
    the scaling and the reduction over processes.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        recorder: Recorder | WholeRunRecorder,
        *,
        canaries: Canaries,
        joining: Coins,
        ranks: OneProcess,
        terms: ReadTerms,
    ) -> None:
        self._optimizer, self._recorder = optimizer, recorder
        self._canaries, self._joining = canaries, joining
        self._ranks, self._terms = ranks, terms
        self._places = CoordinateSample.of([parameter.numel() for parameter in optimizer.params])
        self._indices = torch.as_tensor(self._places.indices, device=optimizer.params[0].device)
        self._step: _Step | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Steps in here are observed; everything is as it was afterwards."""
        self._add_noise = self._optimizer.add_noise
        with ExitStack() as undo:
            undo.enter_context(replaced(self._optimizer, "add_noise", self._noised))
            undo.callback(self._end_step)
            inside = self._optimizer.original_optimizer
            undo.callback(inside.register_step_pre_hook(self._before_update).remove)
            undo.enter_context(self._joining.watching())
            yield

    def _noised(self) -> None:
        """What the optimizer calls when it adds noise to the sum of a step."""
        parameters = self._optimizer.params
        sums = [_checked_sum(parameter, place) for place, parameter in enumerate(parameters)]
        for parameter, own in zip(parameters, sums, strict=True):
            parameter.summed_grad = _marked_like(own.clone(), own)
        try:
            self._step = self._insert(sums)
            self._add_noise()
        except BaseException:
            self._step = None
            self._put_back(sums)
            raise

    @torch.no_grad()
    def _insert(self, sums: list[Tensor]) -> _Step:
        index = self._recorder.num_done
        numbers = self._joining.numbers(index)
        look = self._canaries.join(index, numbers, inserts=self._ranks.inserts)
        batch = _flat(sums)
        joined = _flat([parameter.summed_grad for parameter in self._optimizer.params])
        inserted = joined - batch
        self._terms.note()
        present = np.zeros(self._canaries.num_canaries, dtype=np.bool_)
        present[numbers] = True
        known, at_places = look.project(batch) + look.others, joined.index_select(0, self._indices)
        return _Step(look, present, sums, known, at_places, inserted)

    @torch.no_grad()
    def _before_update(self, *_: Any) -> None:
        """Called by the optimizer inside, with the gradients that it is about to use."""
        step = self._end_step()
        if step is None:
            raise InputError(
                "Expected the optimizer to add noise before each update; it did not call add_noise()."
            )
        divisor = self._divisor()
        released = _flat([parameter.grad for parameter in self._optimizer.params])
        scores = step.look.project(released) * divisor - self._ranks.total(step.known)
        self._keep_noise(released.index_select(0, self._indices) * divisor, step)
        self._take_off(self._ranks.inserted(step.inserted) / divisor)
        self._recorder.record(scores.double().cpu().numpy(), step.present)

    def _keep_noise(self, released: Tensor, step: _Step) -> None:
        known = self._ranks.total(step.joined)
        self._recorder.noise.observe(
            released.double().cpu().numpy(),
            known.double().cpu().numpy(),
            self._places.leaves,
            norm=step.look.reach,
            eps=torch.finfo(known.dtype).eps,
        )

    def _end_step(self) -> _Step | None:
        """From here on the optimizer has only its own sum."""
        step, self._step = self._step, None
        if step is not None:
            self._put_back(step.sums)
        return step

    def _put_back(self, sums: list[Tensor]) -> None:
        for parameter, own in zip(self._optimizer.params, sums, strict=True):
            parameter.summed_grad = _marked_like(own, parameter.summed_grad)

    def _divisor(self) -> float:
        """What the sum was divided by since the noise."""
        if self._optimizer.loss_reduction == "sum":
            return 1.0
        examples = self._optimizer.expected_batch_size * self._optimizer.accumulated_iterations
        return float(examples * self._ranks.world_size)

    def _take_off(self, inserted: Tensor) -> None:
        parameters = self._optimizer.params
        parts = torch.split_with_sizes(inserted, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = parameter.grad - part.view_as(parameter).to(parameter.grad.dtype)


def require_unobserved(optimizer: DPOptimizer) -> None:
    """What one observer inserts would be a training's own for another."""
    if isinstance(getattr(optimizer.add_noise, "__self__", None), Observer):
        raise InputError("Expected an optimizer that is not observed, got one that another observer is at.")


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _checked_sum(parameter: Any, place: int) -> Tensor:
    summed: Tensor = parameter.summed_grad
    shape = None if summed is None else tuple(summed.shape)
    if shape != tuple(parameter.shape):
        raise InputError(
            f"Expected a summed gradient of shape {tuple(parameter.shape)} for parameter {place} of the "
            f"optimizer, got {shape}: is its grad_sample examples x shape?"
        )
    return summed


def _marked_like(new: Tensor, old: Tensor) -> Tensor:
    """Opacus marks a sum that was used; a copy has to bear the same mark."""
    if hasattr(old, "_processed"):
        new._processed = True  # type: ignore[attr-defined]
    return new
