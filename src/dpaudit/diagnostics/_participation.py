"""Tests of the batches of a training run against Poisson sampling, and the record that they use.

Under the null hypothesis, every example is in every batch independently with the same probability. Most tests
condition on statistics that remove this probability: given their sum, two binomial variables of equal rate
are hypergeometric, and given its size, a batch is a uniformly random set. All tests except those of the rate
are therefore valid at any rate. To add a test, register it in ``participation_checks``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from dpaudit import _validate
from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics._p_values import (
    RESOLUTION,
    SMALLEST_P_VALUE,
    Check,
    CountSum,
    EndRows,
    bonferroni,
    coins_p_value,
    fixed_rng,
    hypergeometric,
    hypergeometric_tail,
    pairwise_products,
)
from dpaudit.errors import InputError

_WATCHED = 1024  # examples whose presence is kept for every step
_CANDIDATES = 32  # pairs of batches per block whose p-values are computed

CUT = "are large batches cut to a size? Whether an example is used then depends on the others."
"""The cause if no batch is larger than a certain size."""


class ParticipationRecord:
    """Batch sizes, participation counts, overlaps, and the presence of some examples in each step."""

    def __init__(self) -> None:
        self.num_examples = 0
        self.sizes: list[int] = []
        self.counts: IntArray
        """The number of batches that contain each example."""
        self.num_repeated = 0
        """The number of surplus copies of examples within batches."""
        self.overlaps: list[int] = []
        """The number of examples that each batch shares with the previous one."""
        self.watched: IntArray
        self.presences = EndRows(dtype=np.uint8)
        """Whether each of the watched examples is in the batch, as bits."""
        self._last: IntArray | None = None

    @property
    def num_steps(self) -> int:
        """The number of observed batches."""
        return len(self.sizes)

    @property
    def num_trials(self) -> int:
        """The total number of independent draws: one per step and example."""
        return self.num_steps * self.num_examples

    @property
    def drawn_rate(self) -> float:
        """The fraction of draws that put an example into its batch."""
        return sum(self.sizes) / self.num_trials

    @property
    def has_members(self) -> bool:
        """Whether the examples of the batches are known, not only their number."""
        return self._last is not None

    def observe(self, indices: Any, num_examples: int) -> None:
        """Add one batch: the indices of its examples in a data set of ``num_examples``."""
        if self.num_steps and not self.has_members:
            raise InputError("Pass the size of the batch, as in earlier steps, not its examples.")
        members = _members(indices, self._require_same(num_examples))
        is_in = np.zeros(self.num_examples, dtype=np.bool_)  # a mask is faster than sets
        is_in[members] = True
        unique = np.flatnonzero(is_in)
        if self._last is None:
            self._start()
        else:
            self.overlaps.append(int(np.count_nonzero(is_in[self._last])))
        self.num_repeated += members.size - unique.size
        self.counts[unique] += 1
        self.sizes.append(unique.size)
        self.presences.add({"bits": np.packbits(is_in[self.watched])[None]})
        self._last = unique

    def rate_notes(self, claimed: float | None) -> tuple[str, ...]:
        """Return a note if examples are drawn less often than claimed, which costs accuracy, not privacy."""
        if claimed is None or self.num_steps == 0:
            return ()
        rate, error = self.drawn_rate, math.sqrt(claimed * (1 - claimed) / self.num_trials)
        if rate >= claimed * (1 - RESOLUTION) - 4 * error:
            return ()
        return (f"Examples are drawn at a rate of {rate:.4g}, below the claimed {claimed:.4g}.",)

    def observe_size(self, size: int, num_examples: int) -> None:
        """Add the size of one batch whose examples are unknown."""
        if self.has_members:
            raise InputError("Pass the examples of the batch, as in earlier steps, not its size.")
        largest = self._require_same(num_examples)
        if _validate.integer("size", size, 0) > largest:
            raise InputError(f"size must be at most num_examples={largest}, got {size}.")
        self.sizes.append(int(size))

    def _require_same(self, num_examples: int) -> int:
        _validate.integer("num_examples", num_examples)
        if self.num_steps and num_examples != self.num_examples:
            raise InputError(
                f"num_examples must be {self.num_examples}, as in earlier steps, got {num_examples}."
            )
        self.num_examples = int(num_examples)
        return self.num_examples

    def _start(self) -> None:
        self.counts = np.zeros(self.num_examples, dtype=np.int64)
        self.watched = np.sort(fixed_rng(3).permutation(self.num_examples)[:_WATCHED])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for ``load_state_dict``."""
        state = {
            "num_examples": self.num_examples,
            "sizes": list(self.sizes),
            "has_members": self.has_members,
        }
        if not self.has_members:
            return state
        return state | {
            "counts": self.counts.copy(),
            "num_repeated": self.num_repeated,
            "overlaps": list(self.overlaps),
            "presences": self.presences.state_dict(),
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self.num_examples = state["num_examples"]
        self.sizes = list(state["sizes"])
        if not state["has_members"]:
            return
        self._start()
        self.counts = state["counts"].copy()
        self.num_repeated = state["num_repeated"]
        self.overlaps = list(state["overlaps"])
        self.presences.load_state_dict(state["presences"])
        self._last = state["last"]


def _members(indices: Any, num_examples: int) -> IntArray:
    members = np.asarray(indices)
    if members.ndim != 1 or (members.size and members.dtype.kind not in "iu"):
        raise InputError(
            f"indices must be a vector of whole numbers, got shape {members.shape} of {members.dtype}."
        )
    if members.size and (members.min() < 0 or members.max() >= num_examples):
        outside = members[(members < 0) | (members >= num_examples)]
        raise InputError(f"indices must be between 0 and {num_examples - 1}, got {outside[0]}.")
    return members.astype(np.int64, copy=False)


def participation_checks(record: ParticipationRecord, claimed: float | None) -> list[Check]:
    """Run all tests for which the record and the claimed rate suffice."""
    if record.num_steps == 0:
        return []
    checks: list[Check | None] = [_with_limits(batch_sizes(record), record)]
    if claimed is not None:
        checks.append(sample_rate(record, claimed))
    if record.has_members:
        checks += [
            participation_counts(record),
            batch_overlap(record),
            repeated_batches(record),
            duplicate_examples(record),
        ]
        if claimed is not None:
            checks.append(favoured_example(record, claimed))
    return [check for check in checks if check is not None]


def sizes_and_rate(sizes: Iterable[int], num_examples: int, claimed: float | None) -> Check:
    """Return the worst test of sizes of batches whose examples are unknown, corrected for their number."""
    record = ParticipationRecord()
    for size in sizes:
        record.observe_size(size, num_examples)
    checks = participation_checks(record, claimed)
    worst = min(checks, key=lambda check: check.p_value)
    return replace(worst, p_value=bonferroni(worst.p_value, len(checks)))


def batch_sizes(record: ParticipationRecord) -> Check | None:
    """Test how much batch sizes vary: fixed ones do not at all, those of groups too much."""
    sizes, same = np.asarray(record.sizes), "Every batch has the same size"
    check = _spread("batch-sizes", "batch sizes", same, sizes, record.num_examples)
    if check is None or check.estimate <= 1:
        return check
    return replace(
        check, cause="are examples drawn together, in groups, or is the rate changed between steps?"
    )


def _with_limits(spread: Check | None, record: ParticipationRecord) -> Check | None:
    """Add a test of the largest and the smallest batch, which are too ordinary if batches are cut or skipped.

    Given their sum, batch sizes are negatively associated (Joag-Dev and Proschan 1983), so the probability
    that all are within a limit is at most the product of their probabilities.
    """
    if spread is None:
        return None
    steps, low, high = record.num_steps, min(record.sizes), max(record.sizes)
    values, probabilities = hypergeometric(
        record.num_examples * steps, sum(record.sizes), record.num_examples
    )
    below = min(float(probabilities[values <= high].sum()), 1.0) ** steps
    above = min(float(probabilities[values >= low].sum()), 1.0) ** steps
    joint = min(1.0, 2 * min(spread.p_value, 2 * below, 2 * above))
    if spread.p_value <= max(2 * min(below, above), SMALLEST_P_VALUE):  # the spread explains it
        return replace(spread, p_value=joint)
    limit, word, cause = low, "fewer", "are empty or small batches skipped, or filled up?"
    if below <= above:
        limit, word, cause = high, "more", CUT
    count = record.sizes.count(limit)
    return Check(
        name=spread.name,
        p_value=joint,
        sentence=f"None of {steps} batches has {word} than {limit} examples, and "
        f"{count} {'has' if count == 1 else 'have'} {limit}: under Poisson sampling, sizes would go beyond.",
        estimate=spread.estimate,
        cause=cause,
    )


def cut_size(sizes: Sequence[tuple[int, int, bool]]) -> int | None:
    """Return the size to which batches above it, and only these, are cut; None if there is none.

    Of each batch, ``sizes`` has the number of rows, the number of examples, and whether these are all.
    """
    cut = {rows for rows, size, is_all in sizes if 0 < rows < size and not is_all}
    whole = max((rows for rows, size, _ in sizes if not 0 < rows < size), default=0)
    min_cut = 8  # steps after which equal sizes of cut batches are not a coincidence
    is_cut = len(cut) == 1 and sum(0 < rows < size for rows, size, _ in sizes) >= min_cut
    return max(cut) if is_cut and max(cut) >= whole else None


def is_cut_by_size(sizes: Sequence[tuple[int, int, bool]]) -> bool:
    """Return whether the number of rows is smaller and depends on the number of examples alone."""
    rows_of = defaultdict[int, list[int]](list)
    for rows, size, is_all in sizes:
        if not is_all:
            rows_of[size].append(rows)
    if any(len(set(numbers)) > 1 for numbers in rows_of.values()):
        return False
    many_cut = 16  # batches of equal sizes and equal numbers of rows that are not a coincidence
    return sum(len(rows) - 1 for size, rows in rows_of.items() if 0 < rows[0] < size) >= many_cut


def participation_counts(record: ParticipationRecord) -> Check | None:
    """Test how much participation counts vary: in shuffled epochs, all examples take part equally often."""
    order = fixed_rng(4).permutation(record.num_examples)
    same = "Every example took part equally often"
    return _spread(
        "participation-counts", "participation counts", same, record.counts[order], record.num_steps
    )


def _spread(name: str, what: str, same: str, counts: IntArray, trials: int) -> Check | None:
    """Test squared differences of pairs of counts, given their sums, with a Chernoff bound."""
    max_pairs = 2**15  # pairs of counts that are compared
    pairs = counts[: counts.size // 2 * 2].reshape(-1, 2)[:max_pairs]
    if len(pairs) == 0:
        return None
    sums, multiplicities = np.unique(pairs.sum(axis=1), return_counts=True)
    observed = float(((pairs[:, 0] - pairs[:, 1]) ** 2).sum())
    expected = CountSum((_squared_difference(int(total), trials) for total in sums), multiplicities)
    ratio = math.sqrt(observed / expected.mean) if expected.mean > 0 else 1.0
    return Check(
        name=name,
        p_value=expected.p_value(observed),
        sentence=f"{same}; under Poisson sampling, {what} would vary."
        if observed == 0
        else f"{what.capitalize()} vary {ratio:.2g} times as much as under Poisson sampling.",
        estimate=ratio,
    )


def _squared_difference(total: int, trials: int) -> tuple[FloatArray, FloatArray]:
    """Return the possible values for two binomial variables with this sum, and their probabilities."""
    values, probabilities = hypergeometric(2 * trials, total, trials)
    squares: FloatArray = ((2 * values - total) ** 2).astype(np.float64)
    return squares, probabilities


def sample_rate(record: ParticipationRecord, claimed: float) -> Check:
    """Test the number of participations: binomial. Fewer than claimed leak less and are not a finding."""
    rate = record.drawn_rate
    return Check(
        name="sample-rate",
        p_value=float(scipy.stats.binom.sf(sum(record.sizes) - 1, record.num_trials, highest_rate(claimed))),
        sentence=f"Examples are drawn at a rate of {rate:.4g}, {rate / claimed:.4g} times the claim.",
        estimate=rate / claimed,
    )


def favoured_example(record: ParticipationRecord, claimed: float) -> Check:
    """Test the example that took part most often: binomial, Bonferroni-corrected for all examples."""
    example = int(np.argmax(record.counts))
    count = int(record.counts[example])
    p_value = float(scipy.stats.binom.sf(count - 1, record.num_steps, highest_rate(claimed)))
    return Check(
        name="favoured-example",
        p_value=bonferroni(p_value, record.num_examples),
        sentence=f"Example {example} is in {count} of {record.num_steps} batches; "
        f"{claimed * record.num_steps:.4g} are expected.",
        estimate=count / (claimed * record.num_steps),
    )


def duplicate_examples(record: ParticipationRecord) -> Check:
    """Test for duplicates within a batch, which never occur in Poisson sampling."""
    return Check(
        name="duplicate-examples",
        p_value=0.0 if record.num_repeated else 1.0,
        sentence=f"Number of duplicate examples within batches: {record.num_repeated}.",
        estimate=float(record.num_repeated),
    )


def highest_rate(claimed: float) -> float:
    """Return the claimed rate with an allowance for rounding."""
    return min(1.0, claimed * (1 + RESOLUTION))


def batch_overlap(record: ParticipationRecord) -> Check | None:
    """Test how many examples consecutive batches share: almost none within a shuffled epoch.

    Given its size, a Poisson-sampled batch is a uniformly random set. Its overlap with another batch is
    hypergeometric, and less spread out than the binomial of the same mean (Hoeffding 1963) used here.
    """
    if not record.overlaps:
        return None
    sizes, observed = np.asarray(record.sizes), sum(record.overlaps)
    drawn, shares = sizes[1:], sizes[:-1] / record.num_examples
    expected = float(drawn @ shares)
    ratio = observed / expected if expected > 0 else 1.0
    return Check(
        name="batch-overlap",
        p_value=coins_p_value(observed, shares, drawn),
        sentence=f"Consecutive batches share {ratio:.2g} times as many examples as random batches.",
        estimate=ratio,
    )


def repeated_batches(record: ParticipationRecord) -> Check | None:
    """Test the pair of batches that overlap most: hypergeometric.

    Epochs in a fixed order repeat their batches.
    """
    # as many examples as are needed to recognize a batch
    recognized = 40  # examples of a batch on average, which no other batch shares by accident
    watched = min(record.watched.size, math.ceil(recognized / max(record.drawn_rate, 1e-9)))
    present = np.unpackbits(record.presences.rows()["bits"], axis=1, count=watched).astype(np.float32)
    if len(present) < 2:
        return None
    steps = record.presences.steps
    sizes = present.sum(axis=1)
    best, pair, common = 1.0, (0, 1), 0.0
    for first, second, shared in _candidates(present, sizes):
        p_value = hypergeometric_tail(watched, int(sizes[first]), int(sizes[second]), int(shared))
        if p_value < best:
            best, pair, common = p_value, (first, second), shared
    most = float(min(sizes[list(pair)]))
    share = common / most if most > 0 else 0.0
    same_batch = (
        "is the sampler reseeded in every epoch, the data never shuffled, or a batch used several times?"
    )
    return Check(
        name="repeated-batches",
        p_value=bonferroni(best, len(present) * (len(present) - 1) / 2),
        sentence=f"The batches of steps {steps[pair[0]]} and {steps[pair[1]]} share {100 * share:.3g} % "
        "of the smaller one.",
        estimate=share,
        cause=same_batch if share == 1 else "",
    )


def _candidates(present: npt.NDArray[np.float32], sizes: FloatArray) -> Iterator[tuple[int, int, float]]:
    """Yield the pairs with the largest overlap for their sizes; omitting others only raises p-values."""
    for block, shared, is_earlier in pairwise_products(present):
        expected = np.outer(sizes[block], sizes[: block[-1] + 1]) / present.shape[1]
        excess = shared - expected
        expected += 1
        excess /= np.sqrt(expected, out=expected)
        excess[~is_earlier] = -np.inf
        rows = _largest(excess.max(axis=1))  # the largest entries are in the rows with the largest maxima
        for index in _largest(excess[rows].ravel()):
            later, earlier = rows[index // shared.shape[1]], index % shared.shape[1]
            if is_earlier[later, earlier]:
                yield int(earlier), int(block[later]), float(shared[later, earlier])


def _largest(values: FloatArray) -> IntArray:
    """Return the places of the largest values, as many as there are candidates, in any order."""
    return np.argpartition(values, -min(_CANDIDATES, values.size))[-_CANDIDATES:]
