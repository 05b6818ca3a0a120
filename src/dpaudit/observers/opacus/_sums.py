"""The sum of a step, rebuilt from what clipping adds, and the rows that were clipped.

:class:`SumObserver` watches the methods of an optimizer that add to ``p.summed_grad``:
``clip_and_accumulate``, or ``accumulate`` with ghost clipping, where ``get_norm_sample`` of the model shows
the rows. A sum that nothing else has changed is recognized by the version counters of its tensors, so that a
step costs no more than one norm. :class:`ClippingNorms` compares the clipping norms with those of the rows.
The batches that rows are compared with are in ``LoaderBatches``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import Tensor

from dpaudit._types import FloatArray
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding, SumChange
from dpaudit.observers._session import StepRecorder
from dpaudit.observers.opacus._clipping import (
    GhostClip,
    OpacusClip,
    TrainedParameters,
    clipped_norm,
    has_clipped_rows,
    rows_to_clip,
    tensor_norms,
    watched,
)
from dpaudit.observers.opacus._forward_passes import ForwardPasses
from dpaudit.observers.opacus._prepared import LoaderBatches, PreparedTraining
from dpaudit.observers.opacus._single_examples import ExampleFacts, ExampleGradients

_FEW_NUMBERS = 2**18  # whose norms are computed again in less than a millisecond
_MAX_UNPADDED = 3  # surprises after which rows of zeros are not looked for, which takes time
_TOLERANCE = 1e-3  # change of a norm, relative to it and to the clipping norm
_QUANTILES = torch.linspace(0, 1, 21)
_STATISTICS = (
    *("mean", "median", "smallest"),
    *(f"{100 * level:.0f} % quantile" for level in _QUANTILES.tolist()[1:-1]),
    "largest",
)
_MAX_CHANGES = 64  # of the clipping norm that are compared with the rows
_SATURATED = 1e-6  # relative difference of norms below which rows were scaled to the same length
_SAME_RATIO = 1e-4  # relative difference; that of unrelated numbers is larger by orders of magnitude
_APART = 10 * _SAME_RATIO  # of norms, because a slow schedule has the same ratio to a statistic that repeats
_FEWEST_SAME, _SHARE_SAME = 8, 0.4  # ratios that are no coincidence


class SumObserver:
    """Checks of the sums of an optimizer; ``before_noise`` must be called in every step."""

    def __init__(self, training: PreparedTraining, clip: OpacusClip, loader: LoaderBatches) -> None:
        self._optimizer, self._clip, self._loader = training.optimizer, clip, loader
        self._module: Any = training.module if isinstance(clip, GhostClip) else None
        self.norms = ClippingNorms(training.optimizer)
        self._num_steps, self._changes, self._remainder = 0, list[SumChange](), 0.0
        self._trained = TrainedParameters(training.optimizer)
        self._num_parameters = sum(parameter.numel() for parameter in training.optimizer.params)
        self._is_paused = self._was_reset = self._counts_nonzero = False
        self._num_unpadded = 0  # surprising numbers of rows without a row of zeros
        self._norm_sample: Tensor | None = None  # of the latest pass, with ghost clipping
        self._coefficients: Tensor | None = None  # of the same pass
        self._pass_norm: float | None = None  # to which its rows were clipped
        self._gradients = _PassGradients(training.optimizer)  # of the same pass
        self.facts = facts = ExampleFacts(
            has_ghost_norms=self._module is not None, is_repeated=training.network is not None
        )
        self.examples = ExampleGradients(training.optimizer, self._module, facts, lambda: self._is_paused)
        self.passes = ForwardPasses(training, facts, lambda: self._is_paused)
        self._start_step()

    def _start_step(self) -> None:
        self._rows, self._limit, self._is_exact = 0, 0.0, True
        self._next = 0, 0.0  # rows that are about to be added, and the largest norm of their sum
        self._longest: float | None = 0.0
        self._row_limit = 0.0  # the largest norm to which its rows were clipped
        self._was_clipped = False
        self._sums: list[tuple[Tensor, int]] | None = None  # tensors and versions after the latest addition
        self._norms: FloatArray = np.zeros(0)

    @contextmanager
    def installed(self, steps: StepRecorder) -> Iterator[None]:
        """Follow the sums inside the block; the optimizer is restored at its end."""
        adds = "clip_and_accumulate" if self._module is None else "accumulate"

        def watch(owner: Any, name: str, **functions: Callable[..., object]) -> None:
            guarded = {when: steps.guarded(function) for when, function in functions.items()}
            undo.enter_context(watched(owner, name, **guarded))

        with ExitStack() as undo:
            undo.enter_context(self._loader.installed(steps))
            undo.enter_context(self.examples.installed(steps))
            undo.enter_context(self.passes.installed(steps))
            watch(self._optimizer, adds, before=self._before_adding, after=self._after_adding)
            if self._module is not None:
                watch(self._module, "get_norm_sample", after=self._note_norms)
                watch(self._module, "get_clipping_coef", before=self._forget_norms)
                watch(self._module, "get_clipping_coef", after=self._note_coefficients)
                # the last call of a private backward pass, after which p.grad is the clipped sum
                watch(self._module, "enable_hooks", before=self._gradients.note)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what the block adds to the sum: canaries."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _note_norms(self, norms: Tensor) -> None:
        if not self._is_paused:
            self._norm_sample = norms.detach()
            self._gradients.start()

    def _forget_norms(self) -> None:
        if not self._is_paused:
            self._norm_sample = None

    def _note_coefficients(self, coefficients: Tensor) -> Tensor:
        """Note clipping factors, which a developer may compute without ``get_norm_sample``."""
        if self._is_paused:
            return coefficients
        self._coefficients, self._pass_norm = coefficients, self._clipped_norm()
        if self._norm_sample is None:
            self._module.get_norm_sample()  # notes the norms
        return self.examples.watch(coefficients, self._norm_sample)

    def _clipped_norm(self) -> float:
        return clipped_norm(self._optimizer, self._module)

    @torch.no_grad()
    def _before_adding(self) -> None:
        """Compare the sum with what was added so far in this step, and note the rows to come."""
        if self._is_paused:
            return
        self._trained.require_same(self._num_steps)
        self.passes.confirm(self._clip.batch_sizes())
        self.examples.compare_rows()
        sums = [parameter.summed_grad for parameter in self._optimizer.params]
        if self._sums is not None and any(total is None for total in sums):  # a step was abandoned
            self._start_step()
        elif self._sums is not None:
            self._compare(sums)
        elif self._was_reset:
            self._note_remainder([total for total in sums if total is not None])
        self._next = self._next_rows()

    def _note_remainder(self, sums: Sequence[Tensor]) -> None:
        """Note what is left of the sum of an earlier step."""
        left = float(np.linalg.norm(tensor_norms(sums))) if sums else 0.0
        left /= float(self._optimizer.max_grad_norm)
        if left > _TOLERANCE:
            self._remainder = left

    def _next_rows(self) -> tuple[int, float]:
        """Return the number of rows that are about to be added, and the largest norm of their sum."""
        norm = float(self._optimizer.max_grad_norm)
        if self._module is None:
            num_rows = sum(self._clip.batch_sizes())
            norms, limit = self._sample_norms(num_rows), num_rows * norm
        else:
            norms, self._norm_sample = self._norm_sample, None
            num_rows, limit = (0, 0.0) if norms is None else (len(norms), self._largest_sum(norms, norm))
        self.norms.note(norm, norms)
        if num_rows == 0:
            return 0, limit
        self._note_longest(norms)
        is_expected = not self._loader.record.may_be_padded(self._rows + num_rows)
        if not self._counts_nonzero and (is_expected or self._num_unpadded == _MAX_UNPADDED):
            return num_rows, limit
        num_nonzero = self._num_nonzero(norms)
        self._is_exact = self._counts_nonzero or self._rows == 0  # what was counted before may be padding
        self._counts_nonzero |= num_nonzero < num_rows
        self._num_unpadded += num_nonzero == num_rows
        return num_nonzero, limit

    def _note_longest(self, norms: Tensor | None) -> None:
        """Note the norms of rows before clipping; None if they are unknown."""
        if norms is None or self._longest is None:
            self._longest = None
        else:
            self._longest = max(self._longest, float(norms.max()))

    def _largest_sum(self, norms: Tensor, max_grad_norm: float) -> float:
        """Return the largest norm of a sum of ghost rows; automatic clipping may lengthen short ones."""
        if change := self._gradients.change(max_grad_norm):
            self._changes.append(change)
        norms = norms.double()
        coefficients, self._coefficients = self._coefficients, None
        if isinstance(coefficients, Tensor) and coefficients.shape == norms.shape:
            norms = norms * coefficients.detach().to(norms).clamp(min=1.0)
        return float(norms.clamp(max=max_grad_norm).sum())

    def _sample_norms(self, num_rows: int) -> Tensor | None:
        """Return the norms of the rows that are about to be clipped; None if that would take too long."""
        if num_rows == 0 or num_rows * self._num_parameters > _FEW_NUMBERS:
            return None
        if any(getattr(parameter, "grad_sample", None) is None for parameter in self._optimizer.params):
            return None  # the optimizer raises an error about it
        norms = [torch.linalg.vector_norm(rows.float(), dim=1).cpu() for rows in self._flat_rows()]
        return torch.stack(norms).norm(dim=0) if {*map(len, norms)} == {num_rows} else None

    def _num_nonzero(self, norms: Tensor | None) -> int:
        """Return the number of rows that are about to be clipped and not zero."""
        if self._module is not None and norms is not None:
            return int((norms > 0).sum())
        return int(torch.stack([rows.ne(0).any(dim=1) for rows in self._flat_rows()]).any(dim=0).sum())

    def _flat_rows(self) -> Iterator[Tensor]:
        """Yield the rows that are about to be clipped, rows x numbers for each parameter."""
        for parameter in self._optimizer.params:
            rows = torch.cat([samples.detach() for samples in rows_to_clip(parameter)])
            yield rows.reshape(len(rows), rows[0].numel() if len(rows) else parameter.numel())

    def _after_adding(self, _: Any) -> None:
        if self._is_paused:
            return
        rows, limit = self._next
        self._row_limit = max(self._row_limit, self._pass_norm or self._clipped_norm())
        self._pass_norm = None
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
        self._trained.require_same(self._num_steps)
        if self._sums is not None:
            self._compare(sums)
        elif self._module is None and has_clipped_rows(self._optimizer.params[0]):
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
            "row_limit": self._row_limit / norm if self._was_clipped else None,
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
    def change(self, max_grad_norm: float) -> SumChange | None:
        """Return how the gradients were changed since the pass; None if they were not."""
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
) -> SumChange | None:
    """Return how gradients differ from their copies; None if by no more than rounding or a penalty."""
    before, after = (
        torch.cat([tensor.reshape(-1).double() for tensor in tensors])
        for tensors in (copies, [parameter.grad for parameter in parameters])
    )
    length, room = float(before.norm()), _TOLERANCE * (max_grad_norm + float(before.norm()))
    if float((after - before).norm()) <= room or _is_penalty(after - before, parameters, room):
        return None
    factor = float(after @ before) / max(length**2, torch.finfo(torch.float64).tiny)
    is_scaled = float((after - factor * before).norm()) <= room
    top = float(after.abs().max())  # limiting values moves no two sums apart, either
    is_scaled = is_scaled or float((after - before.clamp(-top, top)).norm()) <= room
    return SumChange(length / max_grad_norm, float(after.norm()) / max_grad_norm, is_scaled)


def _is_penalty(added: Tensor, parameters: Sequence[Any], room: float) -> bool:
    """Return whether a multiple of the weights or of their signs was added to each parameter."""

    def is_multiple(vector: Tensor, weights: Tensor) -> bool:
        share = float(vector @ weights) / max(float(weights @ weights), torch.finfo(vector.dtype).tiny)
        return float((vector - share * weights).norm()) <= room

    weights = [parameter.detach().reshape(-1).double() for parameter in parameters]
    pairs = zip(torch.split_with_sizes(added, list(map(len, weights))), weights, strict=True)
    return all(is_multiple(vector, weight) or is_multiple(vector, weight.sign()) for vector, weight in pairs)


class ClippingNorms:
    """The clipping norms of all steps; one that changes must not be computed from the batch.

    The noise follows the clipping norm, so that it is always as claimed. A schedule that depends on the
    number of the step is correct. A norm that is computed from gradients has the same ratio to a statistic of
    their norms in many steps, of its own batch or of the batch before.
    """

    def __init__(self, optimizer: DPOptimizer) -> None:
        self._is_adaptive = isinstance(optimizer, AdaClipDPOptimizer)  # which adds noise to what it uses
        self._num_changes = 0
        self._last: float | None = None
        self._range = (np.inf, 0.0)
        self._rows: Tensor | None = None  # of the batch before
        self._changes: dict[str, list[tuple[float, FloatArray]]] = {"its batch": [], "the batch before": []}

    def note(self, norm: float, rows: Tensor | None) -> None:
        """Note the clipping norm of a batch and the norms of its rows before clipping, if known."""
        low, high = self._range
        self._range = min(low, norm), max(high, norm)
        if self._last not in (None, norm):
            self._num_changes += 1
            for (_, changes), norms in zip(self._changes.items(), (rows, self._rows), strict=True):
                if norms is not None and len(changes) < _MAX_CHANGES and _vary(norms):
                    changes.append((norm, _statistics(norms)))
        self._last, self._rows = norm, rows

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return what the clipping norms show."""
        del claimed
        if self._num_changes == 0 or self._is_adaptive:
            return CheckResults()
        for where, changes in self._changes.items():
            if match := _same_ratio(changes):
                name, ratio, count = match
                sentence = (
                    f"The clipping norm is computed from the data: in {count} of {len(changes)} batches it "
                    f"is {ratio:.4g} times the {name} gradient norm of {where}."
                )
                cause = "is max_grad_norm set to a statistic of the gradient norms, which is not private?"
                finding = replace(Finding.certain("clipping-norm", sentence), cause=cause)
                return CheckResults(certain=(finding,))
        low, high = self._range
        note = (
            f"The clipping norm changed {self._num_changes} times, between {low:.4g} and {high:.4g}: the "
            "accounting holds if it is one norm for all rows of a step, and does not depend on the data."
        )
        gap = "the clipping norm changed during the run: dependence on the data was not tested"
        if any(self._changes.values()):
            gap += ", except for statistics of the gradient norms of a batch"
        return CheckResults(notes=(note,), not_covered=(gap,))


