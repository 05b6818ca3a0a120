"""Which kind of clipping explains what arrived of canaries: each is applied to them, the best fit is named.

Rules on single cells of a table mislead, because cells differ in power. A prediction for all of them does not
depend on which one is significant. Correct clipping is not among the candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpaudit._types import BoolArray, FloatArray, IntArray

_TOLERANCE = 0.1  # relative, of a prediction
_LARGEST_TERM = 25.0  # of a cell, so that no single one decides
_BAD_FIT = 5.0  # mean squared deviation beyond which no candidate is named
_NUM_REFINED = 5  # candidates whose number is refined
_FINE = 9  # numbers between two neighbors
_BETTER = 10.0  # by how much another parameter that is left out has to improve the fit
_MAX_PARAMETERS = 300  # each of which may be left out
_MOST_LEFT_OUT = 4
_TINY = 1e-30
_CAPS = tuple(np.geomspace(2.0, 5e5, 40).tolist())
_NORMS = tuple(np.geomspace(1.05, 60.0, 24).tolist())
_VALUES = tuple(np.geomspace(0.01, 8.0, 20).tolist())
_FACTORS = tuple(np.geomspace(1e-6, 0.5, 40).tolist())
_UNEVEN = 1.5  # ratio of the mean square to the squared mean of scores that are not all alike
_PARTS = tuple(np.geomspace(1e-4, 0.95, 40).tolist())
_POWERS = (1.5, 3.0, 4.0, 6.0)
_EXPONENTS = (0.25, 0.5, 0.75, 0.9, 2.0)
_CHUNKS = (100.0, 128.0, 256.0, 500.0, 512.0, 1000.0, 1024.0, 4096.0, 10_000.0)
_SHARES = (0.1, 0.25, 0.5, 0.75)
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
        found: FloatArray = np.linalg.norm(values, axis=1, keepdims=True)
        return found

    def group_norms(self, groups: IntArray) -> FloatArray:
        """Return the norm of the group that contains each entry."""
        if self.values.shape[1] == 1:
            return np.abs(self.values)
        used, columns = np.unique(groups[0], return_inverse=True)
        member = np.zeros((groups.shape[1], used.size))
        member[np.arange(groups.shape[1]), columns] = 1.0
        squares: FloatArray = np.square(self.values) @ member
        return np.sqrt(squares)[:, columns]

    def arriving(self, clip: Clip) -> FloatArray:
        """Return the component of each canary, clipped in this way, along itself."""
        clipped = self.values * clip(self)
        found: FloatArray = (clipped * self.values).sum(axis=1) / np.maximum(self.norms()[:, 0], _TINY)
        return found


Clip = Callable[[CanaryBatch], FloatArray]
"""Returns the factor by which each entry is multiplied."""


class ArrivedScores(Protocol):
    """The moments of the scores of canaries, in the order of the batches."""

    @property
    def shapes(self) -> IntArray: ...
    @property
    def lengths(self) -> FloatArray: ...
    @property
    def parameters(self) -> IntArray: ...
    @property
    def counts(self) -> FloatArray: ...
    @property
    def totals(self) -> FloatArray: ...
    @property
    def squares(self) -> FloatArray: ...


def clipping_cause(
    found: ArrivedScores,
    batches: Sequence[CanaryBatch],
    *,
    std: float,
    names: Sequence[str],
    is_vector: BoolArray,
) -> str:
    """Return the clipping that explains best what arrived; an empty string if none explains it well.

    ``std`` is the standard deviation of a score. ``is_vector`` marks parameters with one dimension.
    """
    fit = _Fit(found, batches, std)
    known = [*candidates(names, is_vector), _mixture(found)]
    tried = [_tried(fit, candidate, candidate.numbers) for candidate in known]
    tried.sort(key=lambda one: one.score)
    tried += [
        _tried(fit, one.candidate, one.neighbors())
        for one in tried[:_NUM_REFINED]
        if len(one.candidate.numbers) > 1 and one.candidate.is_continuous
    ]
    if len(names) > 1:
        tried += [_grown(fit, one, names) for one in _best_left_out(tried)]
    best = min(tried, key=lambda one: one.score)
    return best.candidate.text(best.number) if best.deviation <= _BAD_FIT else ""


class _Fit:
    """How well a kind of clipping explains the mean scores in all cells."""

    def __init__(self, found: ArrivedScores, batches: Sequence[CanaryBatch], std: float) -> None:
        self._cells, self._batches = _cell_matrix(found), batches
        self._weights = self._cells * found.counts
        self._counts = self._weights.sum(axis=1)
        self._means = self._cells @ found.totals / self._counts
        self._variance = std**2 / self._counts

    def __call__(self, clip: Clip) -> tuple[float, float]:
        """Return the deviation to minimize, and the mean squared one in standard errors."""
        with np.errstate(over="ignore", invalid="ignore"):
            predicted = np.concatenate([batch.arriving(clip) for batch in self._batches])
        fitted = self._weights @ predicted / self._counts
        # the larger of both, so that neither a small nor a large prediction is preferred
        variance = self._variance + (_TOLERANCE * np.maximum(np.abs(fitted), np.abs(self._means))) ** 2
        terms = np.minimum((self._means - fitted) ** 2 / variance, _LARGEST_TERM)
        return float(terms.sum()), float(terms.mean())


def _cell_matrix(found: ArrivedScores) -> FloatArray:
    """Return which canaries belong to each cell: shape x length, and shape x parameter, short ones apart."""
    lengths = np.unique(found.lengths, return_inverse=True)[1]
    is_short = found.lengths < 1
    inside = np.where(found.parameters < 0, -1, 2 * found.parameters + is_short)
    number = 1 + max(int(lengths.max()), int(inside.max()))
    keys = np.stack(
        [found.shapes * number + lengths, np.where(inside < 0, -1, found.shapes * number + inside)]
    )
    rows = []
    for kind in keys:
        for key in np.unique(kind[kind >= 0]):
            chosen = kind == key
            if found.counts[chosen].sum() > 0:
                rows.append(chosen.astype(np.float64))
    return np.stack(rows)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A kind of wrong clipping, which may depend on a number."""

    text: Callable[[float], str]
    clip: Callable[[float], Clip]
    numbers: tuple[float, ...] = (0.0,)
    is_continuous: bool = True
    left_out: tuple[int, ...] = ()
    """The parameters that the clipping norm leaves out."""


