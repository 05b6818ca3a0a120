"""The batches of a training run: what was drawn, what the steps used, and tests of the sampling.

A loader may draw batches ahead; a loop may skip, join, split and reorder them, or leave out rows. Nothing but
the number of rows shows which batch a step uses, so in :class:`WaitingBatches` a batch waits for a step with
as many rows, or with fewer. Only if no batches suffice, rows of the step were not drawn. :class:`BatchRecord`
is the part of a recorder that compares rows with batches, and batches with Poisson sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from dpaudit import _validate
from dpaudit._types import IntArray
from dpaudit.diagnostics._p_values import MAX_P_VALUE_OF_FINDING, Check, CheckResults, Finding
from dpaudit.diagnostics._participation import (
    CUT,
    ParticipationRecord,
    cut_size,
    is_cut_by_size,
    participation_checks,
    sizes_and_rate,
)
from dpaudit.diagnostics._row_digests import RowRecord, size_checks
from dpaudit.diagnostics._step import ClaimedStep, ObservedStep
from dpaudit.errors import InputError

_MATCHED = 0.9  # share of steps with the rows of their batches, so that the batches of all steps are known
_OTHER_LOADER = (
    "does the loop iterate over the original loader instead of the one that make_private returned?"
)


@dataclass(frozen=True, eq=False)
class _DrawnBatch:
    """A batch in the order of drawing; each pass over the loader is an epoch."""

    number: int
    epoch: int
    size: int


class _UsedBatches(NamedTuple):
    """The batches of a step: their number, besides empty ones, and their examples."""

    number: int
    size: int
    members: IntArray


class WaitingBatches:
    """Batches that wait for their steps, by epoch, and what was used of each epoch."""

    def __init__(self) -> None:
        self.num_drawn, self.is_complete, self.is_in_order = 0, True, True
        """The number of drawn batches, whether none of them was forgotten, whether steps keep the order."""
        self.sizes: set[int] = set()
        """All sizes of drawn batches."""
        self._waiting: dict[int, deque[_DrawnBatch]] = {}
        self._members: dict[int, IntArray] = {}  # examples that no step has used, by the number of a batch
        self._used: dict[int, tuple[_DrawnBatch, _DrawnBatch]] = {}  # the first and the last one, by epoch
        self._epoch = self._rest = 0  # of the batch used last: its epoch, and how many examples no step used

    def add(self, members: IntArray, epoch: int) -> None:
        """Add a batch that some later step will use."""
        batch = _DrawnBatch(self.num_drawn, epoch, members.size)
        self._waiting.setdefault(epoch, deque()).append(batch)
        self._members[batch.number] = members
        self.sizes.add(batch.size)
        self.num_drawn += 1
        max_waiting = 4096  # batches, such as those of passes that only evaluate; some megabytes
        if len(self._members) > max_waiting:
            self.is_complete = False
            oldest = self._waiting[min(self._waiting)][0]
            self._remove(oldest)
            self._take_members(oldest)

    def __iter__(self) -> Iterator[_DrawnBatch]:
        """Yield the batches that wait for a step: those of the epoch in use, then those of the newest.

        Those that were drawn before the last used batch of their epoch come last: they are skipped or kept.
        """
        passed = list[_DrawnBatch]()
        for epoch in sorted(self._waiting, key=lambda epoch: (epoch != self._epoch, -epoch)):
            last = self._used[epoch][1].number if epoch in self._used else -1
            for batch in self._waiting[epoch]:
                if batch.number > last:
                    yield batch
                else:
                    passed.append(batch)
        yield from passed

    def use(self, rows: int) -> _UsedBatches | None:
        """Return the batches of a step, which wait no longer; None if it uses the rest of an earlier one."""
        following = next(iter(self), None)
        is_next = following is not None and following.size == rows
        batches = [following] if following and is_next else _fitting(list(self), rows)
        size = sum(batch.size for batch in batches)
        if max(size, len(batches)) < rows <= self._rest:
            self._rest -= rows
            return None
        self._rest = max(size - rows, 0)
        for batch in batches:
            self._remove(batch)
            self._epoch = batch.epoch
            first, last = self._used.get(batch.epoch, (batch, batch))
            self.is_in_order &= batch.number >= last.number
            self._used[batch.epoch] = first, max(last, batch, key=attrgetter("number"))
        examples = [self._take_members(batch if size == rows else None) for batch in batches]
        number = sum(batch.size > 0 for batch in batches) or min(len(batches), 1)
        return _UsedBatches(number, size, np.concatenate([np.zeros(0, dtype=np.int64), *examples]))

    def _remove(self, batch: _DrawnBatch) -> None:
        queue = self._waiting[batch.epoch]
        queue.remove(batch)
        if not queue:
            del self._waiting[batch.epoch]

    def _take_members(self, batch: _DrawnBatch | None) -> IntArray:
        """Return the examples of a batch, or the oldest ones if it is not certain which batch was used.

        A choice by size would make sizes depend on each other, which tests of the sampling would flag.
        """
        number = next(iter(self._members)) if batch is None else batch.number
        return self._members.pop(number if number in self._members else next(iter(self._members)))

    def skipped(self) -> list[_DrawnBatch]:
        """Return the batches without a step between two of the same epoch that have one.

        A look at the first batch, a pass that only evaluates and the rest of an epoch that ends early are
        none of them.
        """

        def is_skipped(batch: _DrawnBatch) -> bool:
            first, last = self._used.get(batch.epoch, (batch, batch))
            return first.number < batch.number < last.number

        return list(filter(is_skipped, self))


def _fitting(waiting: Sequence[_DrawnBatch], rows: int) -> list[_DrawnBatch]:
    """Choose the batches of a step from those that wait for one, in order.

    It is one of this size, because a loop may skip batches, or else the smallest one that is large enough: if
    each step has a batch of its own, one then remains for each of the others, whatever rows it leaves out.
    For an empty batch, a loader may substitute one artificial example. Only if no batch is large enough, the
    step has several: the first ones that suffice, or all.
    """
    fitting = [batch for batch in waiting if max(batch.size, 1) >= rows]
    if fitting:
        return [min(fitting, key=lambda batch: (batch.size != rows, batch.size))]
    filled = [batch for batch in waiting if batch.size]
    stop = int(np.searchsorted(np.cumsum([batch.size for batch in filled]), rows))
    return filled[: stop + 1]


class _Match(NamedTuple):
    """A step that is matched with the batch that was drawn for it."""

    step: int
    rows: int
    size: int
    is_all: bool
    """Whether the batch is the whole data set: then each example may be left out for itself in every step."""
    num_more: int = 0
    """How many rows belong to no drawn example, besides the artificial one of an empty batch."""

    @property
    def num_missing(self) -> int:
        """How many of the examples have no row; 0 if no row was clipped, which is another matter."""
        return max(0, self.size - self.rows) if self.rows else 0


@dataclass
class _Totals:
    """What was drawn and used so far."""

    examples: int = 0  # that were drawn; an empty batch counts as one
    rows: int = 0
    steps: int = 0
    joined: int = 0  # steps of several batches
    skipped: int = 0  # batches, before the run was resumed
    has_more_rows: bool = False  # than examples were drawn
    is_active: bool = True


class BatchRecord:
    """The batches that were drawn, compared with the rows that were clipped and with Poisson sampling.

    The batches of a loader are matched with steps by the number of rows; those that a loop reports belong to
    its steps in order. ``unobserved`` is the sentence to report if no batch was observed.
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
        self.num_examples: int | None = None
        """The size of the data set of a loader that is followed, 0 if unknown; None without a loader."""
        self.fills_empty = False
        """Whether that loader substitutes an artificial example for an empty batch."""
        self._drawn, self._drawn_from = WaitingBatches(), 0  # and the size of their data set
        self.step_rows: list[int | None] = []  # of each step, if known
        self._given: list[int] = []  # sizes of the batches that the loop reports
        self._matches: list[_Match] = []
        self._totals = _Totals()

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
        if self._drawn.num_drawn:
            raise InputError(
                "The observer records the batches of this loader itself; remove observe_batch()."
            )
        self.participation.observe(indices, num_examples)
        self._given.append(len(indices))

    def add_drawn_batch(self, indices: Any, num_examples: int, epoch: int = 0) -> None:
        """Add a batch that some later step will use."""
        members = np.asarray(indices, dtype=np.int64).reshape(-1)
        self._drawn_from = num_examples
        self._drawn.add(members, epoch)
        self._totals.examples += max(members.size, 1)

    def may_be_padded(self, rows: int) -> bool:
        """Return whether this many rows of a step so far may be more than its examples."""
        if self.is_given or self._drawn.num_drawn == 0:
            return self.is_given or self.num_examples is not None
        following = next(iter(self._drawn), None)
        return following is None or rows > following.size

    def match_step(self, rows: int, *, is_exact: bool = True) -> int | None:
        """Note a step with this number of rows; return the number of examples drawn for it, if known.

        If not ``is_exact``, ``rows`` may include rows of zeros, which are padding.
        """
        self.step_rows.append(rows if is_exact else None)
        totals = self._totals
        if self._drawn.num_drawn == 0:  # the loop started earlier, or uses another loader
            totals.is_active = totals.is_active and rows == 0
        if not totals.is_active:
            return None
        index, totals.steps = totals.steps, totals.steps + 1
        totals.has_more_rows |= is_exact and totals.rows + rows > totals.examples
        totals.rows = min(totals.rows + rows, totals.examples)
        used = self._drawn.use(rows)
        if used is None:
            return None
        is_filled = used.number > 0 and used.size == 0 and rows == 1  # by an artificial example
        is_known = is_exact and self._drawn.is_complete and not is_filled
        match = _Match(
            index, rows, used.size, used.size == self._drawn_from, max(rows - used.size, 0) * is_known
        )
        if used.number or match.num_more:
            self._matches.append(match)
        return self._observe_members(used) if used.number else None

    def _observe_members(self, used: _UsedBatches) -> int:
        self._totals.joined += used.number > 1
        if self.tests_sampling:
            self.participation.observe(used.members, self._drawn_from)
        return used.size

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen so far, for ``load_state_dict``; batches that wait for a step are not kept."""
        totals = replace(self._totals, skipped=self._totals.skipped + len(self._drawn.skipped()))
        return {
            "participation": self.participation.state_dict(),
            "rows": None if self.rows is None else self.rows.state_dict(),
            "lists": [list(numbers) for numbers in (self.step_rows, self._given, self._drawn.sizes)],
            "matches": [tuple(match) for match in self._matches],
            "totals": [self._drawn.num_drawn, *astuple(totals)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        with _validate.state_dict_errors("the batches of steps", state):
            self.participation.load_state_dict(state["participation"])
            if self.rows is not None and state["rows"] is not None:
                self.rows.load_state_dict(state["rows"])
            self.step_rows, self._given, sizes = (list(numbers) for numbers in state["lists"])
            self._drawn = WaitingBatches()
            self._drawn.sizes, self._drawn.num_drawn = set(sizes), state["totals"][0]
            self._matches = [_Match(*match) for match in state["matches"]]
            self._totals = _Totals(*state["totals"][1:])
            self._totals.examples = self._totals.rows  # what was drawn ahead is drawn again

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return findings about rows and batches."""
        results, record, rate = CheckResults(), self.participation, claimed.sample_rate
        if self._is_loader_unused:
            results = self._unused_results(rate)
        elif record.num_steps:
            checks = participation_checks(record, rate)
            results = CheckResults(checks=tuple(checks), notes=record.rate_notes(rate))
        elif self.unobserved is not None:
            results = self._row_results(self.unobserved, rate)
        lints = [] if self._is_loader_unused else [*self._compare_rows()]
        return replace(
            results,
            certain=(*results.certain, *(lint for lint in lints if isinstance(lint, Finding))),
            to_check=(*results.to_check, *self._skipped_facts()),
            notes=(*results.notes, *(lint for lint in lints if isinstance(lint, str))),
        )

    @property
    def _is_loader_unused(self) -> bool:
        """Whether a loader that is followed drew fewer batches than half of the steps need."""
        num_steps, min_steps = len(self.step_rows), 8  # fewer may be the rest of an epoch that began before
        is_followed = self.num_examples is not None and not self._given
        return is_followed and num_steps >= min_steps and 2 * self._drawn.num_drawn < num_steps

    def _unused_results(self, rate: float | None) -> CheckResults:
        """Test the numbers of rows of steps that do not use the batches of the loader."""
        num_drawn, num_steps = self._drawn.num_drawn, len(self.step_rows)
        rows = [number for number in self.step_rows if number is not None]
        if num_drawn and self._drawn.sizes.issuperset(rows):
            text = f"The steps use batches of loader= again and again: {num_drawn} of {num_steps} are new."
            finding = replace(Finding.certain("loader-used", text), cause="is a batch kept and used again?")
            return CheckResults(certain=(finding,))
        fact = f"loader= drew batches for {num_drawn or 'none'} of {num_steps} steps"
        checks = list[Check]()
        if rows and self.tests_sampling and max(rows) <= (self.num_examples or 0):
            check = sizes_and_rate(rows, self.num_examples or 0, rate)
            text = f"{fact}. {check.sentence}"
            checks = [replace(check, name="loader-used", sentence=text, cause=_OTHER_LOADER)]
            if check.p_value <= MAX_P_VALUE_OF_FINDING:
                return CheckResults(checks=tuple(checks))
        text = f"{fact}: the loop uses another loader, or one that started before observe()."
        return CheckResults(checks=tuple(checks), to_check=(Finding.certain("loader-used", text),))

    def _skipped_facts(self) -> Iterator[Finding]:
        """Yield how many drawn batches no step used, if steps and batches can be matched."""
        skipped, matches = self._drawn.skipped(), self._matches
        if self._totals.joined:  # empty batches add no rows to the others
            skipped = [batch for batch in skipped if batch.size]
        count = len(skipped) + self._totals.skipped
        num_exact = sum(match.rows == match.size for match in matches)
        is_filled = self.fills_empty and 0 in self._drawn.sizes  # such batches look like those of one example
        is_matched = self._drawn.is_in_order and num_exact >= _MATCHED * len(matches) and not is_filled
        min_skipped = 2  # a look at one batch, after the first of them, is innocent
        if is_matched and count >= min_skipped:
            empty = "" if any(batch.size for batch in skipped) else ", all of them empty"
            sentence = f"{count} of {count + len(matches)} drawn batches have no step{empty}."
            yield Finding.certain("unused-batches", sentence)

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

    def _compare_rows(self) -> Iterator[Finding | str]:
        """Compare the numbers of rows with those of drawn examples; yield findings and notes."""
        matches, totals = self._given_matches() if self._given else self._matches, self._totals
        more = [match for match in matches if match.num_more]
        fewer = [match for match in matches if match.num_missing]
        are_others = min(len(more), len(fewer)) >= 2  # which is no accident
        if more:
            text = self._more_rows(more, are_others=are_others)
            is_certain = are_others or self._given or totals.has_more_rows
            name = "rows-drawn" if text.startswith("More") else "loader-used"
            yield Finding.certain(name, text) if is_certain else text
        if totals.joined:
            yield f"{totals.joined} of {totals.steps} steps use several draws of the sampler."
        if fewer and not are_others and not self._given:
            yield self._fewer_rows(fewer)

    def _more_rows(self, more: Sequence[_Match], *, are_others: bool) -> str:
        """Return what steps with more rows than examples show."""
        worst, count = (
            max(more, key=lambda match: match.num_more),
            f"{len(more)} of {len(self.step_rows)} steps",
        )
        where = f"in step {worst.step}, {worst.rows} rows of {worst.size or 'no'} drawn examples"
        if are_others:
            return f"{count} have more rows than examples were drawn, others have fewer: {where}."
        if self._given or any(match.size for match in more):
            return f"More rows were clipped than examples drawn in {count}: {where}."
        return f"loader= drew no batch for {count}: {where}."

    def _fewer_rows(self, fewer: Sequence[_Match]) -> Finding | str:
        """Return what steps with fewer rows than examples show: a finding, or a note."""
        often, pairs = f"{len(fewer)} of {self._totals.steps}", [match[1:4] for match in self._matches]
        most = cut_size(pairs)
        worst = max(fewer, key=lambda match: match.num_missing)
        where = f"in step {worst.step}, {worst.rows} of {worst.size}"
        if most is not None and {rows for rows, *_ in pairs} == {most}:
            sentence = f"Every step has {most} rows, whatever was drawn: {where}."
            cause = "is one batch used in all steps, or are large batches cut to a size?"
            return replace(Finding.certain("loader-used", sentence), cause=cause)
        if most is not None:
            how = f"Batches are cut to {most} rows: {often} have more examples"
        elif is_cut_by_size(pairs):
            how = f"Rows are left out in {often} steps ({where}), by the size of the batch alone"
        else:
            return f"Fewer rows were clipped than examples drawn in {often} steps: {where}."
        sentence = f"{how}, so whether an example is used depends on the others."
        return replace(Finding.certain("rows-drawn", sentence), cause=CUT)

    def _given_matches(self) -> list[_Match]:
        """Compare the rows of all steps with the batches that the loop reported, one per step."""
        if len(self._given) != len(self.step_rows):
            return []
        return [
            _Match(index, rows, size, is_all=False, num_more=max(rows - max(size, 1), 0))
            for index, (rows, size) in enumerate(zip(self.step_rows, self._given, strict=True))
            if rows is not None
        ]
