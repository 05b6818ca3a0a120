"""Tests of noise that is too regular: sums that are always near zero, or norms that are always the same.

Noise that is centered, normalized or stratified looks normal in every single coordinate, but what it lacks
is revealed: the mean of a centered release is the mean of the sum, without any noise.

Both tests look at parts of the noise in turn: at steps, at the leaves of each step, and at coordinates over
all steps. Their p-values are corrected for the number of these views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpaudit._types import FloatArray, IntArray, ScoreArray
from dpaudit.diagnostics._noise_record import NoiseRecord
from dpaudit.diagnostics._p_values import Check, bonferroni, chi_square_cdf
from dpaudit.diagnostics._registry import declare

_MAX_LEAVES = 64  # that are tested alone
_LEAST = 1e-9  # smaller probabilities of a pair may be rounding errors
_ALL_STEPS = "all steps"
_OVER_TIME = "is the noise of earlier steps subtracted again, or is it stratified over the steps?"


@dataclass(frozen=True, eq=False)
class _View:
    """Sums and energies of parts of the noise, each of ``width`` numbers."""

    name: str
    width: int
    sums: FloatArray
    energies: FloatArray


declare(
    "balanced-noise",
    "noise",
    tests="whether sums of the noise are always near zero",
    matters="The mean of a centered release is the mean of the sum, without any noise.",
    question="is the noise centered, as by subtracting its mean, or stratified, as in a Latin "
    "hypercube or a quasi-random sequence?",
    rank=16,
    follows=["located"],
    may_follow=["shared", "low-rank-noise", "noise-variance"],
)


def balanced_noise(record: NoiseRecord) -> Check | None:
    """Test squared sums of noise, over a step, a leaf or all steps: chi-square, too small.

    A sum of independent normal numbers is normal, and its variance is at least their number if none has less
    noise than claimed. More noise in some of them, whatever their scales, makes the p-value larger. Where
    there is less noise, which is another finding, sums are compared with the noise that there is.
    """
    return _balanced(record, _views(record))


def balanced_steps(record: NoiseRecord) -> Check | None:
    """Test the same within steps: weight decay makes sums over all steps smaller."""
    return _balanced(record, [view for view in _views(record) if view.name != _ALL_STEPS])


def _balanced(record: NoiseRecord, views: Iterable[_View]) -> Check | None:
    found = []
    for view in views:
        level = min(1.0, float(view.energies.sum()) / (view.width * view.energies.size))
        if level == 0:
            continue
        largest = np.abs(view.sums) + record.resolution * view.width
        total = float((largest * largest).sum()) / view.width
        p_value = chi_square_cdf(total / level, view.sums.size)
        share = float((view.sums * view.sums).sum()) / view.width / view.sums.size
        found.append((p_value, share, view.name))
    if not found:
        return None
    p_value, share, name = min(found)
    return Check(
        name="balanced-noise",
        p_value=bonferroni(p_value, len(found)),
        sentence=f"Noise adds up to too little: squared sums over {name} are {share:.3g} times those of "
        "independent noise.",
        estimate=share,
        cause=_OVER_TIME if name == _ALL_STEPS else "",
    )


declare(
    "constant-norm",
    "noise",
    tests="whether norms of the noise are always the same",
    matters="Noise on a sphere reveals that some sums are impossible.",
    question="is the noise normalized to a fixed norm, or stratified?",
    rank=21,
    may_follow=["shared", "low-rank-noise", "balanced-noise", "tails"],
)


def constant_norm(record: NoiseRecord) -> Check | None:
    """Test the norms of noise, of a step, a leaf or a coordinate: too alike in pairs of neighbors.

    Standard normal numbers are their norm times an independent direction. Scaling them multiplies their
    energy by a number that depends on the direction alone. So the logarithm of the ratio of two energies is
    that of an F variable, which is symmetric and unimodal, plus an independent number. It is close to zero
    most often if that number is zero, as for equal scales: the probability that the F variable is at least as
    close is a p-value, whatever the scales, and Fisher's method joins those of all pairs.
    """
    found = []
    for view in _views(record):
        p_values = _alike(view.energies, view.width, record.resolution)
        if p_values.size:
            fisher = float(special.gammaincc(p_values.size, -np.log(p_values).sum()))
            found.append((fisher, _relative_spread(view), view.name))
    if not found:
        return None
    p_value, spread, name = min(found)
    return Check(
        name="constant-norm",
        p_value=bonferroni(p_value, len(found)),
        sentence=f"Noise has almost the same norm again and again: energies over {name} vary "
        f"{spread:.3g} times as much as those of normal noise.",
        estimate=spread,
    )


def _alike(energies: FloatArray, width: int, resolution: float) -> FloatArray:
    """Return for each pair of neighbors how probable a ratio of their energies is that is as close to 1."""
    norms = np.sqrt(energies[: energies.size // 2 * 2]).reshape(-1, 2)
    error = resolution * width**0.5
    small, large = norms.min(axis=1) - error, norms.max(axis=1) + error
    is_sure = small > 0
    share = small[is_sure] ** 2 / (small[is_sure] ** 2 + large[is_sure] ** 2)
    close: FloatArray = np.ones(len(norms))
    close[is_sure] = np.maximum(1 - 2 * special.betainc(width / 2, width / 2, share), _LEAST)
    return close


def _relative_spread(view: _View) -> float:
    """Return the variance of energies, over that of normal noise with the same mean."""
    pairs = view.energies[: view.energies.size // 2 * 2].reshape(-1, 2)
    usual = 2 * float((pairs**2).sum()) / (view.width + 2)
    return float(((pairs[:, 0] - pairs[:, 1]) ** 2).sum()) / max(usual, 1e-300)


def _views(record: NoiseRecord) -> list[_View]:
    return record.once("views", lambda: list(_all_views(record)))


def _all_views(record: NoiseRecord) -> Iterator[_View]:
    rows, sizes = record.rows, np.asarray(record.layout.sketch_sizes)
    size = record.energies.size
    sums = np.asarray(record.step_sums)
    if size > 1:
        yield _View("a step", size, sums, np.asarray(record.step_energies))
    squares = np.multiply(rows, rows, dtype=np.float64)
    used = np.flatnonzero(sizes)
    if used.size > 1:
        starts = (np.cumsum(sizes) - sizes)[used]
        leaves = _of_leaves(rows, starts), _of_leaves(squares, starts)
        large = [number for number in range(used.size) if sizes[used[number]] > 1]
        for number in sorted(large, key=lambda one: -sizes[used[one]])[:_MAX_LEAVES]:
            name, width = record.layout.names[used[number]], int(sizes[used[number]])
            yield _View(f"leaf {name}", width, leaves[0][:, number], leaves[1][:, number])
    if len(rows) > 1:
        totals = (part.sum(axis=0, dtype=np.float64) for part in (rows, squares))
        yield _View(_ALL_STEPS, len(rows), *totals)


def _of_leaves(rows: ScoreArray, starts: IntArray) -> FloatArray:
    """Return the sum of each leaf in each step."""
    return np.add.reduceat(rows, starts, axis=1).astype(np.float64)


REGULARITY_TESTS = (balanced_noise, constant_norm)