@dataclass(frozen=True, eq=False)
class _Tried:
    candidate: Candidate
    number: float
    score: float
    deviation: float

    def neighbors(self) -> tuple[float, ...]:
        """Return numbers between the neighbors of the best one."""
        numbers = self.candidate.numbers
        place = numbers.index(self.number)
        low, high = numbers[max(place - 1, 0)], numbers[min(place + 1, len(numbers) - 1)]
        return tuple(np.geomspace(low, high, _FINE).tolist())


def _tried(fit: _Fit, candidate: Candidate, numbers: Sequence[float]) -> _Tried:
    """Return the best fit of a candidate with any of these numbers."""
    fits = [(*fit(candidate.clip(number)), number) for number in numbers]
    score, deviation, number = min(fits)
    return _Tried(candidate, number, score, deviation)


def _best_left_out(tried: Sequence[_Tried]) -> list[_Tried]:
    """Return the best fit in which the norm leaves out a single parameter."""
    return sorted((one for one in tried if one.candidate.left_out), key=lambda one: one.score)[:1]


def _grown(fit: _Fit, best: _Tried, names: Sequence[str]) -> _Tried:
    """Leave out more parameters as long as each improves the fit."""
    for _ in range(_MOST_LEFT_OUT - 1):
        known = best.candidate.left_out
        others = [
            _tried(fit, _leaving_out((*known, number), names), (0.0,))
            for number in range(min(len(names), _MAX_PARAMETERS))
            if number not in known
        ]
        if not others or (grown := min(others, key=lambda one: one.score)).score > best.score - _BETTER:
            break
        best = grown
    return best


