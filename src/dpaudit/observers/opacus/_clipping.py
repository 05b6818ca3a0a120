"""Clipping with Opacus' own code, which clips per-example gradients and adds them to ``p.summed_grad``.

:func:`clip_for` returns an adapter for the clipping of an optimizer, or raises if it cannot be observed. The
row of a canary takes the same path as the rows of examples, and changes nothing but the sum.
"""

from __future__ import annotations

import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, FSDPOptimizerFastGradientClipping
from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer
from torch import Tensor, nn

from dpaudit._faults import machine_fault
from dpaudit._torch import GradientRows, SharedRows
from dpaudit._types import FloatArray, IntArray
from dpaudit.errors import InputError
from dpaudit.observers._patching import attribute_restored, replaced

_UNSUPPORTED: dict[type, str] = {
    DistributedPerLayerOptimizer: "it clips and adds noise during the backward pass, one layer at a time; "
    "make_private returns a SimpleDistributedPerLayerOptimizer, which can be observed",
    FSDPOptimizerFastGradientClipping: "no process holds a whole gradient; observe the same training code "
    'with grad_sample_mode="ghost" on a smaller model',
}
_CHUNK_ENTRIES = 2**24  # matrix entries of full rows that are in memory together
_COMPACT_CHUNK = 160  # at which a matrix of one chunk takes as long as a call of the library for one layer
_FEW_WEIGHTS = 2**18  # of a model, which are copied faster than a few of each parameter are selected
_WRAPPED = "wrapped_by_dpaudit"  # attribute of wrappers: the attribute of the object that they hide, or None
_CLIPPING = ("clip_and_accumulate", "_get_flat_grad_sample", "grad_samples", "params", "param_groups")


class OpacusClip(ABC):
    """A way to add clipped rows to ``p.summed_grad`` with the library's own code.

    Everything else that this code changes is restored.
    """

    not_covered: tuple[str, ...] = ()

    @property
    @abstractmethod
    def needs_full_rows(self) -> bool:
        """Whether canaries must be clipped as rows with an entry for each parameter, which is slower."""

    @abstractmethod
    def add_canaries(self, rows: GradientRows) -> None:
        """Clip and add ``rows``, of which there is at least one."""

    @abstractmethod
    def batch_sizes(self) -> list[int]:
        """Return the number of examples in each backward pass that the optimizer is about to clip."""

    @abstractmethod
    def pending_batch_sizes(self) -> list[int]:
        """Return the same between steps, for the passes that have not been clipped yet."""


