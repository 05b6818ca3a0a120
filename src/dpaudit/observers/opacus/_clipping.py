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
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping, FSDPOptimizerFastGradientClipping
from opacus.optimizers.ddp_perlayeroptimizer import DistributedPerLayerOptimizer
from torch import Tensor, nn

from dpaudit._interrupts import machine_fault
from dpaudit._types import FloatArray, IntArray
from dpaudit.errors import InputError, first_line
from dpaudit.observers._arrays import attribute_restored, replaced

_UNSUPPORTED: dict[type, str] = {
    DistributedPerLayerOptimizer: "it clips and adds noise during the backward pass, one layer at a time; "
    "make_private returns a SimpleDistributedPerLayerOptimizer, which can be observed",
    FSDPOptimizerFastGradientClipping: "no process holds a whole gradient; observe the same training code "
    'with grad_sample_mode="ghost" on a smaller model',
}
_CHUNK_ENTRIES = 2**24  # matrix entries of full rows that are in memory together
_WRAPPED = "wrapped_by_dpaudit"  # attribute of wrappers: the attribute of the object that they hide, or None
_CLIPPING = ("clip_and_accumulate", "_get_flat_grad_sample", "grad_samples", "params", "param_groups")


class CoordinateIndex:
    """Sorted coordinates of the concatenation of all parameters, read and written parameter by parameter."""

    def __init__(self, coordinates: IntArray, parameters: Sequence[Tensor]) -> None:
        offsets = np.cumsum([0, *(parameter.numel() for parameter in parameters)])
        ends = np.searchsorted(coordinates, offsets).tolist()
        self.coordinates, self.is_complete = coordinates, coordinates.size == int(offsets[-1])
        self.slices = [slice(*pair) for pair in pairwise(ends)]
        """The positions of the coordinates that are in each parameter."""
        self._inside: list[Tensor | None] = [
            torch.as_tensor(coordinates[positions] - offset, device=parameter.device)
            if positions.stop > positions.start and not self.is_complete
            else None
            for positions, offset, parameter in zip(self.slices, offsets, parameters, strict=False)
        ]

    @classmethod
    def complete(cls, parameters: Sequence[Tensor]) -> CoordinateIndex:
        """Return the index of all coordinates."""
        return cls(np.arange(sum(parameter.numel() for parameter in parameters)), parameters)

    def __len__(self) -> int:
        return self.coordinates.size

    def positions(self, coordinates: IntArray) -> IntArray:
        """Return the positions of some of the coordinates."""
        return np.searchsorted(self.coordinates, coordinates).astype(np.int64)

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the numbers at the coordinates, in single precision or better."""
        if self.is_complete:
            return flat(tensors)
        numbers = [
            tensor.detach().reshape(-1).index_select(0, inside)
            for tensor, inside in zip(tensors, self._inside, strict=True)
            if inside is not None
        ]
        return at_least_single(torch.cat(numbers))

    def write(self, tensors: Sequence[Tensor], values: Tensor) -> None:
        """Write numbers to the coordinates, in place."""
        for tensor, inside, positions in zip(tensors, self._inside, self.slices, strict=True):
            if self.is_complete:
                tensor.copy_(values[positions].view(tensor.shape))
            elif inside is not None:
                vector = tensor.reshape(-1)  # a copy if the tensor is not contiguous
                vector.index_copy_(0, inside, values[positions].to(tensor.dtype))
                if not tensor.is_contiguous():
                    tensor.copy_(vector.view(tensor.shape))


class StandIns:
    """Parameters that consist of the coordinates of canaries only, for the clipping code of an optimizer.

    Each parameter tensor has a stand-in with the same number of dimensions, whose sum holds the observed sum
    at the coordinates. So neither norms nor sums depend on the other coordinates, at which canaries are zero,
    and the cost does not depend on the number of parameters. The code runs with the current settings of the
    observed optimizer, and changes none of them.
    """

    def __init__(self, optimizer: DPOptimizer, index: CoordinateIndex) -> None:
        self._optimizer, self.slices = optimizer, index.slices
        self.copy: Any = object.__new__(type(optimizer))
        self.parameters: list[Any] = []
        for parameter, positions in zip(optimizer.params, index.slices, strict=True):
            size = max(positions.stop - positions.start, 1)  # one of its own if there is none
            shape = (size, *[1] * (parameter.dim() - 1)) if parameter.dim() else ()
            self.parameters.append(nn.Parameter(parameter.detach().new_zeros(shape)))
        self._groups = SimpleNamespace(param_groups=[{"params": self.parameters}])

    def reset(self, sums: Tensor) -> None:
        """Copy the settings of the optimizer, and use the memory of ``sums`` at the coordinates."""
        vars(self.copy).update(_attributes(self._optimizer), original_optimizer=self._groups)
        observed = self._optimizer.params
        for stand_in, positions, parameter in zip(self.parameters, self.slices, observed, strict=True):
            values = sums[positions] if positions.stop > positions.start else sums.new_zeros(1)
            stand_in.summed_grad = values.to(parameter.summed_grad.dtype).view(stand_in.shape)

    def sums(self) -> Tensor:
        """Return the sums at the coordinates."""
        pairs = zip(self.parameters, self.slices, strict=True)
        return flat(
            [stand_in.summed_grad for stand_in, positions in pairs if positions.stop > positions.start]
        )

    def split(self, rows: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Yield each stand-in with its columns of ``rows``, in its shape and precision."""
        for stand_in, positions in zip(self.parameters, self.slices, strict=True):
            columns = rows[:, positions] if positions.stop > positions.start else rows.new_zeros(len(rows), 1)
            yield stand_in, columns.reshape(-1, *stand_in.shape).to(stand_in.dtype)


