"""What happens between the noise of a step and the next release: to the noisy gradient, and to the weights.

:class:`PostProcessing` returns the :class:`Release` from which the gradients of an update were computed.
:class:`RepeatedUpdate` shows whether an update is a function of the release, :class:`WeightWatch` whether
weights change after it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._torch import largest_absolute
from dpaudit._types import FloatArray
from dpaudit.observers._arrays import attribute_restored, replaced
from dpaudit.observers.opacus._clipping import (
    CoordinateIndex,
    at_least_single,
    flat,
    tensor_norms,
    unwatched,
)
from dpaudit.observers.opacus._prepared import updating_optimizer
from dpaudit.observers.opacus._snapshot import TorchSnapshot, has_state_dict, is_object

_MAX_COORDINATES = 2**20  # whose largest values are noted
_ROUNDING = 1e-5  # relative difference of two releases that are the same up to rounding
_SAME = 1e-4  # relative difference of two steps' factors or limits
_FACTOR, _NORM, _VALUE = "factor", "norm", "value"
# Updates after which values of weights are compared, in two passes over all of them: measured 1.1 ms of 0.2 M
# parameters, where a step with ghost clipping takes 4.3 ms and may take three times that in the first ten.
_READ, _EVERY = (0, 1, 2, 5, 9), 16
_REPEATED = (0, 3, 9)  # steps whose updates are repeated: the first, and later ones for optimizers with state
_LIBRARIES = ("torch.", "opacus.", "accelerate.")  # whose updates are functions of the release

Update = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Release:
    """A noisy gradient, and how the gradients of the update were computed from it; None if not changed."""

    tensors: list[Tensor]
    numbers: Tensor  # at the coordinates that are read in the step
    norm: float
    update: Update | None = None

    def is_finite(self) -> bool:
        """Return whether all numbers are finite, also if their squares are not."""
        return math.isfinite(self.norm) or all(bool(tensor.isfinite().all()) for tensor in self.tensors)


class PostProcessing:
    """What happens to a release between the noise and the update.

    Code that sees only the noisy gradient reveals nothing more about the examples, but the noise is no longer
    what it was: it is smaller after another divisor, and its norm is limited after ``clip_grad_norm_``. Such
    code is recognized by its output, so that the release itself is tested; anything else is tested as a part
    of the release.

    One factor, one largest norm or one largest value is recognized, if it explains all steps: those that it
    changes, and those that stay as they are. A step that it does not explain ends the recognition, because
    what happens to the release may then depend on the data. Numbers that are set to zero, as by compression,
    are recognized if :class:`RepeatedUpdate` has shown that the update is a function of the release.

    Releases are kept as lazy copies, which share the memory of the gradients until these are changed; version
    counters show that they were not.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] | None = None
        self._versions: list[tuple[Tensor, int]] = []
        self._is_divided = self._is_scaling = False
        self._limits: dict[str, float] = {}
        self._unchanged: dict[str, float] = {}  # the largest norm and value of unchanged releases
        self._was_changed = False
        self._is_recognized = True
        self.follows_release: bool | None = None
        """Whether the repeated updates were the same; None if none was repeated."""

    def note(self, parameters: list[Any], *, is_divided: bool = False) -> None:
        """Note the sum with noise."""
        gradients = [parameter.grad for parameter in parameters]
        self._copies, self._versions, self._is_divided = None, [], is_divided
        if self._is_recognized and all(gradient is not None for gradient in gradients):
            self._versions = [(gradient, gradient._version) for gradient in gradients]
            self._copies = [_lazy_copy(gradient) for gradient in gradients]

    def before_scaling(self, parameters: list[Any]) -> None:
        """Prepare for code that divides the sum, unless other code has changed it before."""
        self._is_scaling = self._copies is not None and self._is_as_noted(
            [parameter.grad for parameter in parameters]
        )
        if self._is_scaling:
            self._copies = None

    def after_scaling(self, parameters: list[Any]) -> None:
        """Note the divided sum."""
        if self._is_scaling:
            self._is_scaling = False
            self.note(parameters, is_divided=True)

    def _is_as_noted(self, gradients: Sequence[Tensor]) -> bool:
        return len(gradients) == len(self._versions) and all(
            gradient is noted and gradient._version == version
            for gradient, (noted, version) in zip(gradients, self._versions, strict=True)
        )

    def before(self, gradients: list[Tensor], divisor: float, index: CoordinateIndex) -> Release:
        """Return the release from which the ``gradients`` of an update were computed.

        It is read at the coordinates of ``index``.
        """
        copies, self._copies = self._copies, None
        versions_match = self._is_divided and self._is_as_noted(gradients)
        self._versions = []
        update = Release(gradients, index.read(gradients), total_norm(gradients))
        if copies is None or not 0 < update.norm < math.inf:
            return update
        if versions_match:
            self._note_unchanged(update)
            return update
        tensors = copies if self._is_divided else [copy / divisor for copy in copies]
        return self._recognized(update, Release(tensors, index.read(tensors), total_norm(tensors)))

    def _recognized(self, update: Release, release: Release) -> Release:
        """Return the release, with what made an update of it if that is recognized, or else the update."""
        shapes = [[tensor.shape for tensor in noted.tensors] for noted in (release, update)]
        if not 0 < release.norm < math.inf or shapes[0] != shapes[1]:
            return update
        after, before = flat(update.tensors), flat(release.tensors)
        if _is_same(after, before):
            self._note_unchanged(release)
            return update
        if self.follows_release and bool(((after == before) | (after == 0)).all()):
            is_kept = after != 0
            return replace(release, update=lambda numbers: numbers * is_kept)
        self._note_changed(dict(self._candidates(after, before, release.norm)))
        if not self._limits:
            return update
        return replace(release, update=_update(*next(iter(self._limits.items()))))

    def _note_unchanged(self, release: Release) -> None:
        numbers = release.tensors if self._was_changed else [release.numbers]
        largest = max(float(largest_absolute(values)) for values in evenly_spaced(numbers))
        reached = {_FACTOR: math.inf, _NORM: release.norm, _VALUE: largest}
        self._unchanged = {
            kind: max(value, self._unchanged.get(kind, 0.0)) for kind, value in reached.items()
        }
        self._drop_exceeded()

    def _drop_exceeded(self) -> None:
        """Drop limits that an unchanged release exceeds."""
        self._limits = {
            kind: limit
            for kind, limit in self._limits.items()
            if self._unchanged.get(kind, 0.0) <= limit * (1 + _SAME)
        }
        self._is_recognized = bool(self._limits) or not self._was_changed

    def _note_changed(self, candidates: dict[str, float]) -> None:
        """Keep the constants that explain this step as well as all earlier ones that were changed."""
        earlier = self._limits if self._was_changed else candidates
        self._limits = {
            kind: earlier[kind]
            for kind, limit in candidates.items()
            if kind in earlier and abs(limit - earlier[kind]) <= _SAME * earlier[kind]
        }
        self._was_changed = True
        self._drop_exceeded()

    def _candidates(self, update: Tensor, release: Tensor, norm: float) -> list[tuple[str, float]]:
        """Return the constants, at least one of which must be the same in all steps."""
        factor = float(update @ release) / norm**2
        if factor > 0 and _is_same(update, factor * release):
            limited = [(_NORM, factor * norm)] if factor < 1 else []
            return [(_FACTOR, factor), *limited]
        value = float(update.abs().max())
        return [(_VALUE, value)] if value > 0 and _is_same(update, release.clamp(-value, value)) else []