class PerSampleClip(OpacusClip):
    """Clipping of materialized per-example gradients by the optimizer: hooks, functorch, ew.

    Opacus' own code clips canaries as rows that contain only the coordinates of a few of them
    (:class:`_CompactOptimizer`). Code that is not part of Opacus may depend on anything, so it gets rows with
    an entry for each parameter.
    """

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def needs_full_rows(self) -> bool:
        return not all(_is_of_opacus(self._optimizer, name) for name in _CLIPPING)

    def add_canaries(self, rows: GradientRows) -> None:
        if self.needs_full_rows:
            for chunk in rows.chunks(max(1, _CHUNK_ENTRIES // rows.num_parameters)):
                self.add_to_sum(chunk.dense())
            return
        compact = _CompactOptimizer(self._optimizer)
        for chunk in rows.chunks(_compact_chunk(len(self._optimizer.params), rows)):
            compact.add_to_sum(chunk)

    def add_to_sum(self, rows: Tensor) -> None:
        """Clip and add ``rows`` (gradients x parameters)."""
        parameters = self._optimizer.params
        with restored(self._optimizer), attribute_restored(parameters, "grad_sample"):
            for parameter, part in split_like(rows, parameters):
                parameter.grad_sample = part.to(parameter.dtype)
            with _own_clipping(self._optimizer, len(rows)):
                self._optimizer.clip_and_accumulate()

    def batch_sizes(self) -> list[int]:
        samples = getattr(self._optimizer.params[0], "grad_sample", None)
        parts = samples if isinstance(samples, list) else [] if samples is None else [samples]
        return [len(part) for part in parts if not hasattr(part, "_processed")]

    def pending_batch_sizes(self) -> list[int]:
        return self.batch_sizes()


@contextmanager
def _own_clipping(optimizer: DPOptimizer, num_rows: int) -> Iterator[None]:
    """Say what is special about the call if it raises: its rows are no rows of the batch."""
    try:
        yield
    except Exception as error:
        if _is_of_opacus(optimizer, "clip_and_accumulate") or machine_fault(error) is not None:
            raise
        text = (str(error).splitlines() or ["no message"])[0]
        raise InputError(
            "Expected clip_and_accumulate() to clip any rows in grad_samples: canaries are clipped in a call "
            f"of their own, after that for the batch, and with {num_rows} of them it raised "
            f"{type(error).__name__}: {text} (Does it use one weight per example of the batch? Compute the "
            "weights from grad_samples.)"
        ) from error


class GhostClip(OpacusClip):
    """Ghost clipping: the model computes norms and reweights the loss; canaries are added after the norms."""

    not_covered = (
        "ghost clipping computes norms from activations, which gradient canaries do not have: a layer whose "
        "norm is computed incorrectly is not detected",
    )

    def __init__(self, optimizer: DPOptimizer, module: Any) -> None:
        self._optimizer, self._module = optimizer, module

    @property
    def needs_full_rows(self) -> bool:
        return False

    def add_canaries(self, rows: GradientRows) -> None:
        own, trainable = self._optimizer.params, self._module.trainable_parameters
        numbers, coordinates, values = rows.entries()
        where = torch.as_tensor(numbers, device=values.device)
        with restored(self._module), attribute_restored(trainable, "_norm_sample"):
            for parameter in trainable:
                parameter._norm_sample = values.new_zeros(len(rows))
            for parameter, part, _ in layer_slices(coordinates, own):
                squares = values.new_zeros(len(rows)).index_add_(0, where[part], values[part].square())
                parameter._norm_sample = squares.sqrt().to(parameter.dtype)
            weights = self._module.get_clipping_coef().to(values.dtype)
        total = values.new_zeros(rows.num_parameters)
        total.index_add_(0, torch.as_tensor(coordinates, device=values.device), weights[where] * values)
        with attribute_restored(own, "grad"):
            for parameter, piece in split_like(total, own):
                parameter.grad = piece.to(parameter.dtype)
            self._optimizer.accumulate()

    def batch_sizes(self) -> list[int]:
        norms = self._module._per_sample_gradient_norms
        return [] if norms is None else [len(norms)]

    def pending_batch_sizes(self) -> list[int]:
        return []  # norms remain after use


class _CompactOptimizer:
    """An optimizer whose parameters are the coordinates of a few canaries only.

    It runs the clipping code of the observed optimizer with the same settings. Each parameter tensor has a
    stand-in with the same number of dimensions; its sum holds the observed sum at the coordinates, to which
    the code adds the clipped rows. So neither norms nor sums depend on the other coordinates, at which
    canaries are zero, and the cost does not depend on the number of parameters.
    """

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._parameters = optimizer.params
        self._inside: Any = object.__new__(type(optimizer))
        vars(self._inside).update(_attributes(optimizer))

    def add_to_sum(self, rows: GradientRows) -> None:
        """Clip ``rows`` and add them to ``p.summed_grad``."""
        stand_ins, indices = [], []
        for parameter, index, matrix in self._parts(rows):
            indices.append(index)
            stand_ins.append(_stand_in(parameter, index, matrix))
        self._inside.original_optimizer = SimpleNamespace(param_groups=[{"params": stand_ins}])
        self._inside.clip_and_accumulate()
        for parameter, index, stand_in in zip(self._parameters, indices, stand_ins, strict=True):
            _write(parameter.summed_grad, index, stand_in.summed_grad)

    def _parts(self, rows: GradientRows) -> Iterator[tuple[Any, Tensor, Tensor]]:
        """Yield each parameter with the coordinates that rows have in it, and the rows at these."""
        if isinstance(rows, SharedRows):
            values, places = rows.matrix(), torch.as_tensor(rows.places, device=rows.like.device)
            for parameter, own, offset in layer_slices(rows.places, self._parameters):
                matrix = values[:, own] if own.stop > own.start else values.new_zeros(len(rows), 1)
                yield parameter, places[own] - offset, matrix.to(parameter.dtype)
            return
        numbers, coordinates, values = rows.entries()
        used, columns = np.unique(coordinates, return_inverse=True)  # a canary may be there twice
        parts = zip(
            layer_slices(coordinates, self._parameters), layer_slices(used, self._parameters), strict=True
        )
        where = torch.as_tensor(np.stack([numbers, columns]), device=values.device)
        used_there = torch.as_tensor(used, device=values.device)
        for (parameter, part, _), (_, own, offset) in parts:
            index = used_there[own] - offset
            matrix = values.new_zeros(len(rows), max(len(index), 1), dtype=parameter.dtype)
            matrix[where[0, part], where[1, part] - own.start] = values[part].to(parameter.dtype)
            yield parameter, index, matrix


def _stand_in(parameter: Any, index: Tensor, rows: Tensor) -> Any:
    """Return a parameter with the coordinates ``index``, or with one of its own if there are none."""
    shape = (rows.shape[1], *[1] * (parameter.dim() - 1)) if parameter.dim() else ()
    total = parameter.summed_grad.reshape(-1).index_select(0, index)
    stand_in: Any = nn.Parameter(parameter.detach().new_zeros(shape))
    stand_in.summed_grad = total.view(shape) if len(index) else total.new_zeros(shape)
    stand_in.grad_sample = rows.reshape(-1, *shape)
    return stand_in


def _write(total: Tensor, index: Tensor, values: Tensor) -> None:
    """Write values to the coordinates ``index`` of a sum."""
    if len(index) == 0:
        return
    vector = total.reshape(-1)  # a copy if the sum is not contiguous
    vector.index_copy_(0, index, values.reshape(-1).to(total.dtype))
    if not total.is_contiguous():
        total.copy_(vector.view(total.shape))


def _compact_chunk(num_layers: int, rows: GradientRows) -> int:
    """Return the number of canaries to clip together: fewer calls against smaller matrices."""
    if isinstance(rows, SharedRows):  # the matrix does not grow with the square of their number
        return len(rows)
    return max(1, round(_COMPACT_CHUNK * math.sqrt(num_layers / rows.num_entries)))


def _is_of_opacus(optimizer: DPOptimizer, name: str) -> bool:
    """Return whether a method or property is defined by Opacus, not by a subclass or a patch."""
    found = inspect.getattr_static(type(optimizer), name)
    function = found.fget if isinstance(found, property) else found
    own = vars(optimizer).get(name)
    if getattr(own, _WRAPPED, own) is not None or not inspect.isfunction(function):
        return False
    # the module of the code itself: functools.wraps changes __module__
    return bool(function.__globals__["__name__"].startswith("opacus."))


def clip_for(optimizer: Any, module: Any) -> OpacusClip:
    """Return an adapter for the clipping of ``optimizer``, or raise an error if it cannot be observed."""
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            "Expected the optimizer that PrivacyEngine.make_private returned, got a "
            f"{type(optimizer).__name__}, which is not private."
        )
    for kind, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, kind):
            raise InputError(
                f"Expected an optimizer that can be observed, got a {type(optimizer).__name__}: {reason}."
            )
    if not isinstance(optimizer, DPOptimizerFastGradientClipping):
        return PerSampleClip(optimizer)
    if not hasattr(module, "get_clipping_coef"):
        raise InputError(
            "Expected module=..., the model that PrivacyEngine.make_private returned, which does the ghost "
            f"clipping; got {type(module).__name__}."
        )
    return GhostClip(optimizer, module)