class OpacusClip(ABC):
    """A way to add clipped rows to a sum with the library's own code.

    Everything else that this code changes is restored.
    """

    needs_full_rows = False
    """Whether canaries are clipped as rows with an entry for each parameter, which is slower."""

    @property
    @abstractmethod
    def is_of_opacus(self) -> bool:
        """Whether all code that clips and adds is defined by Opacus, so that stand-ins behave the same."""

    @abstractmethod
    def add_rows(self, rows: Tensor, sums: Tensor, stand_ins: StandIns) -> Tensor:
        """Clip ``rows`` (gradients x coordinates of the stand-ins), and return their sum plus ``sums``."""

    @abstractmethod
    def add_to_parameters(self, rows: Tensor, index: CoordinateIndex) -> None:
        """Clip ``rows`` (gradients x coordinates) and add them to ``p.summed_grad`` of the parameters."""

    @abstractmethod
    def batch_sizes(self) -> list[int]:
        """Return the number of examples in each backward pass that the optimizer is about to clip."""

    def pending_batch_sizes(self) -> list[int]:
        """Return the same between steps, for the passes that have not been clipped yet."""
        return self.batch_sizes()


class PerSampleClip(OpacusClip):
    """Clipping of materialized per-example gradients by the optimizer: hooks, functorch, ew.

    Opacus' own code clips canaries on stand-ins. Code that is not part of Opacus may depend on anything, so
    it gets rows with an entry for each parameter.
    """

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def is_of_opacus(self) -> bool:
        return all(is_of_opacus(self._optimizer, name) for name in _CLIPPING)

    @property
    def needs_full_rows(self) -> bool:  # type: ignore[override]
        return not self.is_of_opacus

    def add_to_parameters(self, rows: Tensor, index: CoordinateIndex) -> None:
        num_parameters = sum(parameter.numel() for parameter in self._optimizer.params)
        where = torch.as_tensor(index.coordinates, device=rows.device)
        for chunk in rows.split(max(1, _CHUNK_ENTRIES // num_parameters)):  # type: ignore[no-untyped-call]
            full = rows.new_zeros(len(chunk), num_parameters)
            self.add_full_rows(full.index_copy_(1, where, chunk))

    def add_full_rows(self, rows: Tensor) -> None:
        """Clip and add ``rows`` (gradients x parameters)."""
        parameters = self._optimizer.params
        with restored(self._optimizer), attribute_restored(parameters, "grad_sample"):
            for parameter, columns in split_like(rows, parameters):
                parameter.grad_sample = columns.to(parameter.dtype)
            with _own_clipping(self._optimizer, len(rows)):
                self._optimizer.clip_and_accumulate()

    def add_rows(self, rows: Tensor, sums: Tensor, stand_ins: StandIns) -> Tensor:
        stand_ins.reset(sums)
        for stand_in, columns in stand_ins.split(rows):
            stand_in.grad_sample = columns
        stand_ins.copy.clip_and_accumulate()
        return stand_ins.sums()

    def batch_sizes(self) -> list[int]:
        return list(map(len, rows_to_clip(self._optimizer.params[0])))


def rows_to_clip(parameter: Any) -> list[Tensor]:
    """Return the per-example gradients of each backward pass that have not been clipped yet."""
    return [samples for samples in _passes(parameter) if not hasattr(samples, "_processed")]


def has_clipped_rows(parameter: Any) -> bool:
    """Return whether per-example gradients of a parameter were clipped, and not yet removed."""
    return len(rows_to_clip(parameter)) < len(_passes(parameter))


def _passes(parameter: Any) -> list[Tensor]:
    samples = getattr(parameter, "grad_sample", None)
    return samples if isinstance(samples, list) else [] if samples is None else [samples]


@contextmanager
def _own_clipping(optimizer: DPOptimizer, num_rows: int) -> Iterator[None]:
    """Say what is special about the call if it raises: its rows are no rows of the batch."""
    try:
        yield
    except Exception as error:
        if is_of_opacus(optimizer, "clip_and_accumulate") or machine_fault(error) is not None:
            raise
        raise InputError(
            "clip_and_accumulate() must clip any rows in grad_samples: canaries are clipped in a call of "
            f"their own, after that for the batch, and with {num_rows} of them it raised "
            f"{type(error).__name__}: {first_line(error)}. (Does it use one weight per example of the "
            "batch? Compute the weights from grad_samples.)"
        ) from error


class GhostClip(OpacusClip):
    """Ghost clipping: the model computes norms and reweights the loss; canaries are added after the norms."""

    def __init__(self, optimizer: DPOptimizer, module: Any) -> None:
        self._optimizer, self._module = optimizer, module

    @property
    def is_of_opacus(self) -> bool:
        return is_of_opacus(self._optimizer, "accumulate")

    def add_rows(self, rows: Tensor, sums: Tensor, stand_ins: StandIns) -> Tensor:
        stand_ins.reset(sums)
        for stand_in, total in stand_ins.split(self._clipped_sum(rows, stand_ins.slices)[None]):
            stand_in.grad = total[0]
        stand_ins.copy.accumulate()
        return stand_ins.sums()

    def add_to_parameters(self, rows: Tensor, index: CoordinateIndex) -> None:
        parameters = self._optimizer.params
        total = self._clipped_sum(rows, index.slices)
        with attribute_restored(parameters, "grad"):
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            index.write([parameter.grad for parameter in parameters], total)
            self._optimizer.accumulate()

    def _clipped_sum(self, rows: Tensor, slices: Sequence[slice]) -> Tensor:
        """Return the sum of rows, clipped by the model; ``slices`` are their columns in each parameter."""
        trainable = self._module.trainable_parameters
        with restored(self._module), attribute_restored(trainable, "_norm_sample"):
            for parameter in trainable:
                parameter._norm_sample = rows.new_zeros(len(rows))
            for parameter, columns in zip(self._optimizer.params, slices, strict=True):
                norms = torch.linalg.vector_norm(rows[:, columns], dim=1)
                parameter._norm_sample = norms.to(parameter.dtype)
            coefficients: Tensor = self._module.get_clipping_coef()
        return coefficients.to(rows.dtype) @ rows

    def batch_sizes(self) -> list[int]:
        norms = self._module._per_sample_gradient_norms
        return [] if norms is None else [len(norms)]

    def pending_batch_sizes(self) -> list[int]:
        return []  # norms remain after use


def is_of_opacus(optimizer: DPOptimizer, name: str) -> bool:
    """Return whether a method or property is defined by Opacus, not by a subclass or a patch."""
    attribute = next(vars(kind)[name] for kind in type(optimizer).__mro__ if name in vars(kind))
    function = attribute.fget if isinstance(attribute, property) else attribute
    replacement = vars(optimizer).get(name)
    if getattr(replacement, _WRAPPED, replacement) is not None or not inspect.isfunction(function):
        return False
    # the module of the code itself: functools.wraps changes __module__
    return bool(function.__globals__["__name__"].startswith("opacus."))


def clip_for(optimizer: Any, module: Any) -> OpacusClip:
    """Return an adapter for the clipping of ``optimizer``, or raise an error if it cannot be observed."""
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            f"A {type(optimizer).__name__} is not private; pass the optimizer that "
            "PrivacyEngine.make_private returned."
        )
    for kind, reason in _UNSUPPORTED.items():
        if isinstance(optimizer, kind):
            raise InputError(f"A {type(optimizer).__name__} cannot be observed: {reason}.")
    if not isinstance(optimizer, DPOptimizerFastGradientClipping):
        return PerSampleClip(optimizer)
    if not hasattr(module, "get_clipping_coef"):
        raise InputError(
            "Ghost clipping needs module=..., the model that PrivacyEngine.make_private returned, got "
            f"{type(module).__name__}."
        )
    return GhostClip(optimizer, module)


def clipped_norm(optimizer: DPOptimizer, module: Any) -> float:
    """Return the norm to which gradients are clipped now, which ``module`` has with ghost clipping."""
    norm = optimizer.max_grad_norm
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        of_module = getattr(module, "__dict__", {}).get("max_grad_norm")
        norm = of_module if isinstance(of_module, int | float) else norm
    return math.hypot(*map(float, getattr(optimizer, "max_grad_norms", None) or [norm]))


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
            f"The optimizer must train the same {len(self._first)} parameter tensors in all observed steps, "
            f"got {len(now) if len(now) != len(self._first) else 'others'} in step {index}. Were layers "
            "frozen or unfrozen? Observe each phase of the training run in a with block of its own, which "
            "starts after the change."
        )


