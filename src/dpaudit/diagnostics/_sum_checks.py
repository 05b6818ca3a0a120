"""Checks of sums and updates that need no knowledge of the noise.

:class:`SumRecord` compares the sum of each step with what clipping allows, and notes changes of weights
outside of the update: no statistics are needed. It is a part of a recorder, which joins its results with
others in ``diagnose()``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit.diagnostics._p_values import CheckResults, Finding
from dpaudit.diagnostics._step import ClaimedStep, ObservedStep, missing_fields

_ROUNDING = 1e-3  # relative to the limit; far above the rounding error of single precision
_SUM_FINDINGS = {
    "bypass": ("rows-drawn", "No row was clipped in {}, although the sum is not zero"),
    "left": ("sum-rebuilt", "The sum is not reset before {}"),
    "changed": ("sum-rebuilt", "The sum changes between clipping and noise in {}"),
    "norm": ("sum-norm", "The sum is longer than its clipped rows allow in {}"),
    "limit": ("clipping-norm", "Rows are clipped to a larger norm than that of the noise in {}"),
    "update": ("update-by-sum", "With the same release and another sum, the update is another one in {}"),
}
_TO_CHECK = {"weights": ("outside-update", "Weights change between an update and the next release in {}")}
_NO_ESTIMATE = {"bypass", "update", "weights"}  # whose size is not on the scale of a limit


@dataclass
class _Worst:
    """How many steps show a fault, and the step that shows it most."""

    count: int = 0
    size: float = -math.inf
    sentence: str = ""

    def add(self, size: float, sentence: str) -> None:
        self.count += 1
        if size > self.size:
            self.size, self.sentence = size, sentence


class SumRecord:
    """The sums of all steps, compared with the rows that clipping added to them, and changes of the weights.

    Nothing here is a statistical test: rounding is allowed for, and any excess is a certain finding.
    """

    def __init__(self) -> None:
        self.num_steps, self._num_unknown = 0, 0
        self._faults = {name: _Worst() for name in (*_SUM_FINDINGS, *_TO_CHECK, "shrunk")}

    def observe(self, step: ObservedStep) -> None:
        """Compare the sum of a step with its rows."""
        index = self.num_steps
        self._observe_changes(step, index)
        self.num_steps += 1
        norm, rows = step.example_sum_norm, step.num_rows
        if norm is None or rows is None:
            self._num_unknown += 1
            return
        if not math.isfinite(norm):  # gradients that are not finite are another matter
            return
        if rows == 0:
            if norm > _ROUNDING:
                text = f"in step {index}, its norm is {norm:.3g} clipping norms"
                self._faults["bypass"].add(norm, text)
            return
        limit = rows if step.sum_limit is None else step.sum_limit
        ratio = norm / max(limit, _ROUNDING) if step.sum_excess is None else step.sum_excess
        ulps = 8.0  # rounding errors of the data type of a sum
        if ratio > 1 + _ROUNDING + ulps * float(np.max(0.0 if step.eps is None else step.eps)):
            text = f"in step {index}, {rows:g} rows have {ratio:.4g} times their limit"
            self._faults["norm"].add(ratio, text)

    def _observe_changes(self, step: ObservedStep, index: int) -> None:
        for before, after, is_scaled in step.sum_changes:
            text = f"in step {index}, its norm changes from {before:.3g} to {after:.3g} clipping norms"
            name = "shrunk" if is_scaled and after < before else "changed"
            self._faults[name].add(abs(after - before), text)
        if step.sum_remainder > 0:
            text = f"in step {index}, it starts with {step.sum_remainder:.3g} clipping norms"
            self._faults["left"].add(step.sum_remainder, text)
        if step.changed_weights:
            first, *others = step.changed_weights
            text = f"before step {index}, {first}{f' and {len(others)} more' if others else ''}"
            self._faults["weights"].add(len(step.changed_weights), text)
        if step.follows_release is False:
            self._faults["update"].add(0.0, f"as in step {index}")
        if step.row_limit is not None and step.row_limit > 1 + _ROUNDING:
            self._faults["limit"].add(
                step.row_limit, f"in step {index}, to {step.row_limit:.4g} times that norm"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what was found so far, in plain values."""
        faults = {name: list(astuple(fault)) for name, fault in self._faults.items()}
        return {"num_steps": self.num_steps, "num_unknown": self._num_unknown, "faults": faults}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("the sums of steps", state):
            self.num_steps = _validate.integer("num_steps", state["num_steps"], low=0)
            self._num_unknown = _validate.integer("num_unknown", state["num_unknown"], low=0)
            self._faults = {name: _Worst(*state["faults"][name]) for name in self._faults}

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return certain findings about the sums."""
        del claimed
        shrunk = self._faults["shrunk"]
        unknown: tuple[str, ...] = (
            f"{self._num_unknown} sums were computed without the optimizer's own clipping methods: they were "
            "not compared with the clipped rows",
        )
        if self._num_unknown == self.num_steps:
            unknown = missing_fields((), ("example_sum_norm",))
        note = (
            f"The sum is scaled down between clipping and noise in {shrunk.count} of {self.num_steps} "
            f"steps: {shrunk.sentence}."
        )
        notes = (note,) if shrunk.count else ()
        not_covered = unknown if self._num_unknown else ()
        certain, to_check = (tuple(self._findings(facts)) for facts in (_SUM_FINDINGS, _TO_CHECK))
        return CheckResults(certain=certain, to_check=to_check, notes=notes, not_covered=not_covered)

    def _findings(self, facts: Mapping[str, tuple[str, str]]) -> Iterator[Finding]:
        for fault, (name, text) in facts.items():
            worst = self._faults[fault]
            if worst.count:
                how = text.format(f"{worst.count} of {self.num_steps} steps")
                estimate = math.nan if fault in _NO_ESTIMATE else worst.size
                yield Finding.certain(name, f"{how}: {worst.sentence}.", estimate)