class TrainedParameters:
    """The parameters that an optimizer trains when it is observed, on which the canaries are laid out."""

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._optimizer, self._first = optimizer, list(optimizer.params)

    def require_same(self, index: int) -> None:
        """Raise if the optimizer trains other parameters in the step ``index``, as after unfreezing."""
        now = self._optimizer.params
        if len(now) == len(self._first) and all(map(operator.is_, now, self._first)):
            return
        raise InputError(
            f"Expected the optimizer to train the same {len(self._first)} parameter tensors in all observed "
            f"steps, got {len(now) if len(now) != len(self._first) else 'others'} in step {index}: were "
            "layers frozen or unfrozen? Observe each phase of the training run in a with block of its own, "
            "which starts after the change."
        )


class SampledWeights:
    """The weights at a few coordinates of the concatenation of all parameters."""

    def __init__(self, parameters: Sequence[Any], indices: IntArray) -> None:
        self._parameters, device = parameters, parameters[0].device
        self._indices = torch.as_tensor(indices, device=device)
        ends = np.cumsum([parameter.numel() for parameter in parameters])
        owners = np.searchsorted(ends, indices, side="right")
        self._inside = [
            torch.as_tensor(indices[owners == index] - start, device=device)
            for index, start in enumerate([0, *ends[:-1]])
        ]
        self._is_small = bool(ends[-1] <= _FEW_WEIGHTS)

    def read(self) -> FloatArray:
        """Return the weights as they are now."""
        if self._is_small:  # fewer calls, which take most of the time
            found = flat(self._parameters).index_select(0, self._indices)
        else:
            parts = zip(self._parameters, self._inside, strict=True)
            found = torch.cat([one.detach().reshape(-1)[inside] for one, inside in parts if len(inside)])
        return np.asarray(found.double().cpu())


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of all parts as one vector, in single precision or better."""
    return at_least_single(torch.cat([part.detach().reshape(-1) for part in parts]))


def at_least_single(values: Tensor) -> Tensor:
    """Return numbers in half precision as single precision, in which arithmetic adds no errors to theirs."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def precision(parts: Sequence[Tensor]) -> float:
    """Return the relative precision of the coarsest part, such as a layer in half precision."""
    return max(torch.finfo(part.dtype).eps for part in parts)


