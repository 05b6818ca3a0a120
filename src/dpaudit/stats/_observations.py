"""The scores that an audit is based on, in memory or on disk.

A memory-mapped file that is read through its mapping stays in the resident memory of the process, and every
page of it costs a page fault. Here it is read in chunks into one buffer instead, so that 250 million scores
need no more memory than one chunk.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy import special

from dpaudit import _validate
from dpaudit._io import open_file
from dpaudit._types import ArrayLike, BoolArray, FloatArray, IdArray, IntArray, ScoreArray
from dpaudit.errors import InputError
from dpaudit.stats._presence import FAIR, CoinCheck, as_ids, joined_presence, require_twice

# One megabyte of float32: a chunk stays in the second-level cache while it is checked and compared.
_CHUNK = 1 << 18
# What a score is of; the values are listed as assumptions, like FAIR.
STEP, RUN, ONE_RUN = "step", "run", "one-run"
SCORES_OF = {
    STEP: "each score is of a single step, whose batch includes the canary if it is present",
    RUN: "each score is of a whole training run",
    ONE_RUN: "all scores are of one training run, with one score per canary",
}
# Scores that point the wrong way: how improbable they must be without a leak, on how many scores per side,
# and from how many steps on their dependence can be estimated.
_CERTAINLY_REVERSED, _SAMPLED, _ENOUGH_STEPS, _TINY = 1e-6, 1 << 18, 10, 1e-300
ALIKE = "the canary is the only difference between the observations with and without it"
PAIRED = "each canary was scored with and without it, and it is the only difference between the two draws"


@dataclass(frozen=True, eq=False)
class CoinSteps:
    """The step of each score, in ascending order, if fair coins decided which canaries were present."""

    with_canary: IntArray
    without_canary: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """Scores with and without the canary; a higher score means "present".

    Pass one-dimensional arrays of independent scores (one per run or step), or two-dimensional arrays,
    steps x canaries, with the same number of steps on both sides. Memory-mapped files are not read until
    their errors are counted.

    ``normalized`` states that the scores are white-box scores in units of the canary's own signal, so that
    1/2 is the midpoint between absent (mean 0) and present (mean 1): :func:`dpaudit.audit` then needs no
    data to choose its threshold. ``paired`` states that in every step each canary was scored once with and
    once without it, in two draws that differ in nothing else. ``with_ids`` and ``without_ids`` are the
    identifiers of the canaries, one per score or, for steps x canaries, per column.

    ``scores_of``, which a claim about DP-SGD needs, states what a score is of: "step", one step whose batch
    includes the canary if it is present; "run", a whole training run; "one-run", one training run that all
    scores share, with one score per canary.

    ``coupled`` states that the score of a canary depends on which other canaries of its step were present, as
    after subtracting the contributions of other canaries that overlap with it.

    >>> Observations(with_canary=[0.9, 1.2], without_canary=[0.1, -0.3, 0.2])
    Observations(with_canary=2 scores, without_canary=3 scores)
    """

    with_canary: ScoreArray
    without_canary: ScoreArray
    normalized: bool = False
    paired: bool = False
    coupled: bool = False
    scores_of: str | None = None
    with_ids: IdArray | None = field(default=None, repr=False)
    without_ids: IdArray | None = field(default=None, repr=False)
    steps: CoinSteps | None = field(default=None, repr=False)  # from_presence() makes it and checks the coins

    def __post_init__(self) -> None:
        for name in ("normalized", "paired", "coupled"):
            object.__setattr__(self, name, _validate.flag(name, getattr(self, name)))
        if self.scores_of is not None:
            _validate.choice("scores_of", self.scores_of, SCORES_OF)
        for name in ("with_canary", "without_canary"):
            object.__setattr__(self, name, _as_scores(name, getattr(self, name)))
        present, absent = self.with_canary.shape, self.without_canary.shape
        if len(present) != len(absent) or (len(present) == 2 and present[0] != absent[0]):
            raise InputError(
                "with_canary and without_canary must both be one-dimensional, or both steps x canaries "
                f"with the same number of steps, got shapes {present} and {absent}."
            )
        if self.paired and (len(present) == 1 or present != absent):
            raise InputError(
                "Paired observations need as many scores with as without the canary in each step, got "
                f"shapes {present} and {absent}."
            )
        if self.scores_of == ONE_RUN and len(present) == 2:
            raise InputError(
                f"scores_of={ONE_RUN!r} needs one score per canary, got steps x canaries of shapes "
                f"{present} and {absent}."
            )
        _check_ids(self)
        _check_steps(self)

    def __repr__(self) -> str:
        sides = (self.with_canary, self.without_canary)
        first, second = (" x ".join(f"{n:,}" for n in side.shape) + " scores" for side in sides)
        return f"Observations(with_canary={first}, without_canary={second})"

    @classmethod
    def from_presence(
        cls,
        scores: ArrayLike,
        present: ArrayLike,
        *,
        ids: ArrayLike | None = None,
        present_ids: ArrayLike | None = None,
        paired: bool = False,
        normalized: bool = False,
        coupled: bool = False,
        scores_of: str | None = None,
    ) -> Observations:
        """Split scores, one-dimensional or steps x canaries, by whether their canary was present.

        For steps x canaries, an independent fair coin must have decided the presence of each canary in
        each step: the mean fraction of wrong guesses in a step is then the balanced error. A mask that is
        very unlikely under independent fair coins raises an ``InputError``. With ``paired``, no coins are
        needed: every step has one score with and one without each canary, from two draws.

        ``ids`` are the identifiers of the canaries, one per score or per column of the scores. If
        ``present`` is in another order, pass its identifiers as ``present_ids``: both are joined. With
        ``paired``, each identifier names two columns.

        >>> Observations.from_presence([0.1, 0.9, 0.4], [False, True, True])
        Observations(with_canary=2 scores, without_canary=1 scores)
        >>> joined = Observations.from_presence(
        ...     [0.1, 0.9], [True, False], ids=["a", "b"], present_ids=["b", "a"])
        >>> joined.with_canary, joined.with_ids
        (array([0.9]), array(['b'], dtype='<U1'))
        """
        for name, value in (("paired", paired), ("normalized", normalized), ("coupled", coupled)):
            _validate.flag(name, value)
        values = _as_scores("scores", scores)
        names = None if ids is None else as_ids("ids", ids, values.shape[-1])
        flags = plain_array("present", present)
        mask = as_mask(joined_presence(flags, names, present_ids, paired=paired), values.shape)
        if paired:
            return replace(_from_pairs(values, mask, names, normalized), coupled=coupled, scores_of=scores_of)
        if values.ndim == 2:
            check = CoinCheck()
            check.add(mask)
            check.require_fair(
                ask="If each canary was scored with and without it in every step, pass paired=True; for "
                "other designs, pass the scores with and without the canary separately."
            )
        return split_by_coins(
            values, mask, names, normalized=normalized, coupled=coupled, scores_of=scores_of
        )

    def in_memory(self) -> Observations:
        """Return these observations with memory-mapped files read into memory and checked."""
        if not self.has_files:
            return self
        present = loaded("with_canary", self.with_canary)
        return replace(
            self, with_canary=present, without_canary=loaded("without_canary", self.without_canary)
        )

    @property
    def has_files(self) -> bool:
        """Whether a side is a memory-mapped file."""
        return is_on_disk(self.with_canary) or is_on_disk(self.without_canary)

    @property
    def num_steps(self) -> int:
        """The number of steps; for one-dimensional scores, the number of pairs."""
        if self.steps is not None:
            return 1 + int(max(self.steps.with_canary.max(), self.steps.without_canary.max()))
        return min(len(self.with_canary), len(self.without_canary))

    @property
    def is_stepped(self) -> bool:
        """Whether several canaries share a step."""
        return self.with_canary.ndim == 2 or self.by_coin

    @property
    def by_coin(self) -> bool:
        """Whether a coin decided the presence of each canary in each step."""
        return self.steps is not None

    @property
    def design(self) -> str:
        """The assumption on which canaries were present, as listed by a bound."""
        if self.paired:
            return PAIRED
        return FAIR if self.by_coin else ALIKE


def split_by_coins(
    scores: ScoreArray,
    present: BoolArray,
    names: IdArray | None = None,
    *,
    normalized: bool,
    coupled: bool,
    scores_of: str | None = STEP,
) -> Observations:
    """Return observations from scores and coins, one-dimensional or steps x canaries, that were checked."""
    absent = ~present
    for side, name in ((present, "present"), (absent, "absent")):
        if not side.any():
            raise InputError(f"No score has the canary {name}; at least one is needed.")
    fields: dict[str, Any] = {"with_canary": scores[present], "without_canary": scores[absent]}
    if names is not None:
        names = np.broadcast_to(names, scores.shape)
        fields |= {"with_ids": names[present], "without_ids": names[absent]}
    if scores.ndim == 2:
        steps, counts = np.arange(len(scores)), present.sum(axis=1)
        sides = np.repeat(steps, counts), np.repeat(steps, scores.shape[1] - counts)
        fields |= {"steps": CoinSteps(*sides), "coupled": coupled}
    return Observations(**fields, normalized=normalized, scores_of=scores_of)


def _check_steps(observations: Observations) -> None:
    """Require coins that were checked, and one step per score in ascending order, for predictable rules."""
    if not isinstance(observations.steps, CoinSteps | None):
        raise InputError(
            "steps is internal; pass scores and presence, steps x canaries, to "
            "Observations.from_presence(), which checks the coins."
        )
    for name in ("with_canary", "without_canary") if observations.by_coin else ():
        steps, scores = getattr(observations.steps, name), getattr(observations, name)
        if steps.shape != scores.shape or (steps[1:] < steps[:-1]).any():
            raise InputError(f"steps.{name} must have one step per score, in ascending order.")


def _check_ids(observations: Observations) -> None:
    """Require one identifier per score, or per column of steps x canaries."""
    for side in ("with", "without"):
        ids, scores = getattr(observations, f"{side}_ids"), getattr(observations, f"{side}_canary")
        if ids is not None:
            object.__setattr__(observations, f"{side}_ids", as_ids(f"{side}_ids", ids, scores.shape[-1]))


def _from_pairs(
    scores: ScoreArray, present: BoolArray, ids: IdArray | None, normalized: bool
) -> Observations:
    """Return the observations of steps that have one score with and one without each canary."""
    if scores.ndim == 1:
        raise InputError("paired=True needs scores of steps x canaries, got one dimension.")
    size = scores.shape[1]
    if ids is not None:
        order = np.argsort(ids, kind="stable")
        scores, present, ids = scores[:, order], present[:, order], ids[order]
        require_twice(ids)
        pairs = present.reshape(len(present), size // 2, 2)
        wrong = (pairs.sum(axis=2) != 1).any(axis=1)
    else:
        wrong = 2 * np.count_nonzero(present, axis=1) != size
    if wrong.any():
        step = int(np.flatnonzero(wrong)[0])
        raise InputError(
            "paired=True needs one score with and one without each canary in every step, got "
            f"{np.count_nonzero(present[step]):,} of {size:,} scores with it in step "
            f"{step}{', or one canary twice on a side' if ids is not None else ''}."
        )
    names = None if ids is None else ids[::2]
    return Observations(
        with_canary=scores[present].reshape(len(scores), -1),
        without_canary=scores[~present].reshape(len(scores), -1),
        with_ids=names,
        without_ids=names,
        paired=True,
        normalized=normalized,
    )


def _as_scores(name: str, values: ArrayLike) -> ScoreArray:
    array = values if isinstance(values, np.memmap) else plain_array(name, values)
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    if array.dtype.kind != "f":
        raise InputError(f"{name} must be numbers, got an array of type {array.dtype}.")
    if array.ndim not in (1, 2):
        raise InputError(f"{name} must be one-dimensional or steps x canaries, got shape {array.shape}.")
    if array.size == 0:
        raise InputError(f"{name} must have at least one score, got shape {array.shape}.")
    if not is_on_disk(array):
        for start, piece in chunks(array):
            require_finite(name, start, piece)
    return array


def plain_array(name: str, values: ArrayLike) -> np.ndarray[Any, Any]:
    """Return an array of numbers or booleans; a masked array, whose mask would be lost, is rejected."""
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(
            f"{name} must not be a masked array; pass {name}.compressed(), the values that are not masked."
        )
    try:
        array = np.asarray(values)
    except ValueError:  # numpy's own message is about inhomogeneous shapes
        raise InputError(f"{name} must be one array, got rows of different lengths.") from None
    except Exception as error:  # an object that converts itself, such as a tensor on another device
        raise InputError(
            f"{name} must be an array, and {type(values).__name__} cannot be converted to one: "
            f"{error!s:.200}."
        ) from error
    if array.dtype.kind not in "iufb":
        raise InputError(f"{name} must be numbers, got an array of type {array.dtype!s:.60}.")
    return array


def as_mask(present: ArrayLike, shape: tuple[int, ...]) -> BoolArray:
    """Return the presence of each score as booleans; only False, True, 0 and 1 are accepted."""
    mask = as_flags(present)
    if mask.shape != shape:
        raise InputError(f"present must have the shape of the scores, {shape}, got {mask.shape}.")
    return mask


def as_flags(present: ArrayLike) -> BoolArray:
    """Return a copy of the presence of scores of any shape, as booleans."""
    mask = plain_array("present", present)
    if mask.dtype != np.bool_ and not ((mask == 0) | (mask == 1)).all():
        raise InputError("present must contain only 0 and 1, or False and True.")
    return mask.astype(np.bool_)


def is_on_disk(scores: ScoreArray) -> bool:
    """Return whether ``scores`` is a whole memory-mapped file (the offset of a slice is unknown)."""
    return isinstance(scores, np.memmap) and isinstance(scores.base, mmap.mmap)


def loaded(name: str, scores: ScoreArray) -> ScoreArray:
    """Return a memory-mapped file as an array in memory; others as they are."""
    if not is_on_disk(scores):
        return scores
    copy = np.empty(scores.size, scores.dtype)
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        copy[start : start + piece.size] = piece
    return copy.reshape(scores.shape)


def chunks(scores: ScoreArray, first: int = 0, last: int | None = None) -> Iterator[tuple[int, ScoreArray]]:
    """Yield (start index, chunk) from ``first`` to ``last`` in flat order.

    A chunk is valid until the next one is requested.
    """
    end = scores.size if last is None else last
    if isinstance(scores, np.memmap) and is_on_disk(scores) and scores.flags.c_contiguous:
        yield from _from_file(scores, first, end)
        return
    flat = scores.reshape(-1)
    for start in range(first, end, _CHUNK):
        yield start, flat[start : min(start + _CHUNK, end)]


def _from_file(scores: np.memmap, first: int, end: int) -> Iterator[tuple[int, ScoreArray]]:
    assert scores.filename is not None  # whole memory-mapped files have one
    buffer = np.empty(min(_CHUNK, end - first), scores.dtype)
    with open_file(scores.filename) as file:
        file.seek(scores.offset + first * scores.itemsize)
        for start in range(first, end, _CHUNK):
            piece = buffer[: end - start]
            if file.readinto(piece.data) != piece.nbytes:
                raise InputError(
                    f"{scores.filename} was truncated while it was read: it must contain {scores.size:,} "
                    "scores."
                )
            yield start, piece


def require_finite(name: str, start: int, piece: ScoreArray) -> None:
    """Raise an ``InputError`` that names the first NaN or infinity."""
    if np.isfinite(piece).all():
        return
    bad = int(np.flatnonzero(~np.isfinite(piece))[0])
    raise InputError(f"Scores must be finite, got {name}[{start + bad}]={float(piece[bad])!r}.")


def observed_auc(observations: Observations) -> float:
    """Return the area under the ROC of these scores, or of evenly spaced ones of many."""
    present, absent = (_sample(side, observations)[0] for side in ("with", "without"))
    return 0.5 + float(_placements(present, absent).mean())


def require_higher_is_present(observations: Observations, remedy: str) -> None:
    """Raise if scores are lower with the canary than without it, with p < 1e-6 if they are alike.

    The area under the ROC curve is compared with 1/2 by ranks. Scores of a step may be dependent: with
    enough steps, these are also compared as clusters.
    """
    absent, absent_steps = _sample("without", observations)
    present, present_steps = _sample("with", observations)
    above, below = _placements(present, absent), -_placements(absent, present)
    excess = float(above.mean())  # the area minus 1/2
    error = math.sqrt((1 / absent.size + 1 / present.size + 1 / absent.size / present.size) / 12)
    p_value = float(special.ndtr(excess / error))
    number = 1 + int(max(absent_steps.max(), present_steps.max()))
    if observations.is_stepped and number >= _ENOUGH_STEPS:
        steps = np.bincount(present_steps, (above - excess) / above.size, number)
        steps += np.bincount(absent_steps, (below - excess) / below.size, number)
        clustered = max(math.sqrt(float((steps**2).sum())), _TINY)
        p_value = max(p_value, float(special.stdtr(number - 1, excess / clustered)))
    if excess < 0 and p_value < _CERTAINLY_REVERSED:
        raise InputError(
            "Scores must be higher with the canary than without it, but a score with it is higher in only "
            f"{100 * (0.5 + excess):.3g} % of pairs. If lower scores mean that the canary is present, as "
            f"for a loss, {remedy}; otherwise, check whether the two sides are swapped."
        )


def _sample(side: str, observations: Observations) -> tuple[FloatArray, IntArray]:
    """Return evenly spaced scores of a side, all of a small one, and the step of each."""
    name = f"{side}_canary"
    steps = None if observations.steps is None else getattr(observations.steps, name)
    scores: ScoreArray = getattr(observations, name)
    spacing = -(-scores.size // _SAMPLED)
    pieces = []
    for start, piece in chunks(scores):
        require_finite(name, start, piece)
        pieces.append(piece[-start % spacing :: spacing].astype(np.float64))
    if steps is None:
        steps = np.arange(scores.size) // (scores.shape[1] if scores.ndim == 2 else 1)
    return np.concatenate(pieces), steps[::spacing]


def _placements(scores: FloatArray, others: FloatArray) -> FloatArray:
    """Return the fraction of the others below each score, minus 1/2; half of those that are equal count."""
    ordered = np.sort(others)
    ranks = [np.searchsorted(ordered, scores, side) for side in ("left", "right")]
    return np.asarray((ranks[0] + ranks[1]) / (2 * others.size) - 0.5)
