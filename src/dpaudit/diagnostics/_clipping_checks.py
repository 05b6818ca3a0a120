"""What arrives of canaries in the release: more than clipping allows, or noise that depends on them.

A present canary scores as much as its clipped length, so the mean score of many of the same shape, length or
parameter is known up to the noise. Orthogonal canaries have independent scores. Only what exceeds the
clipping norm is a leak: a canary that is shorter may be scaled up to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
import scipy

from dpaudit._types import BoolArray, FloatArray, IntArray
from dpaudit.diagnostics._clipping_causes import SKIPPED_ROWS, CanaryBatch, clipping_cause
from dpaudit.diagnostics._data_tests import StepEnergies
from dpaudit.diagnostics._diagnosis import ALSO_ABSENT
from dpaudit.diagnostics._p_values import MAX_P_VALUE_OF_FINDING, Z_CERTAIN, Z_CLEAR, Check, CheckResults

_ROUNDING = 1e-3  # in clipping norms
_LIMIT = 1.0  # clipping norms: more than this must never arrive
_SHORTER = 1.0  # canaries below this length do not share a cell with the others
_ALL_SHARE, _ALIKE = 0.95, 3.0  # largest share of canaries that are not clipped, and ratio of two of them
_FEW_LARGE, _RARE_TAIL = 0.5, 1e-4  # share of the scores that matter, and where tails are compared
_MIN_STEPS = 3  # of a kind, so that their energies have a variance
_TAIL = 1 / 3  # of the steps: those with the fewest rows, and those with the most
_AT_ONCE = 64  # steps; canaries of all lengths occur in the first ones


@dataclass(frozen=True, eq=False, kw_only=True)
class CanaryScoreTable:
    """Labels of canaries, and the moments of their scores where they were present and absent."""

    shapes: IntArray
    lengths: FloatArray
    parameters: IntArray
    counts: FloatArray
    totals: FloatArray
    squares: FloatArray
    absent_counts: FloatArray
    absent_totals: FloatArray
    absent_squares: FloatArray
    absent_fourths: FloatArray

    @classmethod
    def of(
        cls,
        scores: FloatArray,
        present: BoolArray,
        *,
        shapes: IntArray,
        lengths: FloatArray,
        parameters: IntArray,
    ) -> CanaryScoreTable:
        """Sum the scores of canaries over steps in which they had the same directions."""
        where, absent = present * scores, ~present * scores
        return cls(
            shapes=shapes,
            lengths=lengths,
            parameters=parameters,
            counts=present.sum(axis=0).astype(np.float64),
            totals=where.sum(axis=0),
            squares=(where * where).sum(axis=0),
            absent_counts=(~present).sum(axis=0).astype(np.float64),
            absent_totals=absent.sum(axis=0),
            absent_squares=(absent * absent).sum(axis=0),
            absent_fourths=(absent**4).sum(axis=0),
        )

    @classmethod
    def joined(cls, tables: Sequence[CanaryScoreTable]) -> CanaryScoreTable:
        """Return all canaries of several sets."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})

    @property
    def expected(self) -> FloatArray:
        """The clipped length of each canary."""
        return np.minimum(self.lengths, 1.0)

    def mean(self, name: str, chosen: BoolArray) -> float:
        """Return the mean of a moment, such as ``absent_squares``, over the chosen canaries and all steps."""
        counts = self.absent_counts if name.startswith("absent") else self.counts
        return float(getattr(self, name)[chosen].sum()) / max(float(counts[chosen].sum()), 1.0)

    def absent_std(self, chosen: BoolArray) -> float:
        """Return the standard deviation of the scores of absent canaries.

        If it is that of a few steps with much more noise than the others, it is uncertain, and increased as
        Student's quantile is above the normal one.
        """
        variance = self.mean("absent_squares", chosen) - self.mean("absent_totals", chosen) ** 2
        std, share = float(max(variance, 0.0) ** 0.5), self._even_share(chosen)
        if share > _FEW_LARGE:
            return std
        freedom = share * max(float(self.absent_counts[chosen].sum()), 1.0)
        return std * float(scipy.stats.t.isf(_RARE_TAIL, freedom) / scipy.stats.norm.isf(_RARE_TAIL))

    def present_std(self, chosen: BoolArray) -> float:
        """Return how far scores of present canaries are from the limit, if few of all scores matter; or 0."""
        if self._even_share(np.ones_like(chosen)) > _FEW_LARGE:
            return 0.0
        mean, square = self.mean("totals", chosen), self.mean("squares", chosen)
        return float(max(square - 2 * _LIMIT * mean + _LIMIT**2, 0.0) ** 0.5)  # rounding may be below 0

    def _even_share(self, chosen: BoolArray) -> float:
        """Return which share of the scores matters: about 1 for normal scores of one scale."""
        square, fourth = self.mean("absent_squares", chosen), self.mean("absent_fourths", chosen)
        return 3 * square**2 / fourth if fourth > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class ArrivalCell:
    """The mean score of present canaries that have something in common."""

    words: str
    """Which canaries these are."""
    count: float
    mean: float
    expected: float
    std: float
    absent_mean: float = 0.0
    absent_count: float = 0.0

    def above(self, length: float) -> float:
        """Return by how many standard errors more arrived than this length, in clipping norms."""
        return float((self.mean - length) * self.count**0.5 / self.std)

    @property
    def has_shift(self) -> bool:
        """Whether absent canaries score too much as well, so that no clipping explains what arrived."""
        is_sure = self.absent_mean * self.absent_count**0.5 > Z_CERTAIN * self.std
        return is_sure and self.absent_mean > (self.mean - _LIMIT) / 2

    @property
    def is_short(self) -> bool:
        """Whether these canaries are shorter than the clipping norm."""
        return round(self.expected, 6) < _SHORTER

    @property
    def arrived(self) -> str:
        """What arrived, as the beginning of a sentence."""
        return f"{self.words} reach the release at {self.mean:.3g} clipping norms on average"

    @property
    def sentence(self) -> str:
        """The finding, if what arrived is too much."""
        return f"{self.arrived}, more than the {_LIMIT:g} that clipping allows."