def summed(optimizer: DPOptimizer) -> Tensor:
    """Return the sum of the clipped gradients as one vector."""
    return flat([parameter.summed_grad for parameter in optimizer.params])


def split_like(vectors: Tensor, parameters: Sequence[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter with its slice of the last dimension, in the parameter's shape."""
    parts = torch.split_with_sizes(vectors, [parameter.numel() for parameter in parameters], dim=-1)
    for parameter, part in zip(parameters, parts, strict=True):
        yield parameter, part.reshape((*vectors.shape[:-1], *parameter.shape))


def layer_slices(coordinates: IntArray, parameters: Sequence[Any]) -> Iterator[tuple[Any, slice, int]]:
    """Yield each parameter with its part of the sorted ``coordinates``, and its first coordinate."""
    offsets = np.cumsum([0, *(parameter.numel() for parameter in parameters)])
    ends = np.searchsorted(coordinates, offsets)
    for number, parameter in enumerate(parameters):
        yield parameter, slice(int(ends[number]), int(ends[number + 1])), int(offsets[number])


@contextmanager
def restored(owner: Any) -> Iterator[None]:
    """Restore all attributes of ``owner`` at the end, such as counters of unclipped examples."""
    before = _attributes(owner)
    try:
        yield
    finally:
        vars(owner).update(before)


def _attributes(owner: Any) -> dict[str, Any]:
    """Return a copy of all attributes but wrappers; the library's code changes only tensors in place."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(owner).items()
        if not hasattr(value, _WRAPPED)
    }


@contextmanager
def wrapped(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Wrap a method of one object; code that inspects or copies the object ignores the wrapper."""
    new = wrap(getattr(owner, name))
    setattr(new, _WRAPPED, vars(owner).get(name))
    with replaced(owner, name, new):
        yield
