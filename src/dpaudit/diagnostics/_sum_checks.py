"""Checks of sums and batches that need no knowledge of the noise.

:class:`SumRecord` compares the sum of each step with what clipping allows: no statistics are needed.
:class:`BatchRecord` compares the number of clipped rows with the number of drawn examples, and tests the
batches against Poisson sampling. Both are parts of a recorder, which joins their results in ``diagnose()``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.diagnostics import _participation
from dpaudit.diagnostics._p_values import Check, CheckResults, Finding
from dpaudit.diagnostics._participation import ParticipationRecord, participation_checks
from dpaudit.diagnostics._row_digests import RowRecord, size_checks
from dpaudit.diagnostics._step import ClaimedStep, ObservedStep, missing_fields
from dpaudit.errors import InputError

_ROUNDING = 1e-3  # relative to the limit; far above the rounding error of single precision
_FEW_TRUNCATED = 8  # steps after which equal sizes of truncated batches are not a coincidence
_CHANGED, _LEFT = "changed", "left"
# attributes of a record of batches that its state holds unchanged
_PLAIN = (
    "_num_drawn",
    "_num_rows",
    "_num_steps",
    "_given",
    "step_rows",
    "_truncated",
    "_rows_of",
    "_largest_whole",
    "_num_joined",
    "_is_active",
)


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
    """The sums of all steps, compared with the rows that clipping added to them.

    Nothing here is a statistical test: rounding is allowed for, and any excess is a certain finding.
    """

    def __init__(self, not_covered: Sequence[str] = ()) -> None:
        self.num_steps = 0
        self._not_covered = tuple(not_covered)
        self._norm, self._bypass = _Worst(), _Worst()
        self._differences = {_CHANGED: _Worst(), _LEFT: _Worst()}
        self._shrunk = _Worst()
        self._num_unknown = 0

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
                self._bypass.add(norm, f"in step {index}, its norm is {norm:.3g} clipping norms")
            return
        limit = rows if step.sum_limit is None else step.sum_limit
        ratio = norm / max(limit, _ROUNDING) if step.sum_excess is None else step.sum_excess
        ulps = 8.0  # rounding errors of the data type of a sum
        if ratio > 1 + _ROUNDING + ulps * float(np.max(0.0 if step.eps is None else step.eps)):
            self._norm.add(ratio, f"in step {index}, {rows:g} rows have {ratio:.4g} times their limit")

    def _observe_changes(self, step: ObservedStep, index: int) -> None:
        for before, after, is_scaled in step.sum_changes:
            text = f"in step {index}, its norm changes from {before:.3g} to {after:.3g} clipping norms"
            worst = self._shrunk if is_scaled and after < before else self._differences[_CHANGED]
            worst.add(abs(after - before), text)
        if step.sum_remainder > 0:
            text = f"in step {index}, it starts with {step.sum_remainder:.3g} clipping norms"
            self._differences[_LEFT].add(step.sum_remainder, text)

    def state_dict(self) -> dict[str, Any]:
        """Return what was found so far, in plain values."""
        faults = {
            name: [fault.count, fault.size, fault.sentence]
            for name, fault in self._faults.items()
            if fault.count
        }
        return {"num_steps": self.num_steps, "num_unknown": self._num_unknown, "found": faults}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("the sums of steps", state):
            self.num_steps = _validate.integer("num_steps", state["num_steps"], low=0)
            self._num_unknown = _validate.integer("num_unknown", state["num_unknown"], low=0)
            for name, fault in self._faults.items():
                count, size, sentence = state["found"].get(name, (0, -math.inf, ""))
                fault.count = _validate.integer(name, count, low=0)
                fault.size, fault.sentence = float(size), str(sentence)

    @property
    def _faults(self) -> dict[str, _Worst]:
        return {"norm": self._norm, "bypass": self._bypass, "shrunk": self._shrunk, **self._differences}

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return certain findings about the sums."""
        del claimed
        not_covered = self._not_covered
        if self._num_unknown == self.num_steps:
            not_covered += missing_fields((), ("example_sum_norm",)) if self.num_steps else ()
        elif self._num_unknown:
            not_covered += (
                f"{self._num_unknown} sums were computed without the optimizer's own clipping methods: they "
                "were not compared with the clipped rows",
            )
        return CheckResults(certain=tuple(self._findings()), notes=self._notes(), not_covered=not_covered)

    def _findings(self) -> Iterator[Finding]:
        faults = (
            (self._bypass, "rows-drawn", "No row was clipped in {}, although the sum is not zero"),
            (self._differences[_LEFT], "sum-rebuilt", "The sum is not reset before {}"),
            (self._differences[_CHANGED], "sum-rebuilt", "The sum changes between clipping and noise in {}"),
            (self._norm, "sum-norm", "The sum is longer than its clipped rows allow in {}"),
        )
        for worst, name, text in faults:
            if worst.count:
                how = text.format(f"{worst.count} of {self.num_steps} steps")
                estimate = math.nan if worst is self._bypass else worst.size
                yield Finding.certain(name, f"{how}: {worst.sentence}.", estimate)

    def _notes(self) -> tuple[str, ...]:
        if not self._shrunk.count:
            return ()
        return (
            f"The sum is scaled down between clipping and noise in {self._shrunk.count} of {self.num_steps} "
            f"steps: {self._shrunk.sentence}.",
        )