_ADJECTIVES = {
    "single": "single-coordinate ",
    "dense": "spread ",
    "block": "one-parameter ",
    "row": "one-row ",
}


def arrival_cells(
    table: CanaryScoreTable, std: float, shapes: Sequence[str], names: Sequence[str]
) -> list[ArrivalCell]:
    """Return the cells: all, shape x length, length, shape, and shape x parameter, short canaries apart.

    ``std`` is the claimed standard deviation of a score; if the noise is larger, so is that of a cell.
    ``shapes`` and ``names`` are those of the shapes of canaries and of parameters.
    """
    is_short = table.lengths < _SHORTER
    long, short = (f"{word} than the clipping norm" for word in ("longer", "shorter"))
    kinds = {shape: f"{_ADJECTIVES[shapes[shape]]}canaries" for shape in np.unique(table.shapes)}
    std = max(std, table.absent_std(np.ones(table.lengths.size, dtype=np.bool_)))
    groups = [(f"canaries {long}", ~is_short, std)]
    for length in np.unique(table.lengths):
        of_length, of_words = table.lengths == length, f"of {length:,g} clipping norms"
        groups.append((f"canaries {of_words}", of_length, std))
        groups += [
            (f"{kind} {of_words}", of_length & (table.shapes == shape), std) for shape, kind in kinds.items()
        ]
    groups += [(f"{kind} {long}", (table.shapes == shape) & ~is_short, std) for shape, kind in kinds.items()]
    for parameter in np.unique(table.parameters[table.parameters >= 0]):
        inside = table.parameters == parameter
        std_inside = max(std, table.absent_std(inside))
        groups += [
            (f"{kind} {words} in {names[parameter]}", inside & (table.shapes == shape) & chosen, std_inside)
            for shape, kind in kinds.items()
            for words, chosen in ((long, ~is_short), (short, is_short))
        ]
    return [_cell(table, *group) for group in groups if table.counts[group[1]].any()]


def _cell(table: CanaryScoreTable, words: str, chosen: BoolArray, std: float) -> ArrivalCell:
    count = float(table.counts[chosen].sum())
    return ArrivalCell(
        words=words,
        count=count,
        mean=table.mean("totals", chosen),
        expected=float(table.counts[chosen] / count @ table.expected[chosen]),
        # noise may differ between parameters and between steps
        std=max(std, table.absent_std(chosen), table.present_std(chosen)),
        absent_mean=table.mean("absent_totals", chosen),
        absent_count=float(table.absent_counts[chosen].sum()),
    )