def candidates(names: Sequence[str], is_vector: BoolArray) -> Iterator[Candidate]:
    """Yield the kinds of wrong clipping."""
    yield from _norms_of_other_things(is_vector)
    for number, name in enumerate(names[:_MAX_PARAMETERS] if len(names) > 1 else ()):
        yield _leaving_out((number,), names)
        yield Candidate(
            _always(f"the clipping norm leaves out a part of {name}: {_ALL}"), _partly(number), _SHARES
        )
        yield Candidate(_always(f"the clipping norm is that of {name} alone: {_ALL}"), _fixed(_only(number)))
        yield Candidate(_always(f"{name} is not clipped, but other parameters are"), _fixed(_spared(number)))
    yield from _ranges()
    yield from _scalings()


def _always(text: str) -> Callable[[float], str]:
    return lambda _: text


def _fixed(clip: Clip) -> Callable[[float], Clip]:
    return lambda _: clip


def _leaving_out(numbers: tuple[int, ...], names: Sequence[str]) -> Candidate:
    what = " and ".join(names[number] for number in numbers)
    return Candidate(
        _always(f"the clipping norm leaves out {what}: {_ALL}"), _fixed(_without(numbers)), left_out=numbers
    )


def _norms_of_other_things(is_vector: BoolArray) -> Iterator[Candidate]:
    yield Candidate(
        _always(
            "the largest number of a gradient is limited instead of its norm: is the L-infinity norm used?"
        ),
        _fixed(lambda batch: _limit(np.abs(batch.values).max(axis=1, keepdims=True))),
    )
    yield Candidate(
        lambda limit: (
            f"each number is limited to about {limit:.2g} clipping norms: is the gradient clipped by value?"
        ),
        _by_value,
        _VALUES,
    )
    yield Candidate(
        lambda power: f"the L{power:g} norm is limited instead of the L2 norm",
        _power_norm,
        _POWERS,
        is_continuous=False,
    )
    yield Candidate(
        lambda scale: f"the L1 norm divided by about {scale:.3g} is limited instead of the L2 norm",
        _scaled_sum,
        _NORMS,
    )
    groups = [("parameters", "parameter"), *([] if is_vector.all() else [("rows", "row of a parameter")])]
    for name, what in groups:
        yield Candidate(
            _always(f"each {what} is clipped separately instead of the whole gradient"),
            _fixed(_by_group(name)),
        )
    yield Candidate(
        lambda size: (
            f"parts of about {size:,.0f} numbers are clipped separately instead of the whole gradient"
        ),
        _by_chunk,
        _CHUNKS,
        is_continuous=False,
    )
    if is_vector.any() and not is_vector.all():
        yield Candidate(
            _always("weights and biases are clipped separately instead of the whole gradient"),
            _fixed(lambda batch: _limit(batch.group_norms(is_vector[batch.parameters].astype(np.int64)))),
        )
        yield Candidate(
            _always(f"the clipping norm leaves out all weight matrices: {_ALL}"),
            _fixed(lambda batch: _limit(batch.norms(is_vector[batch.parameters]))),
        )


def _ranges() -> Iterator[Candidate]:
    yield Candidate(
        _always("gradients are not clipped: is each gradient clipped before the sum?"),
        _fixed(lambda batch: np.ones((len(batch.values), 1))),
    )
    yield Candidate(
        lambda factor: (
            f"all gradients are multiplied by about {factor:.2g}, however long they are: is the mean or the "
            "sum of the batch clipped instead of each gradient?"
        ),
        lambda factor: lambda batch: np.full((len(batch.values), 1), factor),
        _FACTORS,
    )
    yield Candidate(
        lambda cap: (
            f"the norm is capped at about {cap:.2g} clipping norms: longer gradients are not clipped enough"
        ),
        _capped,
        _CAPS,
    )
    yield Candidate(
        lambda limit: (
            f"gradients of {1e3 if limit < 1e3 else 1e6:,g} clipping norms are not clipped, but shorter "
            "ones are: does their norm overflow?"
        ),
        _unclipped_beyond,
        (100.0, 3e4),
        is_continuous=False,
    )
    yield Candidate(
        lambda norm: f"gradients are clipped at about {norm:.3g} times the claimed clipping norm",
        _clipped_at,
        _NORMS,
    )
    yield Candidate(
        lambda power: f"gradients are divided by their norm to the power of about {power:.2g}",
        lambda power: lambda batch: _limit(batch.norms() ** power),
        _EXPONENTS,
    )