def _vary(rows: Tensor) -> bool:
    """Return whether norms differ, the two largest too: rows of one length may be scaled to the norm."""
    if len(rows) < 2:
        return False
    largest = rows.topk(2).values
    return float(largest[0] - largest[1]) > _SATURATED * float(largest[0])


def _statistics(rows: Tensor) -> FloatArray:
    """Return the statistics of norms that are named in ``_STATISTICS``."""
    norms = rows.detach().float().cpu()
    statistics = torch.cat([norms.mean()[None], norms.median()[None], norms.quantile(_QUANTILES)])
    return np.asarray(statistics, dtype=np.float64)


def _same_ratio(changes: Sequence[tuple[float, FloatArray]]) -> tuple[str, float, int] | None:
    """Return a statistic to which many different norms have the same ratio, that ratio, and how many do."""
    if len(changes) < _FEWEST_SAME:
        return None
    norms, statistics = np.array([norm for norm, _ in changes]), np.stack([values for _, values in changes])
    best = None
    for name, column in zip(_STATISTICS, statistics.T, strict=True):
        each = norms / np.maximum(column, np.finfo(np.float32).tiny)
        order = np.argsort(each)
        ratios = each[order]
        counts = np.searchsorted(ratios, ratios * (1 + _SAME_RATIO), side="right") - np.arange(ratios.size)
        first = int(np.argmax(counts))
        members = order[first : first + int(counts[first])]
        count = len(np.unique(np.rint(np.log(norms[members]) / _APART)))  # one norm twice proves nothing
        if count >= max(_FEWEST_SAME, _SHARE_SAME * len(changes)) and (best is None or count > best[2]):
            best = name, float(ratios[first]), count
    return best