@dataclass(frozen=True, eq=False)
class StepArrivals:
    """What arrived in each step of the canaries that are longer than the clipping norm, and its rows.

    The mean of a batch is not its sum: its canaries are too long in small batches, and too short in large
    ones. ``rows`` are the numbers of rows of all steps, canaries among them.
    """

    rows: IntArray
    counts: FloatArray
    totals: FloatArray
    absent_counts: FloatArray
    absent_squares: FloatArray
    means_alike: FloatArray  # of the canaries of the most frequent length, NaN if none is present

    @classmethod
    def of(cls, scores: FloatArray, present: BoolArray, lengths: FloatArray, rows: IntArray) -> StepArrivals:
        """Sum the scores of each step (all arrays but ``rows`` are steps x canaries)."""
        values, numbers = np.unique(lengths[:_AT_ONCE][lengths[:_AT_ONCE] >= _SHORTER], return_counts=True)
        usual = values[numbers.argmax()] if values.size else np.nan
        # a few steps at a time, which fit into the cache
        blocks = [slice(first, first + _AT_ONCE) for first in range(0, len(scores), _AT_ONCE)]
        sums = [cls._sums(scores[block], present[block], lengths[block], usual) for block in blocks]
        counts, totals, absent_counts, absent_squares, count, total = np.concatenate(sums, axis=1)
        means = np.where(count > 0, total / np.maximum(count, 1), np.nan)
        return cls(rows, counts, totals, absent_counts, absent_squares, means)

    @staticmethod
    def _sums(scores: FloatArray, present: BoolArray, lengths: FloatArray, usual: float) -> FloatArray:
        where, absent, alike = present & (lengths >= _SHORTER), ~present, present & (lengths == usual)
        return np.stack(
            [
                where.sum(axis=1),
                np.where(where, scores, 0.0).sum(axis=1),
                absent.sum(axis=1),
                np.where(absent, scores * scores, 0.0).sum(axis=1),
                alike.sum(axis=1),
                np.where(alike, scores, 0.0).sum(axis=1),
            ]
        )

    def cells(self, std: float) -> list[ArrivalCell]:
        """Return a cell for the steps with the fewest rows, and one for those with the most."""
        used = self.counts > 0
        if np.count_nonzero(used) < _MIN_STEPS / _TAIL:
            return []
        low, high = (int(quantile) for quantile in np.quantile(self.rows[used], (_TAIL, 1 - _TAIL)))
        cells = []
        for chosen, text in (
            (used & (self.rows <= low), f"at most {low:,} rows"),
            (used & (self.rows > high), f"more than {high:,} rows"),
        ):
            count = float(self.counts[chosen].sum())
            if count == 0 or low == high:
                continue
            energy = float(self.absent_squares[chosen].sum() / max(self.absent_counts[chosen].sum(), 1.0))
            cells.append(
                ArrivalCell(
                    words=f"canaries longer than the clipping norm in steps with {text}",
                    count=count,
                    mean=float(self.totals[chosen].sum()) / count,
                    expected=1.0,
                    std=max(std, energy**0.5),  # noise may differ between steps
                )
            )
        return cells

    def cause(self) -> str:
        """Return the cause if clearly less arrives the more rows there are; empty if not."""
        used = np.isfinite(self.means_alike)
        if np.count_nonzero(used) < _MIN_STEPS / _TAIL or np.ptp(self.rows[used]) == 0:
            return ""
        fit = scipy.stats.linregress(1 / np.maximum(self.rows[used], 1), self.means_alike[used])
        if not fit.slope > Z_CERTAIN * fit.stderr or fit.slope < abs(fit.intercept):
            return ""
        return (
            "the more rows a batch has, the less arrives of each: is the sum divided by the number of "
            "examples in the batch instead of the expected number?"
        )