def skipped_rows(share: float) -> str:
    """Return the cause if this share of the rows is not clipped."""
    return f"a share of about {share:.2g} of the gradients is not clipped, the others are: are rows skipped?"


def _mixture(found: ArrivedScores) -> Candidate:
    """Return the kind in which one part of what arrives is clipped correctly, and another is not clipped.

    If rows are skipped, a long canary arrives either as it is or clipped, so that its scores vary.
    """
    longest = found.lengths == found.lengths.max()
    count = max(float(found.counts[longest].sum()), 1.0)
    mean, square = (float(part[longest].sum()) / count for part in (found.totals, found.squares))
    if square > _UNEVEN * mean**2:
        return Candidate(
            skipped_rows,
            lambda share: lambda batch: (1 - share) * _limit(batch.norms()) + share,
            _PARTS,
        )
    return Candidate(
        lambda share: (
            f"the raw gradient times about {share:.2g} is added to the clipped one: is something added to "
            "the sum or to the release that is not clipped?"
        ),
        lambda share: lambda batch: _limit(batch.norms()) + share,
        _PARTS,
    )


def _scalings() -> Iterator[Candidate]:
    yield Candidate(
        _always("gradients are divided by their squared norm, so that short ones become long"),
        _fixed(lambda batch: 1 / np.maximum(np.square(batch.norms()), _TINY)),
    )
    yield Candidate(
        _always("gradients are scaled to the clipping norm even if they are shorter: are they normalized?"),
        _fixed(lambda batch: 1 / np.maximum(batch.norms(), _TINY)),
    )
    yield Candidate(
        lambda factor: f"gradients shorter than the clipping norm are multiplied by about {factor:.2g}",
        _short_times,
        _NORMS,
    )
    yield Candidate(
        lambda factor: f"every clipped gradient is multiplied by about {factor:.3g} before the release",
        _all_times,
        _NORMS,
    )


def _limit(norms: FloatArray) -> FloatArray:
    factors: FloatArray = 1 / np.maximum(1.0, norms)
    return factors


def _by_value(limit: float) -> Clip:
    return lambda batch: 1 / np.maximum(1.0, np.abs(batch.values) / limit)


def _power_norm(power: float) -> Clip:
    return lambda batch: _limit((np.abs(batch.values) ** power).sum(axis=1, keepdims=True) ** (1 / power))


def _by_group(name: str) -> Clip:
    return lambda batch: _limit(batch.group_norms(getattr(batch, name)))


def _by_chunk(size: float) -> Clip:
    return lambda batch: _limit(batch.group_norms(batch.coordinates // int(size)))


def _scaled_sum(scale: float) -> Clip:
    return lambda batch: _limit(np.abs(batch.values).sum(axis=1, keepdims=True) / scale)


def _without(numbers: tuple[int, ...]) -> Clip:
    return lambda batch: _limit(batch.norms(~np.isin(batch.parameters, numbers)))


def _partly(number: int) -> Callable[[float], Clip]:
    def with_share(share: float) -> Clip:
        # the mean over places that are left out or not
        whole = _without((number,))
        return lambda batch: share * whole(batch) + (1 - share) * _limit(batch.norms())

    return with_share


def _spared(number: int) -> Clip:
    return lambda batch: np.where(batch.parameters == number, 1.0, _limit(batch.norms()))


def _only(number: int) -> Clip:
    return lambda batch: _limit(batch.norms(batch.parameters == number))


def _capped(cap: float) -> Clip:
    return lambda batch: _limit(np.minimum(batch.norms(), cap))


def _unclipped_beyond(limit: float) -> Clip:
    return lambda batch: np.where(batch.norms() > limit, 1.0, _limit(batch.norms()))


def _clipped_at(norm: float) -> Clip:
    return lambda batch: _limit(batch.norms() / norm)


def _short_times(factor: float) -> Clip:
    return lambda batch: np.where(batch.norms() < 1, factor, _limit(batch.norms()))


def _all_times(factor: float) -> Clip:
    return lambda batch: factor * _limit(batch.norms())
