"""The sum of a step, rebuilt from what clipping adds, and the rows that were clipped.

:class:`SumObserver` wraps the methods of an optimizer that add to ``p.summed_grad``: ``clip_and_accumulate``,
or ``accumulate`` with ghost clipping, where ``get_norm_sample`` of the model shows the rows. A sum that
nothing else has changed is recognized by the version counters of its tensors, so that a step costs no more
than one norm. The batches that rows are compared with are in ``_batches.py``, and the clipping norms that are
compared with the norms of the rows in ``_clipping_norms.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from dpaudit._types import FloatArray
from dpaudit.diagnostics import SumChange
from dpaudit.observers.opacus._batches import LoaderBatches
from dpaudit.observers.opacus._clipping import (
    GhostClip,
    OpacusClip,
    TrainedParameters,
    tensor_norms,
    wrapped,
)
from dpaudit.observers.opacus._clipping_norms import ClippingNorms
from dpaudit.observers.opacus._prepared import PreparedTraining

_FEW_NUMBERS = 2**18  # whose norms are computed again in less than a millisecond
_TOLERANCE = 1e-3  # change of a norm, relative to it and to the clipping norm


class SumObserver:
    """Checks of the sums of an optimizer; ``before_noise`` must be called in every step."""

    def __init__(self, training: PreparedTraining, clip: OpacusClip, loader: LoaderBatches) -> None:
        optimizer = training.optimizer
        self._optimizer, self._clip, self._loader = optimizer, clip, loader
        self._module = training.module if isinstance(clip, GhostClip) else None
        self.batches, self.norms = loader.record, ClippingNorms(optimizer)
        self._num_steps, self._changes, self._remainder = 0, list[SumChange](), 0.0
        self._trained = TrainedParameters(optimizer)
        self._num_parameters = sum(parameter.numel() for parameter in optimizer.params)
        self._is_paused = self._was_reset = self._counts_nonzero = False
        self._norm_sample: Tensor | None = None  # of the latest pass, with ghost clipping
        self._coefficients: Tensor | None = None  # of the same pass
        self._gradients = _PassGradients(optimizer)  # of the same pass
        self._start_step()

    def _start_step(self) -> None:
        self._rows, self._limit, self._is_exact = 0, 0.0, True
        self._longest: float | None = 0.0
        self._was_clipped = False
        self._sums: list[tuple[Tensor, int]] | None = None  # tensors and versions after the latest addition
        self._norms: FloatArray = np.zeros(0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Follow the sums inside the block; the optimizer is restored at its end."""
        with ExitStack() as undo:
            undo.enter_context(self._loader.installed())
            if self._module is None:
                undo.enter_context(wrapped(self._optimizer, "clip_and_accumulate", self._noting_sum))
            else:
                undo.enter_context(wrapped(self._optimizer, "accumulate", self._noting_sum))
                undo.enter_context(wrapped(self._module, "get_norm_sample", self._noting_norms))
                undo.enter_context(wrapped(self._module, "get_clipping_coef", self._noting_coefficients))
                undo.enter_context(wrapped(self._module, "enable_hooks", self._noting_gradients))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what the block adds to the sum: canaries."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def stop(self) -> None:
        """Ignore all further steps."""
        self._is_paused = True

    def _noting_sum(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def add(*arguments: Any, **options: Any) -> Any:
            if self._is_paused:
                return method(*arguments, **options)
            self._trained.require_same(self._num_steps)
            self._before_adding()
            rows, limit = self._next_rows()
            result = method(*arguments, **options)
            self._after_adding(rows, limit)
            return result

        return add

    def _noting_norms(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def get_norm_sample(*arguments: Any, **options: Any) -> Any:
            norms = method(*arguments, **options)
            if not self._is_paused:
                self._norm_sample = norms
                self._gradients.start()
            return norms

        return get_norm_sample

    def _noting_coefficients(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap coefficients that a developer may compute without ``get_norm_sample``."""
        module: Any = self._module

        def get_clipping_coef(*arguments: Any, **options: Any) -> Any:
            if self._is_paused:
                return method(*arguments, **options)
            self._norm_sample = None
            coefficients = self._coefficients = method(*arguments, **options)
            if self._norm_sample is None:
                module.get_norm_sample()  # notes the norms
            return coefficients

        return get_clipping_coef

    def _noting_gradients(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the last call of a private backward pass, after which ``p.grad`` is the clipped sum."""

        def enable_hooks(*arguments: Any, **options: Any) -> Any:
            self._gradients.note()
            return method(*arguments, **options)

        return enable_hooks

    @torch.no_grad()
    def _next_rows(self) -> tuple[int, float]:
        """Return the number of rows that are about to be added, and the largest norm of their sum."""
        norm = float(self._optimizer.max_grad_norm)
        if self._module is None:
            rows, limit, count = self._next_samples(norm)
        else:
            norms, self._norm_sample = self._norm_sample, None
            self.norms.note(norm, None if norms is None else norms.detach())
            if norms is None:
                return 0, 0.0
            rows, limit, count = self._next_ghost_rows(norms, norm)
        if self._counts_nonzero or self.batches.is_given or self._loader.is_unused:
            return count(), limit
        if self.batches.would_exceed(self._rows + rows):  # from now on, padding is not counted
            self._counts_nonzero, self._is_exact = True, False
        return rows, limit

    def _next_samples(self, norm: float) -> tuple[int, float, Callable[[], int]]:
        """Note rows of per-example gradients; return number, largest sum, and a count of nonzero ones."""
        rows = sum(self._clip.batch_sizes())
        row_norms = self._row_norms(rows) if rows else None
        if rows:
            self._note_longest(row_norms)
        self.norms.note(norm, row_norms)
        return rows, rows * norm, self._num_nonzero

    def _next_ghost_rows(self, norms: Tensor, norm: float) -> tuple[int, float, Callable[[], int]]:
        """Note rows of ghost clipping, which have only norms; return the same."""
        if change := self._gradients.change(norm):
            self._changes.append(SumChange(*change))
        limit = self._largest_sum(norms.detach().double(), norm)
        self._note_longest(norms.detach())
        return len(norms), limit, lambda: int((norms > 0).sum())

    def _largest_sum(self, norms: Tensor, max_grad_norm: float) -> float:
        """Return the largest norm of a sum of rows; automatic clipping may lengthen short ones."""
        coefficients, self._coefficients = self._coefficients, None
        if isinstance(coefficients, Tensor) and coefficients.shape == norms.shape:
            norms = norms * coefficients.detach().to(norms).clamp(min=1.0)
        return float(norms.clamp(max=max_grad_norm).sum())

    def _note_longest(self, norms: Tensor | None) -> None:
        """Note the norms of rows before clipping; None if they are unknown."""
        if norms is None or self._longest is None:
            self._longest = None
        elif len(norms):
            self._longest = max(self._longest, float(norms.max()))

    def _row_norms(self, count: int) -> Tensor | None:
        """Return the norms of the rows that are about to be clipped; None if that would take too long."""
        if count * self._num_parameters > _FEW_NUMBERS:
            return None
        if any(getattr(parameter, "grad_sample", None) is None for parameter in self._optimizer.params):
            return None  # the optimizer raises an error about it
        layer_norms = [torch.linalg.vector_norm(rows.float(), dim=1).cpu() for rows in self._flat_rows()]
        return (
            torch.stack(layer_norms).norm(dim=0) if {len(norms) for norms in layer_norms} == {count} else None
        )

    def _num_nonzero(self) -> int:
        """Return the number of rows that are about to be clipped and not zero."""
        return int(torch.stack([rows.ne(0).any(dim=1) for rows in self._flat_rows()]).any(dim=0).sum())

    def _flat_rows(self) -> Iterator[Tensor]:
        """Yield the rows that are about to be clipped, rows x numbers for each parameter."""
        for parameter in self._optimizer.params:
            samples: Any = parameter.grad_sample
            passes = samples if isinstance(samples, list) else [samples]
            rows = torch.cat(
                [
                    samples_of_pass.detach()
                    for samples_of_pass in passes
                    if not hasattr(samples_of_pass, "_processed")
                ]
            )
            yield rows.reshape(len(rows), rows[0].numel() if len(rows) else parameter.numel())

    def _before_adding(self) -> None:
        """Compare the sum with what was added so far in this step."""
        sums = [parameter.summed_grad for parameter in self._optimizer.params]
        if self._sums is not None:
            if any(total is None for total in sums):  # a step was abandoned
                self._start_step()
            else:
                self._compare(sums)
        elif self._was_reset and any(total is not None for total in sums):
            left = float(np.linalg.norm(tensor_norms([total for total in sums if total is not None])))
            left /= float(self._optimizer.max_grad_norm)
            if left > _TOLERANCE:
                self._remainder = left

    def _after_adding(self, rows: int, limit: float) -> None:
        self._rows, self._limit, self._was_clipped = self._rows + rows, self._limit + limit, True
        sums = [parameter.summed_grad for parameter in self._optimizer.params]
        if any(total is None for total in sums):  # the observer raises an error about it
            self._sums = None
            return
        self._sums, self._norms = [(total, total._version) for total in sums], tensor_norms(sums)

    def _compare(self, sums: Sequence[Tensor]) -> None:
        """Note a sum that is not what the latest addition left."""
        assert self._sums is not None
        pairs = zip(sums, self._sums, strict=True)
        if all(new is old and new._version == version for new, (old, version) in pairs):
            return
        norm = float(self._optimizer.max_grad_norm)
        before, after = self._norms / norm, tensor_norms(sums) / norm
        self._norms = after * norm
        if np.abs(after - before).max() <= _TOLERANCE * (1 + before.max()):
            return
        length = float(np.linalg.norm(before))
        factor = float(np.linalg.norm(after)) / length if length > 0 else np.inf
        is_scaled = factor < np.inf and bool(
            (np.abs(after - factor * before) <= _TOLERANCE * (before + _TOLERANCE)).all()
        )
        self._changes.append(SumChange(length, float(np.linalg.norm(after)), is_scaled))

    @torch.no_grad()
    def before_noise(self, sums: Sequence[Tensor]) -> tuple[float, dict[str, Any]]:
        """Return the norm of a sum and fields of its observed step, before canaries and noise are added."""
        if self._sums is not None:
            self._compare(sums)
        elif self._module is None and self._has_processed_rows():
            self._end_step()
            return float(np.linalg.norm(tensor_norms(sums))), {}
        norms = self._norms if self._sums is not None else tensor_norms(sums)
        norm, layers = float(self._optimizer.max_grad_norm), getattr(self._optimizer, "max_grad_norms", None)
        length, excess = float(np.linalg.norm(norms)), None
        if layers is not None and self._rows:
            limits = np.array([*map(float, layers), norm]) * self._rows
            excess = float((np.array([*norms, length]) / limits).max())
        fields = {
            "example_sum_norm": length / norm,
            "sum_limit": self._limit / norm,
            "sum_excess": excess,
            "sum_changes": tuple(self._changes),
            "sum_remainder": self._remainder,
            "num_rows": self._rows,
            "has_padding": not self._is_exact,
            "max_row_norm": self._longest / norm if self._was_clipped and self._longest is not None else None,
        }
        self._end_step()
        return length, fields

    def _end_step(self) -> None:
        self._was_reset, self._num_steps = True, self._num_steps + 1
        self._changes, self._remainder = [], 0.0
        self._start_step()

    def _has_processed_rows(self) -> bool:
        """Return whether rows were clipped by code that does not call the wrapped method."""
        samples = getattr(self._optimizer.params[0], "grad_sample", None)
        passes = samples if isinstance(samples, list) else [samples]
        return any(hasattr(samples_of_pass, "_processed") for samples_of_pass in passes)


class _PassGradients:
    """The gradients after a private backward pass with ghost clipping, to which nothing may be added.

    Version counters show a change. Copies are made only after the first one, to know its size: a penalty of
    the weights, which depends on no example, may be added.
    """

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._optimizer, self._makes_copies = optimizer, False
        self._noted: list[tuple[Any, int]] | None = None
        self._copies: list[Tensor] = []
        self._is_awaited = False

    def start(self) -> None:
        """Begin a pass: the norms of its examples are known, its gradients are not."""
        self._noted, self._copies, self._is_awaited = None, [], True

    @torch.no_grad()
    def note(self) -> None:
        """Note the gradients at the end of the pass."""
        if not self._is_awaited:
            return
        self._is_awaited = False
        gradients: list[Any] = [parameter.grad for parameter in self._optimizer.params]
        if any(gradient is None for gradient in gradients):  # Opacus raises an error about it
            return
        self._noted = [(gradient, gradient._version) for gradient in gradients]
        self._copies = [gradient.clone() for gradient in gradients] if self._makes_copies else []

    @torch.no_grad()
    def change(self, max_grad_norm: float) -> tuple[float, float, bool] | None:
        """Return the norms before and after a change, in clipping norms, and whether it is a scaling."""
        noted, self._noted = self._noted, None
        parameters: list[Any] = self._optimizer.params
        if noted is None or any(parameter.grad is None for parameter in parameters):
            return None
        pairs = zip(parameters, noted, strict=True)
        if all(parameter.grad is old and old._version == version for parameter, (old, version) in pairs):
            return None
        if not self._copies:
            self._makes_copies = True
            return None
        return _gradient_change(self._copies, parameters, max_grad_norm)


def _gradient_change(
    copies: Sequence[Tensor], parameters: Sequence[Any], max_grad_norm: float
) -> tuple[float, float, bool] | None:
    """Return how gradients differ from their copies; None if by no more than rounding or a penalty."""
    gradients = [parameter.grad for parameter in parameters]
    before, after = (
        torch.cat([tensor.reshape(-1).double() for tensor in tensors]) for tensors in (copies, gradients)
    )
    added = [gradient.double() - old.double() for gradient, old in zip(gradients, copies, strict=True)]
    length, room = float(before.norm()), _TOLERANCE * (max_grad_norm + float(before.norm()))
    if float((after - before).norm()) <= room or _is_penalty(added, parameters, room):
        return None
    factor = float(after @ before) / max(length**2, torch.finfo(torch.float64).tiny)
    is_scaled = float((after - factor * before).norm()) <= room
    top = float(after.abs().max())  # limiting values moves no two sums apart, either
    is_scaled = is_scaled or float((after - before.clamp(-top, top)).norm()) <= room
    return length / max_grad_norm, float(after.norm()) / max_grad_norm, is_scaled


def _is_penalty(added: Sequence[Tensor], parameters: Sequence[Any], room: float) -> bool:
    """Return whether each tensor is a multiple of the weights, or of their signs."""

    def is_multiple(tensor: Tensor, weight: Tensor) -> bool:
        share = float((tensor * weight).sum()) / max(
            float((weight * weight).sum()), torch.finfo(tensor.dtype).tiny
        )
        return float((tensor - share * weight).norm()) <= room

    weights = [parameter.detach().double() for parameter in parameters]
    return all(
        is_multiple(tensor, weight) or is_multiple(tensor, weight.sign())
        for tensor, weight in zip(added, weights, strict=True)
    )
