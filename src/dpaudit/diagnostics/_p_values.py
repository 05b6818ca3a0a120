"""Results of the tests of noise and batches, and the null distributions of their p-values.

Real noise is rounded, to float32 or to a grid. Each p-value of noise is therefore the largest over all noise
that differs from normal noise by at most ``resolution`` in every coordinate. The default is ``RESOLUTION``, a
thousandth of the claimed standard deviation. This costs power only against faults that small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy
from scipy import special

from dpaudit import _validate
from dpaudit._types import ArrayLike, BoolArray, FloatArray, IntArray

RESOLUTION = 1e-3  # in claimed standard deviations
SMALLEST_P_VALUE = 1e-12  # smaller p-values are not more informative
MAX_P_VALUE_OF_FINDING = 0.05  # p-values above it are not findings at any level in use
Z_CERTAIN = 6.0  # standard errors
Z_CLEAR = 4.5
_SEED = 0x5EED_0F_D1A6  # unlikely to be the seed of a training run
_BLOCK = 512  # rows whose products with all others are in memory at the same time


@dataclass(frozen=True, kw_only=True)
class Check:
    """A test that was run: in a correct training run, its p-value is at most p with probability at most p.

    ``sentence`` describes the finding if there is one; ``estimate`` is the number in it that a developer can
    act on, such as the ratio of the noise to the claim. ``cause`` is the likely cause if the test found one
    itself.
    """

    name: str
    p_value: float
    sentence: str
    estimate: float
    cause: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A test that a correct training run is unlikely to fail, accounting for all tests of the diagnosis.

    ``adjusted`` is the p-value corrected for the number of tests: the smallest level at which the diagnosis
    would still have this finding. A finding that needs no statistics has p-value 0: :meth:`certain`.
    """

    name: str
    p_value: float
    adjusted: float
    sentence: str
    estimate: float
    cause: str = ""

    @classmethod
    def certain(cls, name: str, sentence: str, estimate: float = math.nan) -> Finding:
        """Return a finding that no correct training run has, such as a sum that exceeds its largest norm."""
        return cls(name=name, p_value=0.0, adjusted=0.0, sentence=sentence, estimate=estimate)

    def __str__(self) -> str:
        if self.p_value == 0.0 == self.adjusted and math.isnan(self.estimate):
            return f"{self.name}: {self.sentence}"
        is_tiny = self.p_value < SMALLEST_P_VALUE
        p_value = f"p < {SMALLEST_P_VALUE:g}" if is_tiny else f"p = {self.p_value:.2g}"
        return f"{self.name} ({p_value}): {self.sentence}"


@dataclass(frozen=True, kw_only=True)
class Amount:
    """The ratio of noise to claim; the interval holds at ``confidence`` if all noise is independent."""

    ratio: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return (
            f"{_validate.percent(self.ratio, 3)} of the claimed level ({_validate.percent(self.confidence)} "
            f"interval {_validate.percent(self.low, 3)} to {_validate.percent(self.high, 3)})"
        )


@dataclass(frozen=True, kw_only=True)
class CheckResults:
    """What one part of an audit found: tests that share an error rate, and facts that need none."""

    checks: tuple[Check, ...] = ()
    certain: tuple[Finding, ...] = ()
    """Findings that need no statistics; see :meth:`Finding.certain`."""
    to_check: tuple[Finding, ...] = ()
    """Facts that a correct training run may have: shown with what decides them, and never a violation."""
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    """Sentences that name what could not be checked, and why."""
    assumptions: tuple[str, ...] = ()
    """What the tests rest on besides the claim, and cannot check."""
    noise: Amount | None = None
    """The amount of noise, where it was measured."""


def bonferroni(p_value: float, count: float) -> float:
    """Return the smallest of ``count`` p-values corrected for their number, under any dependence."""
    return min(1.0, float(p_value) * count)


# Amounts of noise: exact for normal noise, at any size.