def _lazy_copy(tensor: Tensor) -> Tensor:
    """Return a copy that shares memory until either is changed, where torch supports that."""
    try:
        return torch._lazy_clone(tensor)
    except (AttributeError, RuntimeError):  # memory that torch did not allocate
        return tensor.clone()


def total_norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of the concatenation."""
    return float(np.linalg.norm(tensor_norms(tensors)))


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    return float((tensor - other).norm()) <= _ROUNDING * float(other.norm())


def _update(kind: str, limit: float) -> Update:
    def update(release: Tensor) -> Tensor:
        if kind == _VALUE:
            return release.clamp(-limit, limit)
        if kind == _NORM:
            return release * torch.clamp(limit / release.norm(), max=1.0)
        return release * limit

    return update


def stride_of(tensors: Sequence[Tensor]) -> int:
    return -(-sum(map(torch.numel, tensors)) // _MAX_COORDINATES)


def evenly_spaced(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield evenly spaced numbers of the concatenation, a million at most, tensor by tensor."""
    stride, offset = stride_of(tensors), 0
    for tensor in tensors:
        first = -offset % stride
        offset += tensor.numel()
        if first < tensor.numel():
            yield at_least_single(tensor.detach().reshape(-1)[first::stride])


class WeightWatch:
    """The trained parameters between an update and the next release, where nothing should change them.

    Version counters show a change in every step, except one by ``p.data``. So values are compared too: in the
    first steps, in some later ones, and after a first change, because weights that are exchanged for a while,
    as for an evaluation with averages, are the same again.
    """

    def __init__(self, parameters: Sequence[Any], names: Sequence[str], index: CoordinateIndex) -> None:
        self._parameters, self._names, self._index = parameters, names, index
        self._num_updates, self._has_changed = 0, False
        self.note_update()

    def note_update(self) -> None:
        """Note the weights at the end of an update."""
        is_read = self._num_updates in _READ or self._num_updates % _EVERY == 0 or self._has_changed
        self._num_updates += 1
        self._versions = [parameter._version for parameter in self._parameters]
        self._values = self.read() if is_read else None

    @torch.no_grad()
    def read(self) -> list[FloatArray]:
        """Return the norm of each parameter, and its numbers at the coordinates."""
        norms, numbers = tensor_norms(self._parameters), self.numbers()
        columns = zip(norms, self._index.slices, strict=True)
        return [np.append(numbers[positions], norm) for norm, positions in columns]

    def numbers(self) -> FloatArray:
        """Return the weights at the coordinates, as they are now."""
        return np.asarray(self._index.read(self._parameters).double().cpu())

    def changed(self) -> tuple[str, ...] | None:
        """Return the names of the parameters that changed since the update; None if that is not known."""
        pairs = zip(self._parameters, self._versions, strict=True)
        is_touched = any(parameter._version != version for parameter, version in pairs)
        self._has_changed = self._has_changed or is_touched
        if self._values is None:
            return None if is_touched else ()
        rows = zip(self._names, self._values, self.read(), strict=True)
        return tuple(name for name, old, new in rows if not np.array_equal(old, new, equal_nan=True))


