"""Which kind of clipping explains what arrived of canaries: each is applied to them, the best fit is named.

The kinds are a table of candidates: a sentence, the factor by which a gradient is multiplied, and a grid of
the number that both depend on. Rules on single cells of a table mislead, because cells differ in power. A
prediction for all of them does not depend on which one is significant. Correct clipping is not among the
candidates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpaudit._types import BoolArray, FloatArray, IntArray

if TYPE_CHECKING:
    from dpaudit.diagnostics._clipping_checks import CanaryScoreTable

_MAX_PARAMETERS = 300  # each of which may be left out
_MAX_NAMED = 4  # parameters that a sentence lists
_TINY = 1e-30
_ALL = "is it computed over all parameters?"


@dataclass(frozen=True, eq=False, kw_only=True)
class CanaryBatch:
    """Canaries in clipping norms, without coordinates at which all of them are zero."""

    values: FloatArray
    """Canaries x entries, before clipping."""
    coordinates: IntArray
    """Of each entry; one row if all canaries have the same."""
    parameters: IntArray
    rows: IntArray
    """The same for the parameter and for the row of a parameter that contain the entry."""

    def norms(self, chosen: BoolArray | None = None) -> FloatArray:
        """Return the norm of each canary (canaries x 1), or that of the ``chosen`` entries."""
        values = self.values if chosen is None else np.where(chosen, self.values, 0.0)
        norms: FloatArray = np.linalg.norm(values, axis=1, keepdims=True)
        return norms

    def group_norms(self, groups: IntArray) -> FloatArray:
        """Return the norm of the group that contains each entry."""
        if self.values.shape[1] == 1:
            return np.abs(self.values)
        used, columns = np.unique(groups[0], return_inverse=True)
        member = np.zeros((groups.shape[1], used.size))
        member[np.arange(groups.shape[1]), columns] = 1.0
        squares: FloatArray = np.square(self.values) @ member
        return np.sqrt(squares)[:, columns]

    def arriving(self, factor: Factor, number: float) -> FloatArray:
        """Return the component of each canary, clipped in this way, along itself."""
        clipped = self.values * factor(self, number)
        along: FloatArray = (clipped * self.values).sum(axis=1) / np.maximum(self.norms()[:, 0], _TINY)
        return along


Factor = Callable[[CanaryBatch, float], FloatArray]
"""Returns what each entry is multiplied by, given the number of a candidate."""


class Candidate(NamedTuple):
    """A kind of wrong clipping; its sentence is formatted with the number of the grid that fits best."""

    sentence: str
    factor: Factor
    grid: FloatArray = np.zeros(1)


def clipping_cause(
    scores: CanaryScoreTable,
    batches: Sequence[CanaryBatch],
    *,
    std: float,
    names: Sequence[str],
    is_vector: BoolArray,
    bad_fit: float = 5.0,
) -> str:
    """Return the clipping that explains best what arrived; an empty string if none explains it well.

    ``std`` is the standard deviation of a score. ``is_vector`` marks parameters with one dimension. No
    candidate is named if its mean squared deviation, in standard errors, is above ``bad_fit``.
    """
    fit = _Fit(scores, batches, std)
    table = [*_KINDS, *_groups(is_vector), *_parameters(names, is_vector), _mixture(scores)]
    fits = [fit.best(candidate) for candidate in table]
    (deviation, number), candidate = min(zip(fits, table, strict=True), key=lambda pair: pair[0][0])
    return candidate.sentence.format(number) if deviation <= bad_fit else ""


class _Fit:
    """How well a kind of clipping explains the mean scores in all cells."""

    def __init__(self, scores: CanaryScoreTable, batches: Sequence[CanaryBatch], std: float) -> None:
        self._cells, self._batches = _cell_matrix(scores), batches
        self._weights = self._cells * scores.counts
        self._counts = self._weights.sum(axis=1)
        self._means = self._cells @ scores.totals / self._counts
        self._variance = std**2 / self._counts

    def best(self, candidate: Candidate) -> tuple[float, float]:
        """Return the smallest deviation of a candidate, and its number, between those of a fine grid too."""
        grid = candidate.grid
        deviation, place = min(
            (self.deviation(candidate, number), place) for place, number in enumerate(grid)
        )
        continuous = 20  # numbers of a grid from which on numbers in between are tried
        if grid.size < continuous:
            return deviation, float(grid[place])
        between = np.geomspace(grid[max(place - 1, 0)], grid[min(place + 1, grid.size - 1)], 9)
        return min((self.deviation(candidate, number), float(number)) for number in between)

    def deviation(self, candidate: Candidate, number: float) -> float:
        """Return the mean squared deviation over all cells, in standard errors."""
        with np.errstate(over="ignore", invalid="ignore"):
            arriving = [batch.arriving(candidate.factor, number) for batch in self._batches]
        fitted = self._weights @ np.concatenate(arriving) / self._counts
        # the larger of both, so that neither a small nor a large prediction is preferred
        tolerance = 0.1  # relative, of a prediction
        variance = self._variance + (tolerance * np.maximum(np.abs(fitted), np.abs(self._means))) ** 2
        # no single cell decides
        return float(np.minimum((self._means - fitted) ** 2 / variance, 25.0).mean())


def _cell_matrix(scores: CanaryScoreTable) -> FloatArray:
    """Return which canaries belong to each cell: shape x length, and shape x parameter, short ones apart."""
    lengths = np.unique(scores.lengths, return_inverse=True)[1]
    is_short = scores.lengths < 1
    inside = np.where(scores.parameters < 0, -1, 2 * scores.parameters + is_short)
    number = 1 + max(int(lengths.max()), int(inside.max()))
    keys = scores.shapes * number + lengths, np.where(inside < 0, -1, scores.shapes * number + inside)
    cells = [kind == key for kind in keys for key in np.unique(kind[kind >= 0])]
    return np.stack([cell.astype(np.float64) for cell in cells if scores.counts[cell].sum() > 0])


def _limit(norms: FloatArray) -> FloatArray:
    """Return the factors that limit these norms to 1."""
    factors: FloatArray = 1 / np.maximum(1.0, norms)
    return factors


def _largest(batch: CanaryBatch) -> FloatArray:
    return np.asarray(np.abs(batch.values).max(axis=1, keepdims=True))


def _sums(batch: CanaryBatch, power: float = 1.0) -> FloatArray:
    return np.asarray((np.abs(batch.values) ** power).sum(axis=1, keepdims=True))


_FACTORS = np.geomspace(1.05, 60.0, 24)  # above 1, of a norm or of a gradient
_SHARES = np.geomspace(1e-4, 0.95, 40)
_KINDS = (
    Candidate(
        "the largest number of a gradient is limited instead of its norm: is the L-infinity norm used?",
        lambda batch, _: _limit(_largest(batch)),
    ),
    Candidate(
        "each number is limited to about {:.2g} clipping norms: is the gradient clipped by value?",
        lambda batch, limit: 1 / np.maximum(1.0, np.abs(batch.values) / limit),
        np.geomspace(0.01, 8.0, 20),
    ),
    Candidate(
        "the L{:g} norm is limited instead of the L2 norm",
        lambda batch, power: _limit(_sums(batch, power) ** (1 / power)),
        np.array([1.5, 3.0, 4.0, 6.0]),
    ),
    Candidate(
        "the L1 norm divided by about {:.3g} is limited instead of the L2 norm",
        lambda batch, scale: _limit(_sums(batch) / scale),
        _FACTORS,
    ),
    Candidate(
        "each parameter is clipped separately instead of the whole gradient",
        lambda batch, _: _limit(batch.group_norms(batch.parameters)),
    ),
    Candidate(
        "parts of about {:,.0f} numbers are clipped separately instead of the whole gradient",
        lambda batch, size: _limit(batch.group_norms(batch.coordinates // int(size))),
        np.array([100.0, 128.0, 256.0, 500.0, 512.0, 1000.0, 1024.0, 4096.0, 10_000.0]),
    ),
    Candidate(
        "gradients are not clipped: is each gradient clipped before the sum?",
        lambda batch, _: np.ones((len(batch.values), 1)),
    ),
    Candidate(
        "all gradients are multiplied by about {:.2g}, however long they are: is the mean or the "
        "sum of the batch clipped instead of each gradient?",
        lambda batch, factor: np.full((len(batch.values), 1), factor),
        np.geomspace(1e-6, 0.5, 40),
    ),
    Candidate(
        "the norm is capped at about {:.2g} clipping norms: longer gradients are not clipped enough",
        lambda batch, cap: _limit(np.minimum(batch.norms(), cap)),
        np.geomspace(2.0, 5e5, 40),
    ),
    *(
        Candidate(
            f"gradients of {length:,g} clipping norms are not clipped, but shorter ones are: does their norm "
            "overflow?",
            lambda batch, limit: np.where(batch.norms() > limit, 1.0, _limit(batch.norms())),
            np.array([limit]),
        )
        for length, limit in ((1e3, 100.0), (1e6, 3e4))
    ),
    Candidate(
        "gradients are clipped at about {:.3g} times the claimed clipping norm",
        lambda batch, norm: _limit(batch.norms() / norm),
        _FACTORS,
    ),
    Candidate(
        "gradients are divided by their norm to the power of about {:.2g}",
        lambda batch, power: _limit(batch.norms() ** power),
        np.array([0.25, 0.5, 0.75, 0.9, 2.0]),
    ),
    Candidate(
        "gradients are divided by their squared norm, so that short ones become long",
        lambda batch, _: 1 / np.maximum(np.square(batch.norms()), _TINY),
    ),
    Candidate(
        "gradients are scaled to the clipping norm even if they are shorter: are they normalized?",
        lambda batch, _: 1 / np.maximum(batch.norms(), _TINY),
    ),
    Candidate(
        "gradients shorter than the clipping norm are multiplied by about {:.2g}",
        lambda batch, factor: np.where(batch.norms() < 1, factor, _limit(batch.norms())),
        _FACTORS,
    ),
    Candidate(
        "every clipped gradient is multiplied by about {:.3g} before the release",
        lambda batch, factor: factor * _limit(batch.norms()),
        _FACTORS,
    ),
)
"""Kinds of wrong clipping that are the same for every model."""
SKIPPED_ROWS = "a share of about {:.2g} of the gradients is not clipped, the others are: are rows skipped?"


def _groups(is_vector: BoolArray) -> Iterator[Candidate]:
    """Yield the kinds that depend on the dimensions of parameters."""
    if is_vector.all():
        return
    yield Candidate(
        "each row of a parameter is clipped separately instead of the whole gradient",
        lambda batch, _: _limit(batch.group_norms(batch.rows)),
    )
    if is_vector.any():
        yield Candidate(
            "weights and biases are clipped separately instead of the whole gradient",
            lambda batch, _: _limit(batch.group_norms(is_vector[batch.parameters].astype(np.int64))),
        )
        yield Candidate(
            f"the clipping norm leaves out all weight matrices: {_ALL}",
            lambda batch, _: _limit(batch.norms(is_vector[batch.parameters])),
        )


def _parameters(names: Sequence[str], is_vector: BoolArray) -> Iterator[Candidate]:
    """Yield the kinds that treat one parameter, one layer, or one kind such as biases, differently."""
    if len(names) < 2:
        return
    for number, name in enumerate(names[:_MAX_PARAMETERS]):
        yield from _of_parameter(number, _escaped(name))
    groups = defaultdict(list)
    for number, name in enumerate(names[:_MAX_PARAMETERS]):
        layer, _, kind = name.rpartition(".")
        groups["layer", layer].append(number)
        groups["kind", kind].append(number)
    for numbers in (*groups.values(), np.flatnonzero(is_vector).tolist()):
        if 1 < len(numbers) < len(names):
            listed = [_escaped(names[number]) for number in numbers]
            more = [f"{len(listed) - _MAX_NAMED} more"] if len(listed) > _MAX_NAMED else []
            text = " and ".join([*listed[:_MAX_NAMED], *more])
            yield Candidate(f"the clipping norm leaves out {text}: {_ALL}", _leaving_out(*numbers))


def _of_parameter(number: int, name: str) -> Iterator[Candidate]:
    yield Candidate(f"the clipping norm leaves out {name}: {_ALL}", _leaving_out(number))
    yield Candidate(
        f"the clipping norm leaves out a part of {name}: {_ALL}",
        # the mean over places that are left out or not
        lambda batch, share: share * _leaving_out(number)(batch, share) + (1 - share) * _limit(batch.norms()),
        np.array([0.1, 0.25, 0.5, 0.75]),
    )
    yield Candidate(
        f"the clipping norm is that of {name} alone: {_ALL}",
        lambda batch, _: _limit(batch.norms(batch.parameters == number)),
    )
    yield Candidate(
        f"{name} is not clipped, but other parameters are",
        lambda batch, _: np.where(batch.parameters == number, 1.0, _limit(batch.norms())),
    )


def _escaped(name: str) -> str:
    """Return a name of a parameter for a sentence that is formatted."""
    return name.replace("{", "{{").replace("}", "}}")


def _leaving_out(*numbers: int) -> Factor:
    return lambda batch, _: _limit(batch.norms(~np.isin(batch.parameters, numbers)))


def _mixture(scores: CanaryScoreTable) -> Candidate:
    """Return the kind in which one part of what arrives is clipped correctly, and another is not clipped.

    If rows are skipped, a long canary arrives either as it is or clipped, so that its scores vary.
    """
    longest = scores.lengths == scores.lengths.max()
    mean, square = scores.mean("totals", longest), scores.mean("squares", longest)
    if square > 1.5 * mean**2:  # the scores are not all alike
        return Candidate(
            SKIPPED_ROWS, lambda batch, share: (1 - share) * _limit(batch.norms()) + share, _SHARES
        )
    return Candidate(
        "the raw gradient times about {:.2g} is added to the clipped one: is something added to "
        "the sum or to the release that is not clipped?",
        lambda batch, share: _limit(batch.norms()) + share,
        _SHARES,
    )