def claim_p_value(energy: ArrayLike, count: ArrayLike, resolution: float = RESOLUTION) -> FloatArray:
    """Return the probability that ``count`` squared standard normal numbers sum to ``energy`` or less."""
    number = np.asarray(count, dtype=np.float64)
    highest = (np.sqrt(energy) + resolution * np.sqrt(number)) ** 2
    return np.asarray(scipy.stats.chi2.cdf(highest, number), dtype=np.float64)


def chi_square_cdf(value: float, count: int) -> float:
    """Return the probability that ``count`` squared standard normal numbers sum to ``value`` or less.

    Many times faster than the function of ``scipy.stats`` for a single number.
    """
    return float(special.gammainc(count / 2, value / 2))


def share_p_value(
    energy: FloatArray, count: FloatArray, total: float, total_count: float, resolution: float = RESOLUTION
) -> FloatArray:
    """Return the probability that ``count`` of ``total_count`` squares sum to such a small part of the total.

    For normal numbers of any equal variance, this part has a beta distribution.
    """
    rest = np.maximum(total_count - count, 0.0)
    highest = (np.sqrt(energy) + resolution * np.sqrt(count)) ** 2
    others = np.sqrt(np.maximum(total - energy, 0.0)) - resolution * np.sqrt(rest)
    lowest = np.maximum(others, 0.0) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(lowest > 0, highest / (highest + lowest), 1.0)
        p_values = special.betainc(count / 2, rest / 2, share)
    return np.where((rest > 0) & (lowest > 0), p_values, 1.0)


def uniform_p_value(values: FloatArray, tolerance: float = 0.0) -> float:
    """Return the p-value of the exact Kolmogorov-Smirnov test of uniform numbers.

    The distribution function may be off by up to ``tolerance``.
    """
    count = values.size
    if count == 0:
        return 1.0
    ranks = np.arange(count + 1) / count
    ordered = np.sort(values)
    farthest = float(max((ranks[1:] - ordered).max(), (ordered - ranks[:-1]).max()))
    return float(scipy.stats.kstwo.sf(max(farthest - tolerance, 0.0), count))


# Signs: exact for independent noise that is symmetric around zero, because its signs are fair coins whatever
# the scale in each coordinate and step. Noise that exceeds the claim in some coordinates, which leaks
# nothing, therefore causes no finding.


def sure_signs(noise: npt.NDArray[np.float32], resolution: float) -> npt.NDArray[np.float32]:
    """Return 1 or -1 for each number; 0 where rounding by ``resolution`` may have flipped the sign.

    Sums of up to 2^24 signs are exact in single precision.
    """
    return np.subtract(noise > resolution, noise < -resolution, dtype=np.float32)


def sign_p_value(agreeing: ArrayLike, differing: ArrayLike, count: ArrayLike) -> FloatArray:
    """Return the binomial p-value of this many of ``count`` pairs of signs that agree, or that differ.

    Pairs that do neither may count as either: the p-value is the largest over all possibilities.
    """
    most, number = np.maximum(agreeing, differing), np.asarray(count, dtype=np.float64)
    return np.asarray(np.minimum(1.0, 2 * scipy.stats.binom.sf(most - 1, number, 0.5)), dtype=np.float64)


def sign_correlation(agreeing: ArrayLike, differing: ArrayLike) -> FloatArray:
    """Return the correlation of normal variables whose signs agree as often (Sheppard 1899), 0 if none."""
    agree, differ = (np.asarray(value, dtype=np.float64) for value in (agreeing, differing))
    return np.sin(math.pi / 2 * (agree - differ) / np.maximum(agree + differ, 1.0))


def sign_sum_p_value(energy: float, count: int) -> float:
    """Return an upper bound on the probability that sums of signs, of any length, are this large.

    ``energy`` is the sum of ``count`` squared sums, each divided by its number of signs. The means of
    exp(slope x square) are at most those of a squared normal variable, so the Chernoff bound of a chi-square
    variable holds.
    """
    share = energy / count
    return math.exp(-count / 2 * (share - 1 - math.log(share))) if share > 1 else 1.0