class RepeatedUpdate:
    """The update of an optimizer, which must be the same with other sums and rows if the release is the same.

    Updates by torch and Opacus are. Code of others is run again in a few steps, from the noisy sum to the
    weights: twice as it is, and once with random numbers in place of sums and rows. Everything that it
    changes is restored, random number generators included.
    """

    def __init__(self, optimizer: DPOptimizer, weights: WeightWatch) -> None:
        self._optimizer, self._weights = optimizer, weights
        self._inner = updating_optimizer(optimizer)

    def is_due(self, index: int) -> bool:
        """Return whether the update of this step must be repeated."""
        steps = [unwatched(self._optimizer, name) for name in ("step", "pre_step", "scale_grad")]
        steps += [unwatched(inner, "step") for inner in (self._optimizer.original_optimizer, self._inner)]
        return index in _REPEATED and not all(map(_is_of_library, steps))

    def follows_release(self) -> bool | None:
        """Return whether the update of the noisy sum in ``p.grad`` is the same; None if that is unknown."""
        held = [*vars(self._optimizer).values(), *vars(self._inner).values()]
        if any(map(_may_have_hidden_state, held)):
            return None
        try:
            return self._repeat()
        except Exception:  # noqa: BLE001  # code of others that cannot run again may raise anything
            return None

    def _repeat(self) -> bool | None:
        optimizer, parameters = self._optimizer, self._optimizer.params
        real = [(parameter.summed_grad, getattr(parameter, "grad_sample", None)) for parameter in parameters]
        with self._from_noisy_sum():
            snapshot = TorchSnapshot([optimizer, self._inner])

            def updated(values: Sequence[Any]) -> FloatArray:
                try:
                    for parameter, (total, rows) in zip(parameters, values, strict=True):
                        parameter.summed_grad, parameter.grad_sample = total.clone(), rows
                    optimizer.step()
                    return np.concatenate(self._weights.read())
                finally:
                    snapshot.restore()

            others = [(_random_like(total), _random_like(rows, is_rows=True)) for total, rows in real]
            first, again, other = updated(real), updated(real), updated(others)
        if not np.array_equal(first, again, equal_nan=True):
            return None
        return np.array_equal(first, other, equal_nan=True)

    @contextmanager
    def _from_noisy_sum(self) -> Iterator[None]:
        """Make ``step()`` begin with the noisy sum in ``p.grad``, without hooks, and remove sums and rows."""
        optimizer, parameters = self._optimizer, self._optimizer.params
        noisy = [parameter.grad for parameter in parameters]

        def add_noise() -> None:
            for parameter, gradient in zip(parameters, noisy, strict=True):
                parameter.grad = gradient.clone()

        with ExitStack() as undo:
            for name in ("clip_and_accumulate", "accumulate", "_check_skip_next_step"):
                undo.enter_context(replaced(optimizer, name, lambda *_, **__: False))
            undo.enter_context(replaced(optimizer, "add_noise", add_noise))
            undo.enter_context(replaced(optimizer, "scale_grad", unwatched(optimizer, "scale_grad")))
            undo.enter_context(attribute_restored([optimizer], "step_hook"))
            optimizer.step_hook = None
            for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                undo.enter_context(attribute_restored([self._inner], name))
                setattr(self._inner, name, OrderedDict())
            for name in ("summed_grad", "grad_sample"):
                undo.enter_context(attribute_restored(parameters, name))
                for parameter in parameters:  # they are replaced, and take much memory to save
                    setattr(parameter, name, None)
            yield


