"""One step of an Opacus optimizer with canaries: inserted before the noise, subtracted before the update.

- Insertion: ``optimizer.add_noise`` is replaced while the observer is installed. Just before the noise,
  :meth:`OpacusObserver._insert` adds the canaries of the step to ``p.summed_grad``, as computed by
  ``GradientCanaries.added`` or ``InputCanaries.added``.
- Release: :meth:`OpacusObserver._before_update`, a pre-step hook of the wrapped optimizer, reads ``p.grad``
  after the noise, the scaling and the reduction over ranks, and records the scores. Post-processing that
  sees only the release, such as a limit of its norm, is undone before (:class:`PostProcessing`).
- Subtraction: the same hook subtracts the canaries from ``p.grad``, so that the update is unchanged.

:class:`Ranks` determines which process inserts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, distributed

from dpaudit._torch import largest_absolute
from dpaudit._types import BoolArray, FloatArray
from dpaudit.diagnostics import CoordinateSample, NoiseMaximum, ObservedStep
from dpaudit.errors import InputError
from dpaudit.observers._arrays import replaced
from dpaudit.observers._session import StepRecorder
from dpaudit.observers.opacus._check import LintCheck
from dpaudit.observers.opacus._clipping import (
    CoordinateIndex,
    flat,
    is_of_opacus,
    precision,
    split_like,
    watched,
)
from dpaudit.observers.opacus._gradient_canaries import CanaryProjection, StepCanaries
from dpaudit.observers.opacus._post_processing import (
    PostProcessing,
    Release,
    RepeatedUpdate,
    WeightWatch,
    evenly_spaced,
    stride_of,
)
from dpaudit.observers.opacus._prepared import OpacusParamsReader, PreparedTraining, updating_optimizer
from dpaudit.observers.opacus._sampling import SampledMembership
from dpaudit.observers.opacus._sums import SumObserver


@dataclass(frozen=True, eq=False)
class _Step:
    """A step between the noise and the update; vectors are at the coordinates of the index."""

    projection: CanaryProjection
    present: BoolArray
    parameters: list[Any]  # of the optimizer
    sums: list[Tensor]  # the optimizer's own tensors, which contain the canaries
    before: Tensor  # the clipped sum of the examples
    after: Tensor  # that sum and the canaries
    background: Tensor  # the sum of the examples and the other present canaries, along each canary
    example_norm: float  # the norm of the sum of the examples
    noise_norm: float  # the clipping norm to which the noise is calibrated
    noise_multiplier: float  # what the optimizer claims
    fields: dict[str, Any]  # of the observed step, from its sum and batch

    @property
    def index(self) -> CoordinateIndex:
        return self.projection.index


class OpacusObserver:
    """An observer that adds canaries to the sum before the noise and subtracts them before the update.

    Coins determine which canaries are added, or a sampler (``drawn``). The noise is added once per logical
    step, however many physical batches it has. Sums and gradients are read and changed at a few coordinates,
    in place.
    """

    def __init__(
        self,
        training: PreparedTraining,
        steps: StepRecorder,
        canaries: StepCanaries,
        drawn: SampledMembership | None,
        *,
        params: OpacusParamsReader,
        coordinates: CoordinateSample,
        ranks: Ranks,
        lints: LintCheck,
        sums: SumObserver,
    ) -> None:
        self._optimizer, self._steps, self._params, self._lints = training.optimizer, steps, params, lints
        self._canaries, self._drawn, self._ranks = canaries, drawn, ranks
        self._sums, self._coordinates, self._positions = sums, coordinates, dict[int, Tensor]()
        self._leaves = coordinates.named([] if training.network is None else training.names)
        self._step: _Step | None = None
        self._update_depth = 0  # of calls of step() inside each other
        self._is_over = False  # in all processes
        self._post_processing = PostProcessing()
        index = CoordinateIndex(coordinates.indices, training.optimizer.params)
        self._weights = WeightWatch(training.optimizer.params, training.names, index)
        self._repeated = RepeatedUpdate(training.optimizer, self._weights)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the steps inside the block; the optimizer is restored at its end."""
        self._add_noise = self._optimizer.add_noise
        guarded = self._steps.guarded
        with ExitStack() as undo:
            undo.enter_context(replaced(self._optimizer, "add_noise", self._insert_and_add_noise))
            before, after = guarded(self._before_scaling), guarded(self._after_scaling)
            undo.enter_context(watched(self._optimizer, "scale_grad", before=before, after=after))
            undo.callback(self._end_run)
            undo.callback(self._end_step)
            inside = updating_optimizer(self._optimizer)
            undo.callback(inside.register_step_pre_hook(self._before_update).remove)
            handle = inside.register_step_post_hook(self._after_update)
            inside._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # others may change weights
            undo.callback(handle.remove)
            if self._drawn is not None:
                undo.enter_context(self._drawn.installed(self._steps))
            undo.enter_context(self._sums.installed(self._steps))
            yield

    def _end_run(self) -> None:
        """Note weights and accounted steps for a run that continues this one."""
        with self._steps.guard():
            accounted = self._lints.end(is_complete=not self._steps.is_over)
            self._steps.history.end(self._weights.numbers(), accounted)

    def _before_scaling(self) -> None:
        """Prepare for ``scale_grad``, which divides the noisy sum."""
        if is_of_opacus(self._optimizer, "scale_grad"):
            self._post_processing.before_scaling(self._optimizer.params)

    def _after_scaling(self, _: Any) -> None:
        self._post_processing.after_scaling(self._optimizer.params)

    def _insert_and_add_noise(self) -> None:
        """Replace ``add_noise``, which the optimizer calls once for the sum of a step."""
        self._update_depth = 0  # also after an update that raised an error
        step = self._step = self._steps.guarded(self._prepared)()
        if not self._is_over and not self._ranks.agree(step is not None, self._optimizer.params):
            self._is_over, self._step = True, None
            self._steps.end("the observation ended in another process, whose warning says why")
        elif step is not None:
            step.index.write(step.sums, step.after)
        versions = [] if step is None else [total._version for total in step.sums]
        try:
            self._add_noise()
        except BaseException:
            self._end_step()
            raise
        self._steps.guarded(self._note_noisy)(versions)

    def _follows_release(self, versions: list[int]) -> bool | None:
        """Return whether the update is a function of the release; None if it cannot be repeated."""
        sums = [parameter.summed_grad for parameter in self._optimizer.params]
        is_apart = [total._version for total in sums] == versions  # sums to which no noise was added in place
        follows = self._repeated.follows_release() if is_apart and self._ranks.world_size == 1 else None
        if follows is None:
            kind = type(updating_optimizer(self._optimizer)).__name__
            self._steps.note_not_covered(
                f"whether the update of {kind} is a function of the release: it cannot be repeated"
            )
        return follows

    @torch.no_grad()
    def _prepared(self) -> _Step:
        """Return the step in progress, whose canaries are not yet in its sums."""
        parameters: list[Any] = self._optimizer.params
        sums = [_checked_sum(parameter, index) for index, parameter in enumerate(parameters)]
        example_norm, fields = self._sums.before_noise(sums)
        fields["changed_weights"] = self._weights.changed()
        with self._sums.paused():
            return self._with_canaries(sums, example_norm, fields)

    def _with_canaries(self, sums: list[Tensor], example_norm: float, fields: dict[str, Any]) -> _Step:
        """Return the step with its canaries."""
        step, coins = self._steps.index, self._canaries.coins
        members = np.flatnonzero(coins.coins(step)) if self._drawn is None else self._drawn.members(step)
        before = self._canaries.index(step).read(sums)
        own_members = members if self._ranks.inserts else members[:0]  # otherwise another rank adds them
        projection, after = self._canaries.added(step, own_members, before)
        present = np.zeros(coins.num_canaries, dtype=np.bool_)
        present[members] = True
        return _Step(
            projection=projection,
            present=present,
            parameters=list(self._optimizer.params),
            sums=sums,
            before=before,
            after=after,
            background=projection.project(before) + projection.others,
            example_norm=example_norm,
            noise_norm=noise_norm(self._optimizer),
            noise_multiplier=float(self._optimizer.noise_multiplier),
            fields=fields,
        )

    def _note_noisy(self, versions: list[int]) -> None:
        """Copy gradients that share the memory of the sums, as where another rank adds the noise."""
        for parameter in self._optimizer.params:
            gradient, total = parameter.grad, parameter.summed_grad
            if (
                gradient is not None
                and gradient.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
            ):
                parameter.grad = gradient.clone()
        if self._step is not None and self._repeated.is_due(self._steps.index):
            follows = self._follows_release(versions)
            self._step.fields["follows_release"] = self._post_processing.follows_release = follows
        if self._ranks.world_size == 1:  # otherwise the gradients of other ranks are added
            self._post_processing.note(self._optimizer.params)

    @torch.no_grad()
    def _before_update(self, *_: Any) -> None:
        """Read the release that the wrapped optimizer is about to use, and subtract the canaries from it.

        Hooks run once more if ``step()`` of a class calls that of its base class: the same update.
        """
        step, self._step, self._update_depth = self._step, None, self._update_depth + 1
        if step is None:
            if self._update_depth == 1:
                self._steps.guarded(_raise_without_noise)()
            return
        # what needs all processes comes first: none may wait for one in which something else fails
        divisor = self._divisor()
        inserted = self._ranks.inserted(step.after - step.before) / divisor
        background = self._ranks.sum(step.background)
        sums = torch.stack([step.after, step.before]).index_select(1, self._sampled(step.index))
        sums, release, observed = self._ranks.sum(sums), None, None
        try:
            if not self._steps.is_over:
                with self._steps.guard():
                    gradients: list[Tensor] = [parameter.grad for parameter in step.parameters]
                    release = self._post_processing.before(gradients, divisor, step.index)
                    scores = step.projection.project(release.numbers) * divisor - background
                    observed = self._observed(scores.double().cpu().numpy(), sums, release, divisor, step)
        finally:
            with self._steps.guard():
                self._subtract(inserted, release, step)
            self._restore(step)
        if observed is not None:
            self._steps.record(observed)

    def _subtract(self, inserted: Tensor, release: Release | None, step: _Step) -> None:
        """Subtract the canaries from the gradients of the update."""
        gradients = [parameter.grad for parameter in step.parameters]
        if release is None or release.update is None:
            numbers = step.index.read(gradients) if release is None else release.numbers
            step.index.write(gradients, numbers - inserted)
            return
        vector = flat(release.tensors)
        vector[torch.as_tensor(step.index.coordinates, device=vector.device)] = release.numbers - inserted
        surplus = flat(gradients) - release.update(vector)
        for parameter, difference in split_like(surplus, step.parameters):
            parameter.grad = parameter.grad - difference.to(parameter.grad.dtype)

    def _after_update(self, *_: Any) -> None:
        self._update_depth -= 1
        if self._update_depth == 0:
            self._steps.guarded(self._weights.note_update)()

    def _observed(
        self, scores: FloatArray, sums: Tensor, release: Release, divisor: float, step: _Step
    ) -> ObservedStep | None:
        """Return what was seen of a step; end the observation if its release is not finite."""
        if not (np.isfinite(scores).all() and release.is_finite()):
            self._steps.end_diverged()
            return None
        self._params.note_step(step.noise_multiplier)
        self._lints.note_step(step.noise_multiplier)
        lengths = step.projection.lengths
        canaries: dict[str, Any] = {"scores": scores, "present": step.present, "lengths": lengths}
        if not self._steps.recorder.tests_noise:
            return ObservedStep(**canaries)
        sampled = self._sampled(step.index)
        total, examples = sums.double().cpu().numpy()
        return ObservedStep.of_release(
            release.numbers.index_select(0, sampled).double().cpu().numpy(),
            total,
            clipping_norm=step.noise_norm,
            divisor=divisor,
            eps=precision(step.sums),
            examples=examples,
            weights=self._weights.numbers(),
            leaves=self._leaves,
            num_canaries=float(np.count_nonzero(step.present)),
            noise_multiplier=step.noise_multiplier,
            **canaries,
            **step.fields,
            **self._of_all_coordinates(release.tensors, divisor, step),
        )

    def _sampled(self, index: CoordinateIndex) -> Tensor:
        """Return the positions of the coordinates whose noise is logged."""
        if id(index) not in self._positions:
            positions = index.positions(self._coordinates.indices)
            self._positions = {id(index): torch.as_tensor(positions, device=self._optimizer.params[0].device)}
        return self._positions[id(index)]

    def _of_all_coordinates(self, released: list[Tensor], divisor: float, step: _Step) -> dict[str, Any]:
        """Return what is logged about all coordinates; nothing if other ranks have a part of the sum."""
        if self._ranks.world_size > 1:
            return {}
        largest = [
            largest_absolute(torch.add(total, gradient, alpha=-divisor))
            for total, gradient in zip(evenly_spaced(step.sums), evenly_spaced(released), strict=True)
        ]
        num_coordinates = -(-sum(map(torch.numel, released)) // stride_of(released))
        before, after = torch.stack([step.before, step.after]).double().norm(dim=1).tolist()
        norm = math.sqrt(max(step.example_norm**2 - before**2, 0.0) + after**2)
        top = float(torch.stack(largest).max())
        unit = step.noise_norm
        return {"max_noise": NoiseMaximum(top / unit, num_coordinates), "sum_norm": norm / unit}

    def _divisor(self) -> float:
        """Return the number by which the noisy sum was divided."""
        if self._optimizer.loss_reduction == "sum":
            return 1.0
        examples = self._optimizer.expected_batch_size * self._optimizer.accumulated_iterations
        return float(examples * self._ranks.world_size)

    @torch.no_grad()
    def _end_step(self) -> None:
        """Restore the optimizer's own sums if a step is in progress."""
        step, self._step = self._step, None
        if step is not None:
            self._restore(step)

    def _restore(self, step: _Step) -> None:
        step.index.write(step.sums, step.before)
        for parameter, total in zip(step.parameters, step.sums, strict=True):
            if hasattr(parameter.summed_grad, "_processed"):  # the mark that Opacus sets on a used sum
                total._processed = True  # type: ignore[attr-defined]
            parameter.summed_grad = total


def noise_norm(optimizer: DPOptimizer) -> float:
    """Return the largest norm of a clipped example, which the noise is a multiple of.

    With per-layer clipping, it includes layers that are too small for canaries. Adaptive clipping changes it
    after each step.
    """
    norms = getattr(optimizer, "max_grad_norms", None)
    return float(optimizer.max_grad_norm) if norms is None else math.hypot(*map(float, norms))


def check_unobserved(optimizer: DPOptimizer) -> None:
    """Raise if another observer is installed: its canaries would be mistaken for examples."""
    if isinstance(getattr(optimizer.add_noise, "__self__", None), OpacusObserver):
        raise InputError("The optimizer already has another observer; observe it only once.")


def _raise_without_noise() -> None:
    raise InputError(
        "The optimizer did not call add_noise() before this update, so there is no noise to observe."
    )


def _checked_sum(parameter: Any, index: int) -> Tensor:
    summed: Tensor = parameter.summed_grad
    shape = None if summed is None else tuple(summed.shape)
    if shape != tuple(parameter.shape):
        raise InputError(
            f"The summed gradient of parameter {index} of the optimizer must have shape "
            f"{tuple(parameter.shape)}, got {shape}. Does its grad_sample have shape examples x parameter "
            "shape?"
        )
    return summed


class Ranks:
    """The processes whose gradients the optimizer sums in a step, and which of them insert canaries.

    Canaries selected by coins are added to the sum of the last rank, so that they reach the noise only
    through the reduction. Sampled canaries are added to the sum of the rank whose sampler drew them.
    """

    def __init__(self, optimizer: DPOptimizer, *, sampling: bool) -> None:
        is_distributed = hasattr(optimizer, "reduce_gradients")
        self.world_size: int = distributed.get_world_size() if is_distributed else 1
        self._last = self.world_size - 1
        self._all_insert = sampling or self.world_size == 1
        self.inserts = self._all_insert or distributed.get_rank() == self._last

    def agree(self, is_ready: bool, parameters: Sequence[Tensor]) -> bool:
        """Return whether all ranks are ready for a step with canaries."""
        if self.world_size == 1:
            return is_ready
        return float(self.sum(parameters[0].new_full((1,), float(is_ready)))) == self.world_size

    def agree_on(self, seed: int) -> int:
        """Return the seed of the first rank on all ranks."""
        if self.world_size == 1:
            return seed
        seeds: list[Any] = [seed]
        distributed.broadcast_object_list(seeds, src=0)
        return int(seeds[0])

    def sum(self, local: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        if self.world_size == 1:
            return local
        summed = local.clone()
        distributed.all_reduce(summed)
        return summed

    def inserted(self, local: Tensor) -> Tensor:
        """Return the sum of the canaries of all ranks, on all ranks."""
        if self._all_insert:
            return self.sum(local)
        shared = local if self.inserts else torch.empty_like(local)
        distributed.broadcast(shared, src=self._last)
        return shared