def flat(parts: Sequence[Tensor]) -> Tensor:
    """Return the concatenation of all parts as one vector, in single precision or better."""
    return at_least_single(torch.cat([tensor.detach().reshape(-1) for tensor in parts]))


def at_least_single(values: Tensor) -> Tensor:
    """Return numbers in half precision as single precision, in which arithmetic adds no errors to theirs."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def precision(parts: Sequence[Tensor]) -> float:
    """Return the relative precision of the coarsest part, such as a layer in half precision."""
    return max(torch.finfo(tensor.dtype).eps for tensor in parts)


def product_precision(tensors: Sequence[Tensor]) -> float:
    """Return the same for products, which a GPU may compute in TF32."""
    return max(precision(tensors), *(2.0**-10 for tensor in tensors if tensor.is_cuda), 0.0)


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor]) -> FloatArray:
    """Return the norm of each tensor."""
    if all(tensor.dtype == torch.float32 for tensor in tensors):
        norms = list(torch._foreach_norm(list(tensors)))
    else:  # squares may overflow in half precision
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    first = norms[0].device
    return np.asarray(torch.stack([norm.to(first) for norm in norms]).double().cpu())


def summed(optimizer: DPOptimizer) -> list[Any]:
    """Return the sum of the clipped gradients of each parameter."""
    return [parameter.summed_grad for parameter in optimizer.params]


@contextmanager
def copied_sums(optimizer: DPOptimizer) -> Iterator[None]:
    """Let the block change copies of the sums."""
    with attribute_restored(optimizer.params, "summed_grad"):
        for parameter in optimizer.params:
            parameter.summed_grad = parameter.summed_grad.clone()
        yield


def split_like(vectors: Tensor, parameters: Sequence[Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter with its slice of the last dimension, in the parameter's shape."""
    slices = torch.split_with_sizes(vectors, [parameter.numel() for parameter in parameters], dim=-1)
    for parameter, values in zip(parameters, slices, strict=True):
        yield parameter, values.reshape((*vectors.shape[:-1], *parameter.shape))


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


def unwatched(owner: Any, name: str) -> Any:
    """Return a method of an object without the functions that :func:`watched` calls around it."""
    method = vars(owner).get(name)
    while hasattr(method, _WRAPPED):
        method = getattr(method, _WRAPPED)
    return getattr(type(owner), name).__get__(owner) if method is None else method


@contextmanager
def watched(
    owner: Any,
    name: str,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Any], object] = lambda _: None,
) -> Iterator[None]:
    """Call functions before and after a method of one object, the latter with its result.

    It may return another result. Code that inspects or copies the object ignores that.
    """
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        before()
        result = method(*arguments, **options)
        replacement = after(result)
        return result if replacement is None else replacement

    setattr(call, _WRAPPED, vars(owner).get(name))
    with replaced(owner, name, call):
        yield
