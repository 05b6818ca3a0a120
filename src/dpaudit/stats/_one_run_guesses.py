"""What an attack guessed about the canaries of one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from dpaudit import _validate
from dpaudit.errors import InputError
from dpaudit.stats._types import ArrayLike

__all__ = ["Guesses"]


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Of ``num_canaries`` present by fair coins, ``num_guesses`` were guessed, ``num_correct`` rightly."""

    num_canaries: int
    num_guesses: int
    num_correct: int

    def __post_init__(self) -> None:
        most = _validate.whole("num_canaries", self.num_canaries)
        for name in ("num_guesses", "num_correct"):
            value = _validate.whole(name, getattr(self, name), low=0)
            if value > most:
                raise InputError(f"Expected {name}={value} to be at most {most}.")
            most = value

    @classmethod
    def from_scores(cls, scores: ArrayLike, present: ArrayLike, *, num_guesses: int) -> Guesses:
        """Guess "present" for the highest scores and "absent" for the lowest, half of the guesses each.

        ``num_guesses`` must be chosen before the data. Ties are broken by position.

        >>> Guesses.from_scores([3.0, 1.0, 2.0, 0.0], [True, False, False, False], num_guesses=2)
        Guesses(num_canaries=4, num_guesses=2, num_correct=2)
        """
        values, truth = np.asarray(scores, dtype=np.float64), np.asarray(present)
        if values.ndim != 1 or values.shape != truth.shape:
            raise InputError(
                f"Expected one score and one presence a canary, got {values.shape} and {truth.shape}."
            )
        if not np.isfinite(values).all():
            index = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InputError(f"Expected finite scores, got scores[{index}]={values[index]}.")
        if truth.dtype != np.bool_ and not np.isin(truth, (0, 1)).all():
            raise InputError("Expected present to hold only 0 and 1 (or False and True).")
        if _validate.whole("num_guesses", num_guesses, low=0) > values.size:
            raise InputError(f"Expected num_guesses={num_guesses} to be at most {values.size}.")
        order = np.argsort(values, kind="stable")
        low = num_guesses // 2
        high = num_guesses - low
        truth = truth.astype(np.bool_)[order]
        right = int((~truth[:low]).sum() + truth[truth.size - high :].sum())
        return cls(num_canaries=values.size, num_guesses=num_guesses, num_correct=right)

    def to_dict(self) -> dict[str, int]:
        """Plain values for JSON."""
        return asdict(self)