def arrival_results(
    table: CanaryScoreTable,
    energies: StepEnergies,
    steps: StepArrivals | None,
    *,
    std: float,
    eps: float,
    shapes: Sequence[str],
    names: Sequence[str],
    is_vector: BoolArray,
    batches: Callable[[], list[CanaryBatch]],
) -> CheckResults:
    """Test whether more of a canary arrives than clipping allows, and whether the noise depends on canaries.

    ``std`` is the claimed standard deviation of a score, ``eps`` the relative precision of gradients.
    ``steps`` is what arrived in each step, if the numbers of rows are known. ``batches`` returns the
    canaries, to find the clipping that explains what arrived.
    """
    cells, of_noise = arrival_cells(table, std, shapes, names), tuple(energies.checks())
    if not cells:
        return CheckResults(checks=of_noise)
    error = max(std, table.absent_std(np.ones(table.lengths.size, dtype=np.bool_)))
    cells += [] if steps is None else steps.cells(error)
    by_rows = "" if steps is None else steps.cause()
    roundings = 4.0  # rounding errors of a clipped canary, in units of the precision of gradients
    limit = _LIMIT + max(_ROUNDING, roundings * eps)
    worst = max(cells, key=lambda cell: cell.above(limit))
    p_value = min(1.0, len(cells) * float(scipy.stats.norm.sf(worst.above(limit))))
    sentence, cause = worst.sentence, ""
    if p_value <= MAX_P_VALUE_OF_FINDING:
        cause = _shift_cause(worst) or by_rows or (_cause_of_skipping(table) if _is_rare(table) else "")
        cause = cause or clipping_cause(table, batches(), std=error, names=names, is_vector=is_vector)
        cause = cause or _cause_of_skipping(table) or sentence.rstrip(".")
    clipping = Check(name="clipping", p_value=p_value, sentence=sentence, estimate=worst.mean, cause=cause)
    notes = (
        *list(_missing(cells))[:1],
        *([f"{by_rows[0].upper()}{by_rows[1:]}"] if by_rows and not cause else []),
        *list(_lengthened(cells))[:1],
    )
    return CheckResults(checks=(clipping, *of_noise), notes=notes)


def _shift_cause(cell: ArrivalCell) -> str:
    """Return the cause if absent canaries score as much, so that it is not the clipping; empty if not."""
    if not cell.has_shift:
        return ""
    return (
        f"{ALSO_ABSENT} {cell.absent_mean:.3g} clipping norms on average, too: is the mean "
        "of the noise not zero, as of uniform numbers, or is something else added to the release?"
    )


def _cause_of_skipping(table: CanaryScoreTable) -> str:
    """Return the cause if the same share of canaries of all lengths arrives unclipped; empty if not.

    If the same rows are skipped in every step, no kind of clipping explains what arrived of each canary.
    """
    long = 10.0  # clipping norms, from which on it is clear whether a canary is clipped
    shares = [
        (table.mean("totals", table.lengths == length) - 1) / (float(length) - 1)
        for length in np.unique(table.lengths[table.lengths >= long])
    ]
    if not shares or not 0 < max(shares) <= _ALL_SHARE or min(shares) < max(shares) / _ALIKE:
        return ""
    return SKIPPED_ROWS.format(float(np.mean(shares)))


def _is_rare(table: CanaryScoreTable) -> bool:
    """Return whether canaries arrive unclipped in few steps each, too few to fit a share to every cell."""
    length = table.lengths.max()
    totals, squares = table.totals / length, table.squares / length**2
    chosen = (table.lengths == length) & (totals > 0.5)
    total = float(totals[chosen].sum())
    # a share of a gradient in every step has much smaller squares than a whole one in a few
    is_whole = float(squares[chosen].sum()) > total / 2
    rare = 0.6  # of the steps in which a canary is present: a smaller share arrives unclipped
    return bool(chosen.any()) and is_whole and total < rare * float(table.counts[chosen].sum())


def _missing(cells: Sequence[ArrivalCell]) -> Iterator[str]:
    """Yield notes about canaries that do not arrive, which costs power but no privacy."""
    missing = 0.5  # of the expected length, below which canaries do not arrive
    for cell in cells:
        error = cell.std / cell.count**0.5
        if cell.mean + Z_CERTAIN * error < missing * cell.expected:
            yield f"Not all canaries arrive: {cell.arrived}, less than the {cell.expected:g} expected."


def _lengthened(cells: Sequence[ArrivalCell]) -> Iterator[str]:
    """Yield notes about short canaries that are scaled up to the clipping norm, which leaks nothing.

    Automatic clipping does that on purpose: it divides each gradient by its norm, whatever it is.
    """
    for cell in cells:
        is_longer = cell.above(cell.expected * (1 + _ROUNDING)) > Z_CLEAR
        if cell.is_short and is_longer and cell.above(_LIMIT) < Z_CERTAIN:
            yield (
                f"Short gradients are scaled up: {cell.arrived}, instead of {cell.expected:g}. As long as no "
                "more than the clipping norm arrives, as with automatic clipping, this is not a leak."
            )