# Counts: hypergeometric, and bounds for sums of them.


def hypergeometric(total: int, marked: int, drawn: int) -> tuple[IntArray, FloatArray]:
    """Return the possible numbers of marked elements among those drawn, and their probabilities."""
    lowest, highest = max(0, drawn + marked - total), min(drawn, marked)
    mean = drawn * marked / total
    spread = math.sqrt(mean * (total - marked) / total) + 1
    width = 40  # standard deviations beyond which probabilities underflow
    low = max(lowest, math.floor(mean - width * spread))
    high = min(highest, math.ceil(mean + width * spread))
    values = np.arange(low, high + 1)
    logs = _log_choose(marked, values) + _log_choose(total - marked, drawn - values)
    probabilities = np.exp(logs - logs.max())
    probabilities /= probabilities.sum()
    likely = probabilities > 0  # after the division, in which the smallest underflow
    return values[likely], probabilities[likely]


def hypergeometric_tail(total: int, marked: int, drawn: int, observed: int) -> float:
    """Return the probability that at least ``observed`` of those drawn are marked."""
    values, probabilities = hypergeometric(total, marked, drawn)
    return float(probabilities[values >= observed].sum())


class CountSum:
    """A sum of independent counts: how many (``numbers``) have each distribution (values, probabilities)."""

    def __init__(
        self, distributions: Iterable[tuple[npt.NDArray[Any], FloatArray]], numbers: IntArray
    ) -> None:
        pairs, self._numbers = list(distributions), numbers.astype(np.float64)
        sizes = [len(values) for values, _ in pairs]
        self._starts, self._sizes = np.cumsum([0, *sizes])[:-1], sizes
        self._values = np.concatenate([values for values, _ in pairs]).astype(np.float64)
        self._logs = np.log(np.concatenate([probabilities for _, probabilities in pairs]))
        means = np.array([values @ weights for values, weights in pairs])
        seconds = np.array([values**2 @ weights for values, weights in pairs])
        self.mean = float(self._numbers @ means)
        self.variance = float(self._numbers @ (seconds - means**2))

    def p_value(self, observed: float) -> float:
        """Return an upper bound on the probability of a sum as extreme as ``observed``."""
        return chernoff_p_value(self._log_mgf, observed, self.variance)

    def _log_mgf(self, slopes: FloatArray) -> FloatArray:
        result = np.empty((slopes.size, len(self._sizes)))
        for slope, row in zip(slopes, result, strict=True):  # one at a time fits into a cache
            powers = slope * self._values
            powers += self._logs
            tops = np.maximum.reduceat(powers, self._starts)
            powers -= np.repeat(tops, self._sizes)
            row[:] = tops + np.log(np.add.reduceat(np.exp(powers, out=powers), self._starts))
        return np.asarray(result @ self._numbers)


def coins_p_value(observed: float, probabilities: FloatArray, numbers: ArrayLike = 1) -> float:
    """Return an upper bound on the probability of such a number of heads.

    As many coins as ``numbers`` say have each of these probabilities of heads.
    """
    counts = np.broadcast_to(np.asarray(numbers), probabilities.shape)
    variance = float(counts @ (probabilities * (1 - probabilities)))

    def log_mgf(slopes: FloatArray) -> FloatArray:
        return np.asarray(np.log1p(np.expm1(slopes)[:, None] * probabilities) @ counts)

    return chernoff_p_value(log_mgf, observed, variance)


def chernoff_p_value(log_mgf: Callable[[FloatArray], FloatArray], observed: float, variance: float) -> float:
    """Return an upper bound on the probability of a sum as extreme as ``observed`` (Chernoff 1952).

    ``log_mgf`` is the logarithm of the mean of exp(slope x sum). Sums of counts take few values, so an exact
    p-value would have to break ties at random; this bound does not.
    """
    if variance <= 0:
        return 1.0
    slopes = np.geomspace(min(0.05 / math.sqrt(variance), 1.0), 30.0, 12)
    lowest = min(_lowest(lambda slope: log_mgf(slope) - slope * observed, sign * slopes) for sign in (1, -1))
    return min(1.0, 2 * math.exp(min(lowest, 0.0)))