class BatchRecord:
    """The batches that were drawn, compared with the rows that were clipped and with Poisson sampling.

    A loader may draw batches ahead, a loop may skip batches or split them. So only the totals are compared:
    at no time may more rows have been clipped than examples have been drawn. For an empty batch a loader may
    substitute one artificial example. ``unobserved`` is the sentence to report if no batch was observed.
    """

    def __init__(self, unobserved: str | None = None) -> None:
        self.participation = ParticipationRecord()
        self.unobserved = unobserved
        self.tests_sampling = True
        """Whether batches are tested against Poisson sampling; if not, ``unobserved`` says why."""
        self.tests_sizes = False
        """Whether the number of rows is the size of the batch even if the batch itself is unknown."""
        self.rows: RowRecord | None = None
        """Digests of the rows of each step, for tests if the batch itself is unknown."""
        max_pending = 64  # drawn batches that wait for their step
        self._pending: deque[tuple[IntArray, int]] = deque(maxlen=max_pending)
        self._num_drawn, self._num_rows, self._num_steps = 0, 0, 0
        self._given: list[int] = []  # sizes of the batches that the loop reports
        self.step_rows: list[int | None] = []  # of each step, if known
        self._more = _Worst()
        self._fewer = _Worst()
        self._truncated: set[int] = set()
        self._rows_of: dict[int, list[int]] = {}  # by the number of examples drawn
        self._largest_whole = 0
        self._num_joined = 0
        self._is_active = True

    @property
    def is_given(self) -> bool:
        """Whether the loop itself reports its batches."""
        return bool(self._given)

    def observe(self, step: ObservedStep) -> None:
        """Add what a step shows of its batch: the examples, the number of rows, or their digests."""
        if step.batch is not None and step.num_examples is not None:
            self.add_reported_batch(step.batch, step.num_examples)
        if step.num_rows is not None:
            self.match_step(int(step.num_rows), is_exact=not step.has_padding)
        if self.rows is not None and step.row_digests is not None and not self.is_given:
            self.rows.observe(step.row_digests)

    def add_reported_batch(self, indices: Any, num_examples: int) -> None:
        """Add the batch that a loop reports: indices of its examples in a data set of ``num_examples``."""
        if self._num_drawn:
            raise InputError(
                "Expected no observe_batch() for a loader that the observer follows, whose batches are "
                "recorded automatically."
            )
        self.participation.observe(indices, num_examples)
        self._given.append(len(indices))

    def add_drawn_batch(self, indices: Any, num_examples: int) -> None:
        """Add a batch that some later step will use."""
        members = np.asarray(indices, dtype=np.int64).reshape(-1)
        self._pending.append((members, num_examples))
        self._num_drawn += max(members.size, 1)

    def would_exceed(self, rows: int) -> bool:
        """Return whether ``rows`` more than those of earlier steps are more than were drawn."""
        return self._is_active and self._num_drawn > 0 and self._num_rows + rows > self._num_drawn

    def match_step(self, rows: int, *, is_exact: bool = True) -> int | None:
        """Note a step with this number of rows; return the number of examples drawn for it, if known.

        If not ``is_exact``, ``rows`` may include rows of zeros, which are padding.
        """
        self.step_rows.append(rows if is_exact else None)
        if self._num_drawn == 0:  # the loop started earlier, or uses another loader
            self._is_active = self._is_active and rows == 0
        if not self._is_active:
            return None
        index, self._num_steps = self._num_steps, self._num_steps + 1
        if self.would_exceed(rows) and is_exact:
            left = self._num_drawn - self._num_rows
            self._more.add(rows - left, f"in step {index}, {rows} rows, with {left} drawn examples left")
        self._num_rows = min(self._num_rows + rows, self._num_drawn)
        batches = self._batches_of(rows)
        if not batches:
            return None
        members = np.concatenate([members for members, _ in batches])
        self._num_joined += sum(batch.size > 0 for batch, _ in batches) > 1
        if self.tests_sampling:
            self.participation.observe(members, batches[0][1])
        is_all = members.size == batches[0][1]  # then each example may be left out for itself, in every step
        self._compare_drawn(index, rows, members.size, is_all=is_all)
        return members.size

    def _compare_drawn(self, index: int, rows: int, size: int, *, is_all: bool) -> None:
        """Compare the rows of a step with the ``size`` of its batch."""
        if not is_all:
            self._rows_of.setdefault(size, []).append(rows)
        if 0 < rows < size:
            self._fewer.add(size - rows, f"in step {index}, {rows} of {size}")
            if not is_all:
                self._truncated.add(rows)
        else:
            self._largest_whole = max(self._largest_whole, rows)

    def _batches_of(self, rows: int) -> list[tuple[IntArray, int]]:
        """Return and remove the pending batches of a step, oldest first.

        These are the oldest ones whose sizes add up to ``rows``, or the latest if the loop skipped batches,
        or else the oldest one.
        """
        sizes = [members.size for members, _ in self._pending]
        sums = np.cumsum(sizes)
        stops = np.flatnonzero(sums == rows)
        if stops.size:
            return [self._pending.popleft() for _ in range(int(stops[0]) + 1)]
        if sizes and sizes[-1] == rows:
            last = self._pending.pop()
            self._pending.clear()
            return [last]
        return [self._pending.popleft()] if self._pending else []

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen so far, for ``load_state_dict``; batches that wait for a step are not kept."""
        worst = {name: list(astuple(getattr(self, name))) for name in ("_more", "_fewer")}
        return {
            "participation": self.participation.state_dict(),
            "rows": None if self.rows is None else self.rows.state_dict(),
            **{name: deepcopy(getattr(self, name)) for name in _PLAIN},
            **worst,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("the batches of steps", state):
            self.participation.load_state_dict(state["participation"])
            if self.rows is not None and state["rows"] is not None:
                self.rows.load_state_dict(state["rows"])
            for name in _PLAIN:
                setattr(self, name, deepcopy(state[name]))
            self._more, self._fewer = _Worst(*state["_more"]), _Worst(*state["_fewer"])
            self._num_drawn = self._num_rows  # what was drawn ahead is drawn again
            self._pending.clear()

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return findings about rows and batches."""
        results, record, rate = CheckResults(), self.participation, claimed.sample_rate
        if record.num_steps:
            checks = participation_checks(record, rate)
            results = CheckResults(checks=tuple(checks), notes=record.rate_notes(rate))
        elif self.unobserved is not None:
            results = self._row_results(self.unobserved, rate)
        return replace(results, certain=tuple(self._findings()), notes=(*results.notes, *self._notes()))

    def _notes(self) -> list[str]:
        notes = []
        if self._num_joined:
            notes.append(f"{self._num_joined} of {self._num_steps} steps use several draws of the sampler.")
        if self._fewer.count and not self._is_truncated and not self._is_cut:
            notes.append(
                f"Fewer rows were clipped than examples drawn in {self._fewer.count} of {self._num_steps} "
                f"steps: {self._fewer.sentence}."
            )
        return notes

    def _row_results(self, unobserved: str, sample_rate: float | None) -> CheckResults:
        """Test batches of which only the rows are known."""
        of_rows, missing = ([], []) if self.rows is None else self.rows.checks(sample_rate)
        of_sizes, why_not = self._size_checks(sample_rate)
        gaps = missing or ([] if of_rows else [unobserved])
        assumed = []
        if self.rows is not None and of_rows:
            assumed = [self.rows.assumption]
        elif self.rows is not None and of_sizes and self.rows.num_examples is not None:
            assumed = [self.rows.size_assumption]
        return CheckResults(
            checks=(*of_sizes, *of_rows),
            not_covered=(*gaps, *([why_not] if why_not else [])),
            assumptions=tuple(assumed),
        )

    def _size_checks(self, claimed: float | None) -> tuple[list[Check], str]:
        """Test how much the sizes of batches vary, if only the number of rows of each step is known.

        The number of examples, if not given, is derived from the mean size and the sample rate. Return why
        there are no tests, too, unless it is obvious.
        """
        if not self.tests_sizes or not claimed:
            return [], ""
        sizes = [rows for rows in self.step_rows if rows is not None]
        if len(sizes) == len(self.step_rows):
            return size_checks(sizes, claimed, self.rows)
        why_not = (
            "batch sizes are not tested, because the gradient function is called without "
            "is_padding_example=, so that its rows may include padding"
        )
        return [], why_not if claimed < 1 else ""

    @property
    def _is_truncated(self) -> bool:
        """Whether batches above a certain size, and only these, lose the rows above it."""
        if self._fewer.count < _FEW_TRUNCATED or len(self._truncated) != 1:
            return False
        return max(self._truncated) >= self._largest_whole

    @property
    def _is_cut(self) -> bool:
        """Whether the number of rows is smaller and depends on the number of examples alone."""
        if any(len(set(rows)) > 1 for rows in self._rows_of.values()):
            return False
        many_cut = 16  # batches of equal sizes and equal numbers of rows that are not a coincidence
        return sum(len(rows) - 1 for size, rows in self._rows_of.items() if 0 < rows[0] < size) >= many_cut

    def _compare_given(self) -> _Worst:
        """Compare the rows of all steps with the batches that the loop reported, one per step."""
        worst = _Worst()
        if len(self._given) != len(self.step_rows):
            return worst
        for index, (rows, size) in enumerate(zip(self.step_rows, self._given, strict=True)):
            if rows is not None and rows > max(size, 1):
                worst.add(rows - size, f"in step {index}, {rows} rows of {size} examples")
        return worst

    def _findings(self) -> list[Finding]:
        findings, more = [], self._compare_given() if self._given else self._more
        if more.count:
            findings.append(
                Finding.certain(
                    "rows-drawn",
                    f"More rows were clipped than examples drawn in {more.count} of {len(self.step_rows)} "
                    f"steps: {more.sentence}.",
                )
            )
        if self._is_truncated or self._is_cut:
            often = f"{self._fewer.count} of {self._num_steps}"
            how = (
                f"Rows are left out in {often} steps ({self._fewer.sentence}), by the size of the batch alone"
            )
            if self._is_truncated:
                how = f"Batches are cut to {max(self._truncated)} rows: {often} have more examples"
            text = f"{how}, so whether an example is used depends on the others."
            findings.append(replace(Finding.certain("rows-drawn", text), cause=_participation.CUT))
        return findings
