"""The clipping norms of a training run, compared with the norms of the rows that were clipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer
from torch import Tensor

from dpaudit._types import FloatArray
from dpaudit.diagnostics import CheckResults, ClaimedStep, Finding

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
_FROM_DATA = "is max_grad_norm set to a statistic of the gradient norms, which is not private?"


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
                return CheckResults(
                    certain=(replace(Finding.certain("clipping-norm", sentence), cause=_FROM_DATA),)
                )
        low, high = self._range
        note = (
            f"The clipping norm changed {self._num_changes} times, between {low:.4g} and {high:.4g}: the "
            "accounting holds if it depends on the number of the step, but not on the data."
        )
        gap = "whether the clipping norm, which changed during the run, depends on the data is not tested"
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