def _lowest(function: Callable[[FloatArray], FloatArray], points: FloatArray) -> float:
    """Return about the smallest value of a convex function, and none that is too small."""
    values = function(points)
    best = int(np.argmin(values))
    near = np.linspace(points[max(best - 1, 0)], points[min(best + 1, points.size - 1)], 7)
    return float(min(values[best], function(near).min()))


def _log_choose(number: int, chosen: IntArray) -> FloatArray:
    gammaln = special.gammaln
    return np.asarray(gammaln(number + 1) - gammaln(chosen + 1) - gammaln(number - chosen + 1))


# Shared by the records and tests of noise and of batches.


def fixed_rng(purpose: int) -> np.random.Generator:
    """Return a generator with a fixed seed per purpose, so that a diagnosis is reproducible."""
    return np.random.default_rng([_SEED, purpose])


def pairwise_products(
    rows: npt.NDArray[np.float32],
) -> Iterator[tuple[IntArray, npt.NDArray[np.float32], BoolArray]]:
    """Yield indices of a block of rows, their dot products with all rows up to the last, and a mask of pairs.

    The mask is true where the column belongs to an earlier row, so that each pair occurs once.
    """
    for start in range(0, len(rows), _BLOCK):
        block = np.arange(start, min(start + _BLOCK, len(rows)))
        products = rows[block] @ rows[: block[-1] + 1].T
        yield block, products, np.arange(products.shape[1]) < block[:, None]


class EndRows:
    """Rows of the first and the last ``half`` steps, by name, in memory that is allocated once."""

    def __init__(self, half: int = 2048, dtype: npt.DTypeLike = np.float32) -> None:
        self._half, self._dtype, self.num_seen = half, dtype, 0
        self._blocks: dict[str, npt.NDArray[Any]] = {}

    def add(self, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add the rows of consecutive steps; names that some earlier step does not have are ignored."""
        count = len(next(iter(rows.values())))
        if self.num_seen == 0:
            self._allocate(rows)
        self._blocks = {name: block for name, block in self._blocks.items() if name in rows}
        slots = self._slots(np.arange(self.num_seen, self.num_seen + count))
        self.num_seen += count
        for name, block in self._blocks.items():
            if count <= self._half:
                block[slots] = rows[name]
            else:  # later steps overwrite earlier ones
                for slot, row in zip(slots, rows[name], strict=True):
                    block[slot] = row

    def _allocate(self, rows: Mapping[str, npt.NDArray[Any]]) -> None:
        """Make room, and write to it, because memory is not there before."""
        shapes = {name: (2 * self._half, *block.shape[1:]) for name, block in rows.items()}
        self._blocks = {name: np.ones(shape, dtype=self._dtype) for name, shape in shapes.items()}

    @property
    def steps(self) -> IntArray:
        """The step number of each row."""
        half, count = self._half, self.num_seen
        return np.concatenate([np.arange(min(half, count)), np.arange(max(half, count - half), count)])

    def rows(self) -> dict[str, npt.NDArray[Any]]:
        """Return the rows of these steps, in order."""
        slots = self._slots(self.steps)
        return {name: block[slots] for name, block in self._blocks.items()}

    def _slots(self, steps: IntArray) -> IntArray:
        return np.where(steps < self._half, steps, self._half + steps % self._half)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``load_state_dict``, in few arrays, which are fast to write."""
        used = {name: block[: self.num_seen].copy() for name, block in self._blocks.items()}
        return {"num_seen": self.num_seen, "rows": used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
        self._allocate(state["rows"])
        self.num_seen = state["num_seen"]
        for name, rows in state["rows"].items():
            self._blocks[name][: len(rows)] = rows
