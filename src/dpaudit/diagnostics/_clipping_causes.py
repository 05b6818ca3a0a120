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
_BAD_FIT = 3.0  # mean squared deviation beyond which no candidate is named
_CAPS = (3.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0, 200.0, 300.0, 1e3, 3e3, 5e3, 1e4, 3e4, 65504.0, 1e5, 3e5)
_NORMS = (
    1.1,
    1.2,
    1.25,
    1.3,
    1.414,
    1.5,
    1.7,
    2.0,
    2.5,
    3.0,
    4.0,
    5.0,
    6.0,
    8.0,
    9.0,
    12.0,
    16.0,
    25.0,
    50.0,
)
_FACTORS = (1.2, 1.5, 1.8, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 16.0, 32.0)
_VALUES = (1.0, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.01)
_CHUNKS = (100, 128, 256, 500, 512, 1000, 1024, 4096, 10_000)
_POWERS = (3.0, 4.0)
_MAX_PARAMETERS = 300  # each of which may be left out
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
    cells = _cell_matrix(found)
    counts = cells @ found.counts
    means = cells @ found.totals / counts
    fits = []
    for text, clip in candidates(names, is_vector):
        with np.errstate(over="ignore", invalid="ignore"):
            predicted = np.concatenate([batch.arriving(clip) for batch in batches])
        fitted = cells @ (found.counts * predicted) / counts
        variance = std**2 / counts + (_TOLERANCE * fitted) ** 2
        terms = np.minimum((means - fitted) ** 2 / variance, _LARGEST_TERM)
        fits.append((float((terms + np.log(variance)).sum()), float(terms.mean()), text))
    _, deviation, text = min(fits)
    return text if deviation <= _BAD_FIT else ""


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


def candidates(names: Sequence[str], is_vector: BoolArray) -> Iterator[tuple[str, Clip]]:
    """Yield the kinds of wrong clipping, each with a description."""
    yield from _norms_of_other_things(is_vector)
    for number, name in enumerate(names[:_MAX_PARAMETERS] if len(names) > 1 else ()):
        yield f"the clipping norm leaves out {name}: {_ALL}", _without(number)
        yield f"the clipping norm is that of {name} alone: {_ALL}", _only(number)
    yield from _ranges()
    yield from _scalings()


def _norms_of_other_things(is_vector: BoolArray) -> Iterator[tuple[str, Clip]]:
    yield (
        "the largest number of a gradient is limited instead of its norm: is the L-infinity norm used?",
        lambda batch: 1 / np.maximum(1.0, np.abs(batch.values).max(axis=1, keepdims=True)),
    )
    for limit in _VALUES:
        yield (
            f"each number is limited to {limit:g} clipping norms: is the gradient clipped by value?",
            _by_value(limit),
        )
    for power in _POWERS:
        yield f"the L{power:g} norm is limited instead of the L2 norm", _power_norm(power)
    yield "each row of a parameter is clipped separately instead of the whole gradient", _by_group("rows")
    yield "each parameter is clipped separately instead of the whole gradient", _by_group("parameters")
    for size in _CHUNKS:
        yield (
            f"parts of about {size:,} numbers are clipped separately instead of the whole gradient",
            _by_chunk(size),
        )
    if is_vector.any() and not is_vector.all():
        yield (
            "weights and biases are clipped separately instead of the whole gradient",
            lambda batch: _limit(batch.group_norms(is_vector[batch.parameters].astype(np.int64))),
        )
        yield (
            "the clipping norm leaves out biases and other vectors: is it computed over all parameters?",
            lambda batch: _limit(batch.norms(~is_vector[batch.parameters])),
        )
        yield (
            "the clipping norm leaves out all weight matrices: is it computed over all parameters?",
            lambda batch: _limit(batch.norms(is_vector[batch.parameters])),
        )


def _ranges() -> Iterator[tuple[str, Clip]]:
    yield (
        "gradients are not clipped: is each gradient clipped before the sum?",
        lambda batch: np.ones((len(batch.values), 1)),
    )
    for cap in _CAPS:
        yield (
            f"the norm is capped at about {cap:g} clipping norms: longer gradients are not clipped enough",
            _capped(cap),
        )
    for limit, other in ((100.0, 1e3), (3e4, 1e6)):
        yield (
            f"gradients of {other:g} clipping norms are not clipped, but shorter ones are: does their norm "
            "overflow?",
            _unclipped_beyond(limit),
        )
    for norm in _NORMS:
        yield f"gradients are clipped at {norm:g} times the claimed clipping norm", _clipped_at(norm)
    yield (
        "gradients are divided by the square root of their norm: is the norm computed correctly?",
        lambda batch: _limit(np.sqrt(batch.norms())),
    )


def _scalings() -> Iterator[tuple[str, Clip]]:
    yield (
        "gradients are divided by their squared norm, so that short ones become long",
        lambda batch: 1 / np.maximum(np.square(batch.norms()), _TINY),
    )
    yield (
        "gradients are scaled to the clipping norm even if they are shorter: are they normalized?",
        lambda batch: 1 / np.maximum(batch.norms(), _TINY),
    )
    for factor in _FACTORS:
        yield (
            f"gradients shorter than the clipping norm are multiplied by about {factor:g}",
            _short_times(factor),
        )
        yield (
            f"every clipped gradient is multiplied by about {factor:g} before the release",
            _all_times(factor),
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


def _by_chunk(size: int) -> Clip:
    return lambda batch: _limit(batch.group_norms(batch.coordinates // size))


def _without(number: int) -> Clip:
    return lambda batch: _limit(batch.norms(batch.parameters != number))


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