def _is_of_library(function: Any) -> bool:
    """Return whether a method, and all that it wraps, is code of libraries whose updates are known."""
    while function is not None:
        code = getattr(function, "__func__", function)
        if not getattr(code, "__globals__", {}).get("__name__", "").startswith(_LIBRARIES):
            return False
        function = getattr(code, "__wrapped__", None)
    return True


def _may_have_hidden_state(value: Any) -> bool:
    """Return whether a value is an object whose state cannot be saved."""
    is_saved = isinstance(value, dict | list | tuple | set | Tensor) or has_state_dict(value)
    return is_object(value) and not is_saved


def _random_like(values: Any, *, is_rows: bool = False) -> Any:
    """Return random numbers of the same size, from a generator of their own; rows are all the same."""
    if isinstance(values, list):
        return [_random_like(tensor, is_rows=is_rows) for tensor in values]
    if values is None or not values.numel():
        return values
    size = float(torch.linalg.vector_norm(values.detach().float())) / math.sqrt(values.numel())
    generator = torch.Generator(device=values.device).manual_seed(0)
    shape = (1, *values.shape[1:]) if is_rows else values.shape
    numbers = torch.randn(shape, generator=generator, device=values.device)
    return (numbers * (size or 1.0)).to(values.dtype).expand(values.shape)
