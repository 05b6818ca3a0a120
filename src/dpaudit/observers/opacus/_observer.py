"""One step of an Opacus optimizer with canaries: inserted before the noise, subtracted before the update.

- Insertion: ``optimizer.add_noise`` is replaced while the observer is installed. Just before the noise,
  :meth:`OpacusObserver._insert` adds the canaries of the step to ``p.summed_grad``, through
  ``GradientCanaries.add_to_sum`` or ``InputCanaries.add_to_sum``.
- Release: :meth:`OpacusObserver._before_update`, a pre-step hook of the wrapped optimizer, reads ``p.grad``
  after the noise, the scaling and the reduction over ranks, and records the scores. Post-processing that
  sees only the release, such as a limit of its norm, is undone before (:class:`PostProcessing`).
- Subtraction: the same hook subtracts the canaries from ``p.grad``, so that the update is unchanged.

:class:`Ranks` determines which process inserts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from dpaudit.observers._patching import replaced
from dpaudit.observers.opacus._clipping import (
    SampledWeights,
    TrainedParameters,
    flat,
    precision,
    split_like,
    summed,
)
from dpaudit.observers.opacus._gradient_canaries import CanaryProjection, StepCanaries
from dpaudit.observers.opacus._lints import LintCheck
from dpaudit.observers.opacus._prepared import OpacusParamsReader, updating_optimizer
from dpaudit.observers.opacus._sampling import Membership
from dpaudit.observers.opacus._sums import SumObserver
from dpaudit.recording import Recorder, WholeRunRecorder

_MAX_COORDINATES = 2**20  # whose largest noise is logged
_ROUNDING = 1e-5  # relative difference of two releases that are the same up to rounding
_SAME = 1e-4  # relative difference of two steps' factors or limits
_OVERFLOW = ", or a norm overflows, as in half precision, for canaries of 1e6 clipping norms"
_FACTOR, _NORM, _VALUE = "factor", "norm", "value"

Update = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class _Step:
    """A step between the noise and the update."""

    projection: CanaryProjection
    present: BoolArray
    sums: list[Tensor]  # the optimizer's own clipped sum of the examples
    known: Tensor  # that sum and the other present canaries, along each canary
    total: Tensor  # the sum including the canaries
    noise_norm: float  # the clipping norm to which the noise is calibrated
    inserted: Tensor  # the sum of the clipped canaries
    noise_multiplier: float  # what the optimizer claims
    fields: dict[str, Any]  # of the observed step, from its sum and batch


class OpacusObserver:
    """An observer that adds canaries to the sum before the noise and subtracts them before the update.

    ``membership`` determines which canaries are added. The noise is added once per logical step, however many
    physical batches it has.
    """

    def __init__(
        self,
        optimizer: DPOptimizer,
        recorder: Recorder | WholeRunRecorder,
        params: OpacusParamsReader,
        canaries: StepCanaries,
        membership: Membership,
        *,
        ranks: Ranks,
        lints: LintCheck,
        sums: SumObserver,
        names: Sequence[str] = (),
    ) -> None:
        self._optimizer, self.recorder, self._params, self._lints = optimizer, recorder, params, lints
        self._canaries, self._membership, self._ranks = canaries, membership, ranks
        self._sums, self._trained = sums, TrainedParameters(optimizer)
        self._coordinates = CoordinateSample.of([parameter.numel() for parameter in optimizer.params])
        self._leaves = self._coordinates.named(names)
        self._indices = torch.as_tensor(self._coordinates.indices, device=optimizer.params[0].device)
        self._weights = SampledWeights(optimizer.params, self._coordinates.indices)
        self._step: _Step | None = None
        self._update_depth = 0  # of calls of step() inside each other
        self._is_over = False  # after a step that was not finite
        self._post_processing = PostProcessing()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the steps inside the block; the optimizer is restored at its end."""
        self._add_noise = self._optimizer.add_noise
        with ExitStack() as undo:
            undo.enter_context(replaced(self._optimizer, "add_noise", self._insert_and_add_noise))
            undo.callback(self._end_step)
            inside = updating_optimizer(self._optimizer)
            undo.callback(inside.register_step_pre_hook(self._before_update).remove)
            undo.callback(inside.register_step_post_hook(self._after_update).remove)
            undo.enter_context(self._membership.installed())
            undo.enter_context(self._sums.installed())
            yield

    def _insert_and_add_noise(self) -> None:
        """Replace ``add_noise``, which the optimizer calls once for the sum of a step."""
        if self._is_over:
            self._add_noise()
            return
        self._update_depth = 0  # also after an update that raised an error
        self._trained.require_same(self.recorder.num_done)
        parameters = self._optimizer.params
        sums = [_checked_sum(parameter, index) for index, parameter in enumerate(parameters)]
        fields = self._sums.before_noise(sums)
        for parameter, own in zip(parameters, sums, strict=True):
            parameter.summed_grad = _marked_like(own.clone(), own)
        try:
            with self._sums.paused():
                self._step = self._insert(sums, fields)
            self._add_noise()
        except BaseException:
            self._step = None
            self._restore(sums)
            raise
        if self._ranks.world_size == 1:  # otherwise the gradients of other ranks are added
            self._post_processing.note(parameters)

    @torch.no_grad()
    def _insert(self, sums: list[Tensor], fields: dict[str, Any]) -> _Step:
        """Add the canaries of this step to ``p.summed_grad``; ``sums`` are its previous values."""
        index = self.recorder.num_done
        members = self._membership.members(index)
        projection = self._canaries.add_to_sum(index, members, inserts=self._ranks.inserts)
        batch = flat(sums)
        total = summed(self._optimizer)
        present = np.zeros(self._canaries.num_canaries, dtype=np.bool_)
        present[members] = True
        known = projection.project(batch) + projection.others
        norm, noise = noise_norm(self._optimizer), float(self._optimizer.noise_multiplier)
        return _Step(projection, present, sums, known, total, norm, total - batch, noise, fields)

    @torch.no_grad()
    def _before_update(self, *_: Any) -> None:
        """Read the release that the wrapped optimizer is about to use, and subtract the canaries from it.

        Hooks run once more if ``step()`` of a class calls that of its base class: the same update.
        """
        step, self._update_depth = self._end_step(), self._update_depth + 1
        if step is None and (self._update_depth > 1 or self._is_over):
            return
        if step is None:
            raise InputError(
                "Expected the optimizer to add noise before each update, but it did not call add_noise()."
            )
        divisor = self._divisor()
        final = flat([parameter.grad for parameter in self._optimizer.params])
        released, processed = self._post_processing.before(final, divisor)
        scores = step.projection.project(released) * divisor - self._ranks.sum(step.known)
        inserted = self._ranks.inserted(step.inserted) / divisor
        surplus = inserted if released is final else final - processed(released - inserted)
        for parameter, part in split_like(surplus, self._optimizer.params):
            parameter.grad = parameter.grad - part.to(parameter.grad.dtype)
        values = scores.double().cpu().numpy()
        # a number that is not finite makes a sum of all numbers not finite
        if not (np.isfinite(values).all() and math.isfinite(float(released.sum()))):
            self._end_recording()
            return
        self._params.note_step(step.noise_multiplier)
        self._lints.note_step(step.noise_multiplier)
        self.recorder.observe(self._observed(values, released, divisor, step))

    def _end_recording(self) -> None:
        """Record no further step: the training run may continue, but its gradients reveal nothing more."""
        index, self._is_over = self.recorder.num_done, True
        self._sums.stop()
        gap = (
            f"steps from step {index} on are not audited: its gradients are not finite, so the training run "
            f"diverged{_OVERFLOW if index == 0 else ''}"
        )
        self.recorder.not_covered += (gap,)
        warnings.warn(f"The audit ends: {gap}.", stacklevel=2)

    def _after_update(self, *_: Any) -> None:
        self._update_depth -= 1

    def _observed(self, scores: FloatArray, released: Tensor, divisor: float, step: _Step) -> ObservedStep:
        """Return what was seen of a step."""
        canaries: dict[str, Any] = {
            "scores": scores,
            "present": step.present,
            "lengths": step.projection.lengths,
        }
        if not self.recorder.tests_noise:
            return ObservedStep(**canaries)
        both = torch.stack([vector.index_select(0, self._indices) for vector in (step.total, step.inserted)])
        total, inserted = self._ranks.sum(both).double().cpu().numpy()
        return ObservedStep.of_release(
            released.index_select(0, self._indices).double().cpu().numpy(),
            total,
            clipping_norm=step.noise_norm,
            divisor=divisor,
            eps=precision(step.sums),
            examples=total - inserted,
            weights=self._weights.read(),
            leaves=self._leaves,
            num_canaries=float(np.count_nonzero(step.present)),
            noise_multiplier=step.noise_multiplier,
            **canaries,
            **step.fields,
            **self._of_all_coordinates(released, divisor, step),
        )

    def _of_all_coordinates(self, released: Tensor, divisor: float, step: _Step) -> dict[str, Any]:
        """Return what is seen of all coordinates; nothing if other ranks have a part of the sum."""
        if self._ranks.world_size > 1:
            return {}
        total, unit = step.total, step.noise_norm
        stride = -(-total.numel() // _MAX_COORDINATES)
        noise = torch.add(total[::stride], released[::stride], alpha=-divisor)
        top, norm = torch.stack([largest_absolute(noise), total.norm()]).tolist()
        return {"max_noise": NoiseMaximum(top / unit, noise.numel()), "sum_norm": norm / unit}

    def _divisor(self) -> float:
        """Return the number by which the noisy sum was divided."""
        if self._optimizer.loss_reduction == "sum":
            return 1.0
        examples = self._optimizer.expected_batch_size * self._optimizer.accumulated_iterations
        return float(examples * self._ranks.world_size)

    def _end_step(self) -> _Step | None:
        """Restore the optimizer's own sums; return the step in progress, if any."""
        step, self._step = self._step, None
        if step is not None:
            self._restore(step.sums)
        return step

    def _restore(self, sums: list[Tensor]) -> None:
        for parameter, own in zip(self._optimizer.params, sums, strict=True):
            parameter.summed_grad = _marked_like(own, parameter.summed_grad)


class PostProcessing:
    """What happens to a release between the noise and the update.

    Code that sees only the noisy gradient reveals nothing more about the examples, but the noise is no longer
    what it was: it is smaller after another divisor, and its norm is limited after ``clip_grad_norm_``. Such
    code is recognized by its output, so that the release itself is tested; anything else is tested as a part
    of the release.

    One factor, one largest norm or one largest value is recognized, if it explains all steps: those that it
    changes, and those that stay as they are. A step that it does not explain ends the recognition, because
    what happens to the release may then depend on the data.
    """

    def __init__(self) -> None:
        self._noised: Tensor | None = None
        self._limits: dict[str, float] = {}
        self._unchanged: dict[str, float] = {}  # the largest norm and value of unchanged releases
        self._was_changed = False
        self._is_recognized = True

    def note(self, parameters: list[Any]) -> None:
        """Note the sum with noise, before it is divided."""
        gradients = [parameter.grad for parameter in parameters]
        is_known = self._is_recognized and all(one is not None for one in gradients)
        self._noised = flat(gradients) if is_known else None

    def before(self, update: Tensor, divisor: float) -> tuple[Tensor, Update]:
        """Return the release from which ``update`` was computed, and the function that does so.

        Without post-processing these are ``update`` itself and the identity.
        """
        noised, self._noised = self._noised, None
        if noised is None or noised.shape != update.shape:
            return update, _unchanged
        release = noised / divisor
        norm = float(release.norm())
        if not 0 < norm < float("inf"):
            return update, _unchanged
        is_same = _is_same(update, release)
        if is_same:
            self._note_unchanged(release, norm)
        else:
            self._note_changed(dict(self._candidates(update, release, norm)))
        # a limit that an unchanged release exceeds is none
        self._limits = {
            kind: limit
            for kind, limit in self._limits.items()
            if self._unchanged.get(kind, 0.0) <= limit * (1 + _SAME)
        }
        self._is_recognized = bool(self._limits) or not self._was_changed
        if is_same or not self._limits:
            return update, _unchanged
        return release, _update(*next(iter(self._limits.items())))

    def _note_unchanged(self, release: Tensor, norm: float) -> None:
        reached = {_FACTOR: math.inf, _NORM: norm, _VALUE: float(release.abs().max())}
        self._unchanged = {kind: max(one, self._unchanged.get(kind, 0.0)) for kind, one in reached.items()}

    def _note_changed(self, found: dict[str, float]) -> None:
        """Keep the constants that explain this step as well as all earlier ones that were changed."""
        known = self._limits if self._was_changed else found
        self._limits = {
            kind: known[kind]
            for kind, limit in found.items()
            if kind in known and abs(limit - known[kind]) <= _SAME * known[kind]
        }
        self._was_changed = True

    def _candidates(self, update: Tensor, release: Tensor, norm: float) -> list[tuple[str, float]]:
        """Return the constants, at least one of which must be the same in all steps."""
        factor = float(update @ release) / norm**2
        if factor > 0 and _is_same(update, factor * release):
            limited = [(_NORM, factor * norm)] if factor < 1 else []
            return [(_FACTOR, factor), *limited]
        value = float(update.abs().max())
        return [(_VALUE, value)] if value > 0 and _is_same(update, release.clamp(-value, value)) else []


def _is_same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= _ROUNDING * float(other.norm())


def _unchanged(release: Tensor) -> Tensor:
    return release


def _update(kind: str, limit: float) -> Update:
    def update(release: Tensor) -> Tensor:
        if kind == _VALUE:
            return release.clamp(-limit, limit)
        if kind == _NORM:
            return release * torch.clamp(limit / release.norm(), max=1.0)
        return release * limit

    return update


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
        raise InputError("Expected an optimizer that is not yet observed, got one with another observer.")


def _checked_sum(parameter: Any, index: int) -> Tensor:
    summed: Tensor = parameter.summed_grad
    shape = None if summed is None else tuple(summed.shape)
    if shape != tuple(parameter.shape):
        raise InputError(
            f"Expected a summed gradient of shape {tuple(parameter.shape)} for parameter {index} of the "
            f"optimizer, got {shape}: does its grad_sample have shape examples x parameter shape?"
        )
    return summed


def _marked_like(new: Tensor, old: Tensor) -> Tensor:
    """Copy the mark that Opacus sets on a used sum from ``old`` to ``new``."""
    if hasattr(old, "_processed"):
        new._processed = True  # type: ignore[attr-defined]
    return new


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
