"""The scores that an audit rests on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from dpaudit.errors import InputError
from dpaudit.stats._chunks import chunks, is_on_disk, require_finite
from dpaudit.stats._coins import require_fair
from dpaudit.stats._types import ArrayLike, BoolArray, IntArray, ScoreArray

__all__ = ["Observations"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Observations:
    """Scores of the same canaries with and without them; a higher score means "present".

    Give one-dimensional arrays of independent scores (one a run or a step), or two-dimensional ones,
    steps x canaries, with the same number of steps on both sides. Memory-mapped files are not read until
    they are counted.

    ``normalized`` says that the scores are white-box scores in units of the canary's own signal, so that
    1/2 is the midpoint between absent (mean 0) and present (mean 1): :func:`dpaudit.audit` then needs no
    data to place its threshold.

    >>> Observations(with_canary=[0.9, 1.2], without_canary=[0.1, -0.3, 0.2])
    Observations(with_canary=2 scores, without_canary=3 scores)
    """

    with_canary: ScoreArray
    without_canary: ScoreArray
    normalized: bool = False
    # For canaries that are present by a fair coin, the step of every score; see from_presence().
    with_steps: IntArray | None = field(default=None, repr=False)
    without_steps: IntArray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("with_canary", "without_canary"):
            object.__setattr__(self, name, _as_scores(name, getattr(self, name)))
        present, absent = self.with_canary.shape, self.without_canary.shape
        if len(present) != len(absent) or (len(present) == 2 and present[0] != absent[0]):
            raise InputError(
                "Expected both sides one-dimensional, or both steps x canaries with as many steps, got "
                f"with_canary of shape {present} and without_canary of shape {absent}."
            )

        _check_steps(self)

    def __repr__(self) -> str:
        sides = (self.with_canary, self.without_canary)
        first, second = (" x ".join(f"{n:,}" for n in side.shape) + " scores" for side in sides)
        return f"Observations(with_canary={first}, without_canary={second})"

    @classmethod
    def from_presence(
        cls, scores: ArrayLike, present: ArrayLike, *, normalized: bool = False
    ) -> Observations:
        """Scores and, for each, whether its canary was present: one-dimensional, or steps x canaries.

        Steps x canaries means that every canary of every step was present by a fair coin of its own:
        the share of wrong guesses of a step then has the balanced error as its mean. A mask that cannot
        have come about so is refused.

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
            with_steps=steps[mask],
            without_steps=steps[~mask],
        )

    def in_memory(self) -> Observations:
        """The same with memory-mapped files read and checked: for what needs all scores at once."""
        if not (is_on_disk(self.with_canary) or is_on_disk(self.without_canary)):
            return self
        return replace(
            self,
            with_canary=np.array(self.with_canary),
            without_canary=np.array(self.without_canary),
        )

    @property
    def num_steps(self) -> int:
        """How many steps there are; for one-dimensional scores, how many pairs."""
        if self.with_steps is not None and self.without_steps is not None:
            return 1 + int(max(self.with_steps.max(), self.without_steps.max()))
        return min(len(self.with_canary), len(self.without_canary))

    @property
    def is_stepped(self) -> bool:
        """Whether several canaries share a step."""
        return self.with_canary.ndim == 2 or self.by_coin

    @property
    def by_coin(self) -> bool:
        """Whether every canary of every step was present by a coin of its own."""
        return self.with_steps is not None


def _check_steps(observations: Observations) -> None:
    """The steps of coin-flip canaries: one a score, in order (rules that look back rely on it)."""
    pairs = (
        ("with_steps", observations.with_steps, observations.with_canary),
        ("without_steps", observations.without_steps, observations.without_canary),
    )
    if (observations.with_steps is None) != (observations.without_steps is None):
        raise InputError("Expected steps for both sides or for none.")
    for name, steps, scores in pairs:
        if steps is not None and (steps.shape != scores.shape or (np.diff(steps) < 0).any()):
            raise InputError(f"Expected {name} to be one step for each score, in order.")


def _as_scores(name: str, values: ArrayLike) -> ScoreArray:
    try:
        array = values if isinstance(values, np.memmap) else np.asarray(values)
    except ValueError:  # numpy's own sentence is about shapes of sequences
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
            raise InputError(f"Expected at least one score of a canary that was {name}, got none.")
    return mask
