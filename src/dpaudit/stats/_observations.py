"""The scores that an audit is based on, in memory or on disk.

A memory-mapped file that is read through its mapping stays in the resident memory of the process, and every
page of it costs a page fault. Here it is read in chunks into one buffer instead, so that 250 million scores
need no more memory than one chunk.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import bdtr

from dpaudit._io import open_file
from dpaudit._types import ArrayLike, BoolArray, FloatArray, IntArray, ScoreArray
from dpaudit.errors import InputError

# One megabyte of float32: a chunk stays in the second-level cache while it is checked and compared.
_CHUNK = 1 << 18
FAIR = "the presence of each canary was decided by an independent fair coin"  # listed as an assumption
_REFUSAL_RATE = 1e-9  # the probability of rejecting fair coins


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """Scores with and without the canary; a higher score means "present".

    Pass one-dimensional arrays of independent scores (one per run or step), or two-dimensional arrays,
    steps x canaries, with the same number of steps on both sides. Memory-mapped files are not read until
    their errors are counted.

    ``normalized`` states that the scores are white-box scores in units of the canary's own signal, so that
    1/2 is the midpoint between absent (mean 0) and present (mean 1): :func:`dpaudit.audit` then needs no
    data to choose its threshold.

    ``coupled`` states that the score of a canary depends on which other canaries of its step were present, as
    after subtracting the contributions of other canaries that overlap with it.

    >>> Observations(with_canary=[0.9, 1.2], without_canary=[0.1, -0.3, 0.2])
    Observations(with_canary=2 scores, without_canary=3 scores)
    """

    with_canary: ScoreArray
    without_canary: ScoreArray
    normalized: bool = False
    coupled: bool = False
    # The step of each score, if fair coins decided which canaries were present; see from_presence().
    with_steps: IntArray | None = field(default=None, repr=False)
    without_steps: IntArray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("with_canary", "without_canary"):
            object.__setattr__(self, name, _as_scores(name, getattr(self, name)))
        present, absent = self.with_canary.shape, self.without_canary.shape
        if len(present) != len(absent) or (len(present) == 2 and present[0] != absent[0]):
            raise InputError(
                "Expected both sides to be one-dimensional, or both to be steps x canaries with the same "
                f"number of steps, got with_canary of shape {present} and without_canary of shape {absent}."
            )
        _check_steps(self)

    def __repr__(self) -> str:
        sides = (self.with_canary, self.without_canary)
        first, second = (" x ".join(f"{n:,}" for n in side.shape) + " scores" for side in sides)
        return f"Observations(with_canary={first}, without_canary={second})"

    @classmethod
    def from_presence(
        cls, scores: ArrayLike, present: ArrayLike, *, normalized: bool = False, coupled: bool = False
    ) -> Observations:
        """Split scores, one-dimensional or steps x canaries, by whether their canary was present.

        For steps x canaries, an independent fair coin must have decided the presence of each canary in
        each step: the mean fraction of wrong guesses in a step is then the balanced error. A mask that is
        very unlikely under fair coins raises an ``InputError``.

        >>> Observations.from_presence([0.1, 0.9, 0.4], [False, True, True])
        Observations(with_canary=2 scores, without_canary=1 scores)
        """
        values = _as_scores("scores", scores)
        mask = _as_mask(present, values.shape)
        if values.ndim == 1:
            return cls(with_canary=values[mask], without_canary=values[~mask], normalized=normalized)
        require_fair(mask)
        steps = np.broadcast_to(np.arange(len(values))[:, None], values.shape)
        return cls(
            with_canary=values[mask],
            without_canary=values[~mask],
            normalized=normalized,
            coupled=coupled,
            with_steps=steps[mask],
            without_steps=steps[~mask],
        )

    def in_memory(self) -> Observations:
        """Return these observations with memory-mapped files read into memory and checked."""
        if not (is_on_disk(self.with_canary) or is_on_disk(self.without_canary)):
            return self
        return replace(
            self, with_canary=np.array(self.with_canary), without_canary=np.array(self.without_canary)
        )

    @property
    def num_steps(self) -> int:
        """The number of steps; for one-dimensional scores, the number of pairs."""
        if self.with_steps is not None and self.without_steps is not None:
            return 1 + int(max(self.with_steps.max(), self.without_steps.max()))
        return min(len(self.with_canary), len(self.without_canary))

    @property
    def is_stepped(self) -> bool:
        """Whether several canaries share a step."""
        return self.with_canary.ndim == 2 or self.by_coin

    @property
    def by_coin(self) -> bool:
        """Whether a coin decided the presence of each canary in each step."""
        return self.with_steps is not None


def _check_steps(observations: Observations) -> None:
    """Require one step per score, in ascending order: predictable rules rely on it."""
    pairs = (
        ("with_steps", observations.with_steps, observations.with_canary),
        ("without_steps", observations.without_steps, observations.without_canary),
    )
    if (observations.with_steps is None) != (observations.without_steps is None):
        raise InputError("Expected steps for both sides or for neither.")
    for name, steps, scores in pairs:
        if steps is not None and (steps.shape != scores.shape or (np.diff(steps) < 0).any()):
            raise InputError(f"Expected {name} to hold one step per score, in ascending order.")


def _as_scores(name: str, values: ArrayLike) -> ScoreArray:
    try:
        array = values if isinstance(values, np.memmap) else np.asarray(values)
    except ValueError:  # numpy's own message is about inhomogeneous shapes
        raise InputError(f"Expected {name} to be one array, got rows of different lengths.") from None
    if array.dtype.kind in "iub":
        array = array.astype(np.float64)
    if array.dtype.kind != "f":
        raise InputError(f"Expected {name} to be numbers, got an array of type {array.dtype}.")
    if array.ndim not in (1, 2):
        raise InputError(
            f"Expected {name} to be one-dimensional or steps x canaries, got shape {array.shape}."
        )
    if array.size == 0:
        raise InputError(f"Expected {name} to hold at least one score, got shape {array.shape}.")
    if not is_on_disk(array):
        for start, piece in chunks(array):
            require_finite(name, start, piece)
    return array


def _as_mask(present: ArrayLike, shape: tuple[int, ...]) -> BoolArray:
    mask = np.asarray(present)
    if mask.shape != shape:
        raise InputError(f"Expected present of shape {shape}, got {mask.shape}.")
    if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
        raise InputError("Expected present to hold only 0 and 1 (or False and True).")
    mask = mask.astype(np.bool_)
    for value, name in ((True, "present"), (False, "absent")):
        if not (mask == value).any():
            raise InputError(f"Expected at least one score with the canary {name}, got none.")
    return mask


def require_fair(present: BoolArray) -> None:
    """Reject a mask, steps x canaries, that is unbalanced in a step, for a canary or overall.

    If exactly half of the canaries in every step are present, no coin is needed: wrong guesses on both
    sides have equal weight.

    >>> require_fair(np.array([[True, False], [False, True]]))
    """
    num_steps, num_canaries = present.shape
    by_step, by_canary = present.sum(axis=1), present.sum(axis=0)
    if (2 * by_step == num_canaries).all():
        return
    counts = {
        "overall": (np.array([present.sum()]), present.size),
        "for one canary": (by_canary, num_steps),
        "in one step": (by_step, num_canaries),
    }
    for where, (found, number) in counts.items():
        least = _probabilities(found, number)
        if least.min() < _REFUSAL_RATE / (len(counts) * least.size):
            worst = int(found[least.argmin()])
            raise InputError(
                "Expected an independent fair coin to decide the presence of each canary in each step, got "
                f"{worst:,} of {number:,} present {where}. For other designs, pass the scores with and "
                "without the canary separately."
            )


def _probabilities(counts: IntArray, number: int) -> FloatArray:
    """Return the probability that ``number`` fair coins deviate from half at least as much as each count."""
    fewer = np.minimum(counts, number - counts)
    likely: FloatArray = np.minimum(1.0, 2 * bdtr(fewer, number, 0.5))
    return likely


def is_on_disk(scores: ScoreArray) -> bool:
    """Return whether ``scores`` is a whole memory-mapped file (the offset of a slice is unknown)."""
    return isinstance(scores, np.memmap) and isinstance(scores.base, mmap.mmap)


def chunks(scores: ScoreArray) -> Iterator[tuple[int, ScoreArray]]:
    """Yield (start index, chunk) in flat order; a chunk is valid until the next one is requested."""
    if isinstance(scores, np.memmap) and is_on_disk(scores) and scores.flags.c_contiguous:
        yield from _from_file(scores)
        return
    flat = scores.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield start, flat[start : start + _CHUNK]


def _from_file(scores: np.memmap) -> Iterator[tuple[int, ScoreArray]]:
    assert scores.filename is not None  # whole memory-mapped files have one
    buffer = np.empty(min(_CHUNK, scores.size), scores.dtype)
    with open_file(scores.filename) as file:
        file.seek(scores.offset)
        for start in range(0, scores.size, _CHUNK):
            piece = buffer[: scores.size - start]
            if file.readinto(piece.data) != piece.nbytes:
                raise InputError(f"Expected {scores.size:,} scores in {scores.filename}, got fewer.")
            yield start, piece


def require_finite(name: str, start: int, piece: ScoreArray) -> None:
    """Raise an ``InputError`` that names the first NaN or infinity."""
    if np.isfinite(piece).all():
        return
    bad = int(np.flatnonzero(~np.isfinite(piece))[0])
    raise InputError(f"Expected finite scores, got {name}[{start + bad}]={float(piece[bad])!r}.")
