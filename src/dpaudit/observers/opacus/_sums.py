"""The sum of a step, rebuilt from what clipping adds, and the rows that were clipped.

:class:`SumObserver` wraps the methods of an optimizer that add to ``p.summed_grad``: ``clip_and_accumulate``,
or ``accumulate`` with ghost clipping, where ``get_norm_sample`` of the model shows the rows. A sum that
nothing else has changed is recognized by the version counters of its tensors, so that a step costs no more
than one norm. The batches that rows are compared with are in ``_batches.py``.
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
from dpaudit.diagnostics._sum_checks import StepSum, SumRecord
from dpaudit.observers.opacus._batches import LoaderBatches
from dpaudit.observers.opacus._clipping import GhostClip, OpacusClip, TrainedParameters, wrapped

_FEW_NUMBERS = 2**18  # whose norms are computed again in less than a millisecond
_TOLERANCE = 1e-3  # change of a norm, relative to it and to the clipping norm


class SumObserver:
    """Checks of the sums of an optimizer; ``before_noise`` must be called in every step."""

    def __init__(
        self, optimizer: DPOptimizer, clip: OpacusClip, loader: LoaderBatches, module: Any = None
    ) -> None:
        self._optimizer, self._clip, self._loader = optimizer, clip, loader
        self._module = module if isinstance(clip, GhostClip) else None
        self.record, self.batches = SumRecord(), loader.record
        self._trained = TrainedParameters(optimizer)
        self._num_parameters = sum(parameter.numel() for parameter in optimizer.params)
        self._is_paused, self._was_reset = False, False
        self._counts_nonzero = False
        self._norm_sample: Tensor | None = None  # of the latest pass, with ghost clipping
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
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what the block adds to the sum: canaries."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _noting_sum(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def add(*arguments: Any, **options: Any) -> Any:
            if self._is_paused:
                return own(*arguments, **options)
            self._trained.require_same(self.record.num_steps)
            self._before_adding()
            rows, limit = self._next_rows()
            result = own(*arguments, **options)
            self._after_adding(rows, limit)
            return result

        return add

    def _noting_norms(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def get_norm_sample(*arguments: Any, **options: Any) -> Any:
            norms = own(*arguments, **options)
            if not self._is_paused:
                self._norm_sample = norms
            return norms

        return get_norm_sample

    @torch.no_grad()
    def _next_rows(self) -> tuple[int, float]:
        """Return the number of rows that are about to be added, and the largest norm of their sum."""
        norm = float(self._optimizer.max_grad_norm)
        if self._module is None:
            rows = sum(self._clip.batch_sizes())
            limit = rows * norm
            if rows:
                self._note_longest(self._row_norms(rows))
            count = self._num_nonzero
        else:
            norms, self._norm_sample = self._norm_sample, None
            if norms is None:
                return 0, 0.0
            rows, limit = len(norms), float(norms.detach().double().clamp(max=norm).sum())
            self._note_longest(norms.detach())
            count = lambda: int((norms > 0).sum())  # noqa: E731
        self._loader.choose(rows)
        if self._counts_nonzero or self.batches.is_given:
            return count(), limit
        if self.batches.exceeds(self._rows + rows):  # from now on, padding is not counted
            self._counts_nonzero, self._is_exact = True, False
        return rows, limit

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
        found = [torch.linalg.vector_norm(rows.float(), dim=1).cpu() for rows in self._flat_rows()]
        return torch.stack(found).norm(dim=0) if {len(norms) for norms in found} == {count} else None

    def _num_nonzero(self) -> int:
        """Return the number of rows that are about to be clipped and not zero."""
        return int(torch.stack([rows.ne(0).any(dim=1) for rows in self._flat_rows()]).any(dim=0).sum())

    def _flat_rows(self) -> Iterator[Tensor]:
        """Yield the rows that are about to be clipped, rows x numbers for each parameter."""
        for parameter in self._optimizer.params:
            samples: Any = parameter.grad_sample
            parts = samples if isinstance(samples, list) else [samples]
            rows = torch.cat([part.detach() for part in parts if not hasattr(part, "_processed")])
            yield rows.reshape(len(rows), rows[0].numel() if len(rows) else parameter.numel())

    def _before_adding(self) -> None:
        """Compare the sum with what was added so far in this step."""
        sums = [parameter.summed_grad for parameter in self._optimizer.params]
        if self._sums is not None:
            if any(one is None for one in sums):  # a step was abandoned
                self._start_step()
            else:
                self._compare(sums)
        elif self._was_reset and any(one is not None for one in sums):
            left = float(np.linalg.norm(_norms([one for one in sums if one is not None])))
            left /= float(self._optimizer.max_grad_norm)
            if left > _TOLERANCE:
                self.record.observe_remainder(left)

    def _after_adding(self, rows: int, limit: float) -> None:
        self._rows, self._limit, self._was_clipped = self._rows + rows, self._limit + limit, True
        sums = [parameter.summed_grad for parameter in self._optimizer.params]
        if any(one is None for one in sums):  # the observer raises an error about it
            self._sums = None
            return
        self._sums, self._norms = [(one, one._version) for one in sums], _norms(sums)

    def _compare(self, sums: Sequence[Tensor]) -> None:
        """Note a sum that is not what the latest addition left."""
        assert self._sums is not None
        pairs = zip(sums, self._sums, strict=True)
        if all(new is old and new._version == version for new, (old, version) in pairs):
            return
        norm = float(self._optimizer.max_grad_norm)
        before, after = self._norms / norm, _norms(sums) / norm
        self._norms = after * norm
        if np.abs(after - before).max() <= _TOLERANCE * (1 + before.max()):
            return
        length = float(np.linalg.norm(before))
        factor = float(np.linalg.norm(after)) / length if length > 0 else np.inf
        is_scaled = factor < np.inf and bool(
            (np.abs(after - factor * before) <= _TOLERANCE * (before + _TOLERANCE)).all()
        )
        self.record.observe_change(length, float(np.linalg.norm(after)), is_scaled=is_scaled)

    @torch.no_grad()
    def before_noise(self, sums: Sequence[Tensor]) -> StepSum | None:
        """Check the sum of a step, before canaries and noise are added."""
        if self._sums is not None:
            self._compare(sums)
        elif self._module is None and self._has_processed_rows():
            self.record.skip()
            self._end_step()
            return None
        norms = self._norms if self._sums is not None else _norms(sums)
        norm, layers = float(self._optimizer.max_grad_norm), getattr(self._optimizer, "max_grad_norms", None)
        drawn = self.batches.use(self._rows, is_exact=self._is_exact)
        step = StepSum(
            norm=float(np.linalg.norm(norms)),
            limit=self._limit,
            rows=self._rows,
            max_grad_norm=norm,
            num_drawn=drawn,
            longest=self._longest if self._was_clipped else None,
        )
        excess = None
        if layers is not None and self._rows:
            limits = np.array([*map(float, layers), norm]) * self._rows
            excess = float((np.array([*norms, step.norm]) / limits).max())
        self.record.observe(step, excess=excess, eps=float(torch.finfo(sums[0].dtype).eps))
        self._end_step()
        return step

    def _end_step(self) -> None:
        self._was_reset = True
        self._start_step()

    def _has_processed_rows(self) -> bool:
        """Return whether rows were clipped by code that does not call the wrapped method."""
        samples = getattr(self._optimizer.params[0], "grad_sample", None)
        parts = samples if isinstance(samples, list) else [samples]
        return any(hasattr(part, "_processed") for part in parts)


@torch.no_grad()
def _norms(parts: Sequence[Tensor]) -> FloatArray:
    """Return the norm of each tensor."""
    if all(part.dtype == torch.float32 for part in parts):
        found = list(torch._foreach_norm(list(parts)))
    else:  # squares may overflow in half precision
        found = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    first = found[0].device
    norms: FloatArray = torch.stack([one.to(first) for one in found]).double().cpu().numpy()
    return norms
