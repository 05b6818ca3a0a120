"""Checks of sums, updates and batches that need no knowledge of the noise.

:class:`SumRecord` compares the sum of each step with what clipping allows, and notes changes of weights
outside of the update: no statistics are needed.
:class:`BatchRecord` compares the number of clipped rows with the number of drawn examples, and tests the
batches against Poisson sampling. Both are parts of a recorder, which joins their results in ``diagnose()``.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.diagnostics._p_values import Check, CheckResults, Finding
from dpaudit.diagnostics._participation import CUT, ParticipationRecord, participation_checks
from dpaudit.diagnostics._row_digests import RowRecord, size_checks
from dpaudit.diagnostics._step import ClaimedStep, ObservedStep, missing_fields
from dpaudit.errors import InputError

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


class _Match(NamedTuple):
    """A step that is matched with the batch that was drawn for it."""

    step: int
    rows: int
    size: int
    is_all: bool
    """Whether the batch is the whole data set: then each example may be left out for itself in every step."""

    @property
    def num_missing(self) -> int:
        """How many of the examples have no row; 0 if no row was clipped, which is another matter."""
        return max(0, self.size - self.rows) if self.rows else 0


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
        self.step_rows: list[int | None] = []  # of each step, if known
        self._given: list[int] = []  # sizes of the batches that the loop reports
        self._matches: list[_Match] = []
        self._more = _Worst()
        self._num_drawn, self._num_rows, self._num_steps, self._num_joined = 0, 0, 0, 0
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
                "The observer records the batches of this loader itself; remove observe_batch()."
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
            self._more.add(
                rows - left, f"in step {index}, {rows} rows, but {left or 'no'} drawn examples were left"
            )
        self._num_rows = min(self._num_rows + rows, self._num_drawn)
        batches = self._batches_of(rows)
        if not batches:
            return None
        members = np.concatenate([members for members, _ in batches])
        self._num_joined += sum(batch.size > 0 for batch, _ in batches) > 1
        if self.tests_sampling:
            self.participation.observe(members, batches[0][1])
        self._matches.append(_Match(index, rows, members.size, members.size == batches[0][1]))
        return members.size

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
        return {
            "participation": self.participation.state_dict(),
            "rows": None if self.rows is None else self.rows.state_dict(),
            "lists": [list(numbers) for numbers in (self.step_rows, self._given)],
            "matches": [tuple(match) for match in self._matches],
            "more": astuple(self._more),
            "numbers": [self._num_rows, self._num_steps, self._num_joined, self._is_active],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("the batches of steps", state):
            self.participation.load_state_dict(state["participation"])
            if self.rows is not None and state["rows"] is not None:
                self.rows.load_state_dict(state["rows"])
            self.step_rows, self._given = (list(numbers) for numbers in state["lists"])
            self._matches = [_Match(*match) for match in state["matches"]]
            self._more = _Worst(*state["more"])
            self._num_rows, self._num_steps, self._num_joined, self._is_active = state["numbers"]
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
        certain, notes = self._compare_rows()
        return replace(results, certain=tuple(certain), notes=(*results.notes, *notes))

    def _row_results(self, unobserved: str, sample_rate: float | None) -> CheckResults:
        """Test batches of which only the rows are known."""
        of_rows, missing = ([], []) if self.rows is None else self.rows.checks(sample_rate)
        of_sizes, why_not = list[Check](), ""
        if self.tests_sizes and sample_rate:
            of_sizes, why_not = size_checks(self.step_rows, sample_rate, self.rows)
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

    def _compare_rows(self) -> tuple[list[Finding], list[str]]:
        """Compare the numbers of rows with those of drawn examples; return findings and notes."""
        findings, notes = [], []
        more = self._compare_given() if self._given else self._more
        if more.count:
            text = f"in {more.count} of {len(self.step_rows)} steps: {more.sentence}."
            findings.append(
                Finding.certain("rows-drawn", f"More rows were clipped than examples drawn {text}")
            )
        if self._num_joined:
            notes.append(f"{self._num_joined} of {self._num_steps} steps use several draws of the sampler.")
        fewer = [match for match in self._matches if match.num_missing]
        if not fewer:
            return findings, notes
        worst, often = max(fewer, key=lambda match: match.num_missing), f"{len(fewer)} of {self._num_steps}"
        where = f"in step {worst.step}, {worst.rows} of {worst.size}"
        most = _cut_size(self._matches)
        if most is not None:
            how = f"Batches are cut to {most} rows: {often} have more examples"
        elif _is_cut_by_size(self._matches):
            how = f"Rows are left out in {often} steps ({where}), by the size of the batch alone"
        else:
            return findings, [
                *notes,
                f"Fewer rows were clipped than examples drawn in {often} steps: {where}.",
            ]
        finding = Finding.certain(
            "rows-drawn", f"{how}, so whether an example is used depends on the others."
        )
        return [*findings, replace(finding, cause=CUT)], notes

    def _compare_given(self) -> _Worst:
        """Compare the rows of all steps with the batches that the loop reported, one per step."""
        worst = _Worst()
        if len(self._given) != len(self.step_rows):
            return worst
        for index, (rows, size) in enumerate(zip(self.step_rows, self._given, strict=True)):
            if rows is not None and rows > max(size, 1):
                worst.add(rows - size, f"in step {index}, {rows} rows of {size} examples")
        return worst


def _cut_size(matches: Sequence[_Match]) -> int | None:
    """Return the size to which batches above it, and only these, are cut; None if there is none."""
    cut = {match.rows for match in matches if match.num_missing and not match.is_all}
    whole = max((match.rows for match in matches if not match.num_missing), default=0)
    min_cut = 8  # steps after which equal sizes of cut batches are not a coincidence
    is_cut = len(cut) == 1 and sum(match.num_missing > 0 for match in matches) >= min_cut
    return max(cut) if is_cut and max(cut) >= whole else None


def _is_cut_by_size(matches: Sequence[_Match]) -> bool:
    """Return whether the number of rows is smaller and depends on the number of examples alone."""
    rows_of = defaultdict[int, list[int]](list)
    for match in matches:
        if not match.is_all:
            rows_of[match.size].append(match.rows)
    if any(len(set(rows)) > 1 for rows in rows_of.values()):
        return False
    many_cut = 16  # batches of equal sizes and equal numbers of rows that are not a coincidence
    return sum(len(rows) - 1 for size, rows in rows_of.items() if 0 < rows[0] < size) >= many_cut
