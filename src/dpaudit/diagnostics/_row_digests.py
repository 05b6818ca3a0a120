"""Tests of batches of which only the rows are known, not which examples they are.

A row is recognized by a digest of its numbers. Identical examples have the same digest. Under Poisson
sampling, a digest is in every batch independently with the same probability: given how often it occurs, the
steps in which it occurs are a uniformly random set, independently for all digests. This holds only if an
example is always the same row. Augmentation or padding that changes it makes batches of the same phase alike,
so there are no tests unless the number of examples is given and no more rows than that occur in several
passes over the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from dpaudit import _validate
from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.diagnostics._p_values import (
    Check,
    CountSum,
    EndRows,
    bonferroni,
    coins_p_value,
    hypergeometric,
    pairwise_products,
)
from dpaudit.diagnostics._participation import ParticipationRecord, batch_sizes, highest_rate, sample_rate

_MAX_DIGESTS = 2**18  # that are followed
_NUM_BUCKETS = 1024  # whose presence is kept for every step
_FEWEST_PASSES = 3.0  # over the data, after which rows that change have become more than the examples
_FEWEST_SHARED = 10.0  # expected number of shared rows below which a test shows nothing
_COPIES_SHARE, _MORE_COPIES = 0.01, 16  # digests beyond the number of examples, for rare coincidences
# Of each digest: the number of steps in which it occurs, the number of these that follow another of them, the
# latest of them, and whether it occurs several times in a step.
_COUNTS = np.dtype([("steps", "i8"), ("next_to", "i8"), ("last", "i8"), ("has_copies", "?")])
_CALL = "pass the batches to recorder.observe_batch(indices, num_examples) in each step"


class RowRecord:
    """The digests of the rows of each step; ``num_examples`` is the size of the data set, if known."""

    def __init__(self, num_examples: int | None = None) -> None:
        self.num_examples = None if num_examples is None else _validate.integer("num_examples", num_examples)
        self.num_steps = 0
        self._places: dict[int, int] = {}  # of digests in the counts
        self._counts = np.zeros(min(self.num_examples or 0, _MAX_DIGESTS), dtype=_COUNTS)
        self._counts["last"] = -2  # before any step
        self._num_classes = 0  # buckets, of which the first are kept
        self._presences = EndRows(dtype=np.bool_)

    @property
    def counts(self) -> npt.NDArray[Any]:
        """What is known of each digest: the fields of ``_COUNTS``."""
        return self._counts[: len(self._places)]

    def observe(self, digests: npt.NDArray[np.uint64]) -> None:
        """Add the digests of all rows of one step, without its padding.

        If there are more different ones than examples, or than can be followed, there are no tests, and later
        steps are only counted.
        """
        if len(self._places) <= len(self._counts):
            values, copies = np.unique(digests, return_counts=True)
            self._keep_presence(values)
            self._count(values, copies > 1)
        self.num_steps += 1

    def _count(self, values: npt.NDArray[np.uint64], has_copies: BoolArray) -> None:
        of, counts = self._places, self._counts
        places = np.array([of.setdefault(value, len(of)) for value in values.tolist()], dtype=np.int64)
        if len(of) <= len(counts):
            counts["next_to"][places] += counts["last"][places] == self.num_steps - 1
            counts["steps"][places] += 1
            counts["last"][places] = self.num_steps
            counts["has_copies"][places] |= has_copies

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        return {
            "num_steps": self.num_steps,
            "digests": np.array(list(self._places), dtype=np.uint64),
            "counts": {name: self._counts[name].copy() for name in _COUNTS.names or ()},
            "num_classes": self._num_classes,
            "presences": self._presences.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self.num_steps, self._num_classes = state["num_steps"], state["num_classes"]
        self._places = {value: place for place, value in enumerate(state["digests"].tolist())}
        for name, numbers in state["counts"].items():
            self._counts[name] = numbers
        self._presences.load_state_dict(state["presences"])

    def _keep_presence(self, values: npt.NDArray[np.uint64]) -> None:
        if self._num_classes == 0:  # set by the first batch alone
            buckets_per_row = 4  # so that most buckets are empty
            self._num_classes = max(_NUM_BUCKETS, buckets_per_row * len(values))
        buckets = (values % np.uint64(self._num_classes)).astype(np.int64)
        present = np.zeros(_NUM_BUCKETS, dtype=np.bool_)
        present[buckets[buckets < _NUM_BUCKETS]] = True
        self._presences.add({"present": present[None]})

    def checks(self, sample_rate: float | None) -> tuple[list[Check], list[str]]:
        """Run all tests for which rows and claim suffice; return what is not tested, too."""
        if not sample_rate or sample_rate >= 1 or self.num_steps == 0:
            return [], []
        why_not = self._why_not_tested()
        if why_not or self.num_examples is None:
            return [], [why_not]
        overlap = batch_overlap_of_rows(self, sample_rate)
        if overlap is None or sample_rate * self.num_steps < _FEWEST_PASSES:
            return [], [
                "participation and overlap are not tested, because rows of the batches occur again too "
                "rarely, as in fewer than three passes over the data or with augmentation, or in every step: "
                f"{_CALL}"
            ]
        checks = [
            overlap,
            repeated_rows(self._presences.rows()["present"], self._presences.steps),
            most_frequent_row(self, self.num_examples, sample_rate),
            copied_rows(self, self.num_examples),
        ]
        unranked = (
            "examples that are drawn more often than others, because too many examples may be identical: "
            f"{_CALL}"
        )
        return [check for check in checks if check is not None], [unranked] if checks[2] is None else []

    def _why_not_tested(self) -> str:
        if self.num_examples is None:
            return (
                "which examples are drawn is not tested: pass num_examples=, the number of examples in "
                "the data set, to observe() if each of them is always the same row"
            )
        if len(self._places) > _MAX_DIGESTS:
            return (
                f"participation is not tested, because there are more than {_MAX_DIGESTS:,} different rows: "
                f"{_CALL}"
            )
        if self.are_examples:
            return ""
        return (
            "participation and overlap are not tested, because the batches have more different rows than the "
            f"data set has examples (is num_examples right, or is the data augmented?): {_CALL}"
        )

    @property
    def assumption(self) -> str:
        """What all tests of rows assume, and what none of them can show."""
        return f"each example is always the same row, and {self.size_assumption}"

    @property
    def size_assumption(self) -> str:
        """What tests that use the number of examples assume."""
        return f"num_examples={self.num_examples} is the number of examples in the data set"

    @property
    def are_examples(self) -> bool:
        """Whether rows may be examples: there are no more of them."""
        return self.num_examples is not None and len(self._places) <= self.num_examples


def batch_overlap_of_rows(record: RowRecord, claimed: float) -> Check | None:
    """Test how many rows consecutive batches share, given how often each row occurs.

    Of a uniformly random set of k out of T steps, the number that follow another one is hypergeometric. A
    sample rate that changes below the claimed one makes rows cluster, too; but then a row is in the next
    batch at most as often as claimed. Return None if hardly any are expected.
    """
    counts, total = record.counts, record.num_steps
    numbers, multiplicities = np.unique(counts["steps"][counts["steps"] > 1], return_counts=True)
    if numbers.size == 0:
        return None
    shared = CountSum(
        (hypergeometric(total, int(number) - 1, int(number)) for number in numbers), multiplicities
    )
    if min(shared.mean, shared.variance) < _FEWEST_SHARED:
        return None
    observed = float(counts["next_to"].sum())
    ratio, p_value = observed / shared.mean, shared.p_value(observed)
    if ratio > 1:
        drawn = int(counts["steps"].sum())
        p_value = max(p_value, float(scipy.stats.binom.sf(observed - 1, drawn, highest_rate(claimed))))
    return Check(
        name="batch-overlap",
        p_value=p_value,
        sentence=f"Consecutive batches share {ratio:.2g} times as many rows as random batches.",
        estimate=ratio,
    )


def repeated_rows(present: BoolArray, steps: IntArray) -> Check | None:
    """Test the pair of batches that share most rows: epochs in a fixed order repeat their batches.

    A bucket is a set of digests. Given in how many steps it occurs, it is in both batches of a pair with a
    known probability, independently for all buckets.
    """
    total = len(present)
    if total < 2:
        return None
    sums = present.sum(axis=0).astype(np.float64)
    both = sums * (sums - 1) / (total * (total - 1))
    most, pair = 0.0, (0, 1)
    for block, shared, is_earlier in pairwise_products(present.astype(np.float32)):
        masked = np.where(is_earlier, shared, -1.0)
        later, earlier = np.unravel_index(int(np.argmax(masked)), masked.shape)
        if masked[later, earlier] > most:
            most, pair = float(masked[later, earlier]), (int(earlier), int(block[later]))
    smaller = float(min(present[list(pair)].sum(axis=1)))
    share = most / smaller if smaller else 0.0

    sizes = present.sum(axis=1) / max(float(present.sum()), 1.0)
    of_pair = np.minimum(1.0, sums * sizes[pair[0]]) * np.minimum(1.0, sums * sizes[pair[1]])
    p_value = max(_shared_p_value(most, both), _shared_p_value(most, of_pair))  # larger batches share more
    return Check(
        name="repeated-batches",
        p_value=bonferroni(p_value, total * (total - 1) / 2),
        sentence=f"The batches of steps {steps[pair[0]]} and {steps[pair[1]]} share {100 * share:.3g} % "
        "of the rows of the smaller one.",
        estimate=share,
    )


def _shared_p_value(most: float, both: FloatArray) -> float:
    """Return the p-value of the number of shared buckets; each is shared with its own probability."""
    return 1.0 if most <= both.sum() else coins_p_value(most, both)


def most_frequent_row(record: RowRecord, num_examples: int, claimed: float) -> Check | None:
    """Test the row that occurs most often: binomial, Bonferroni-corrected for all examples.

    Identical examples are one row, which occurs more often. At most as many rows can be of several examples
    as there are examples without a row of their own; a few more are allowed for, such as padding that is not
    marked. The next one is tested.
    """
    counts, total = record.counts, record.num_steps
    single = np.sort(counts["steps"][~counts["has_copies"]])[::-1]
    num_identical = num_examples - len(counts) + _num_others(num_examples)
    if single.size <= num_identical:
        return None
    count = int(single[num_identical])
    p_value = float(scipy.stats.binom.sf(count - 1, total, highest_rate(claimed)))
    return Check(
        name="favoured-example",
        p_value=bonferroni(p_value, num_examples),
        sentence=f"A row is in {count} of {total} batches; {claimed * total:.4g} are expected.",
        estimate=count / (claimed * total),
    )


def _num_others(num_examples: int) -> int:
    """Return how many rows may be no examples."""
    return math.ceil(_COPIES_SHARE * num_examples) + _MORE_COPIES


def copied_rows(record: RowRecord, num_examples: int) -> Check:
    """Test for examples that are in a batch several times: too many for identical examples.

    Each row that occurs several times in a batch is that of at least two examples, if none is drawn twice. A
    few more are allowed for, such as padding that is not marked.
    """
    copied, different = int(np.count_nonzero(record.counts["has_copies"])), len(record.counts)
    surplus = different + copied - num_examples
    is_found = surplus > _num_others(num_examples)
    return Check(
        name="duplicate-examples",
        p_value=0.0 if is_found else 1.0,
        sentence=f"{copied} of {different} different rows are in a batch several times, more "
        f"than a data set of {num_examples} examples can have identical ones.",
        estimate=float(copied),
        cause="is an example drawn several times into a batch, used in several rows, or repeated as padding?"
        if is_found
        else "",
    )


def size_checks(
    step_rows: Sequence[int | None], claimed: float, rows: RowRecord | None
) -> tuple[list[Check], str]:
    """Test how much the numbers of rows vary, as sizes of batches; return why not if they are not tested.

    The number of examples, if the record of rows has none, is derived from the mean size and the sample rate.
    A number of rows that may include padding is None.
    """
    sizes = [number for number in step_rows if number is not None]
    if len(sizes) < len(step_rows):
        why_not = (
            "batch sizes are not tested, because the gradient function is called without "
            "is_padding_example=, so that its rows may include padding"
        )
        return [], why_not if claimed < 1 else ""
    if sum(sizes) == 0:
        return [], ""
    num_examples = 0 if rows is None else rows.num_examples or 0
    is_known, most_guessed = num_examples >= max(sizes), 0.1
    if not is_known and claimed > most_guessed:  # otherwise, the number of examples hardly matters for sizes
        why_not = (
            f"batch sizes are not tested, because the sample rate is above {most_guessed:g} and the number "
            "of examples is unknown or smaller than a batch: pass num_examples= to observe()"
        )
        return [], why_not if claimed < 1 else ""
    record, derived = ParticipationRecord(), max(round(sum(sizes) / (len(sizes) * claimed)), *sizes)
    for size in sizes:
        record.observe_size(size, num_examples if is_known else derived)
    spread = batch_sizes(record)
    checks = [] if spread is None else [replace(spread, cause=_cause_of_sizes(sizes, spread.estimate))]
    if is_known and rows is not None and rows.are_examples:
        checks.append(sample_rate(record, claimed))
    return checks, ""


def _cause_of_sizes(sizes: Sequence[int], spread: float) -> str:
    """Return the likely cause of numbers of rows that do not vary like Poisson batches; empty if usual."""
    unit, least = math.gcd(*sizes), min(sizes)
    if least == max(sizes):
        return ""
    if unit > 1:
        return (
            f"the number of rows is always a multiple of {unit}: does an example become {unit} rows, or is a "
            "batch used again?"
        )
    padded_share = 0.2  # of the steps have the same smallest number of rows
    if sizes.count(least) >= max(8, padded_share * len(sizes)):
        return f"are batches filled up to {least} rows with padding that is not marked as such?"
    if spread > 1:
        return "does an example become several rows, is there padding, or is a batch used again?"
    return ""
