"""A trial as it is stored, and whether it is still what was stored."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

from dpaudit.experiments.trials._task import Finished
from dpaudit.experiments.trials._trial import Group, Trial

__all__ = ["COLUMNS", "Row", "Values", "mistake", "rows", "sealed"]

COLUMNS = "number", "seed", "present", "score", "duration", "host", "error", "attempts", "checksum"

Values: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Row:
    """One trial that ended, with a score or with an error."""

    number: int
    seed: str  # 32 hexadecimal digits: too large for the numbers of a database
    present: int
    score: float | None
    duration: float
    host: str
    error: str | None
    attempts: int


def rows(group: Group, finished: Finished, attempts: Mapping[int, int]) -> Iterator[Row]:
    """The rows of a group; its time is shared among them. ``attempts`` are those before."""
    duration = finished.seconds / len(group)
    for trial, score, error in zip(group, finished.scores, finished.errors, strict=True):
        yield Row(
            trial.number,
            _seed(trial),
            int(trial.present),
            _positive_zero(score),
            duration,
            finished.host,
            error,
            1 + attempts.get(trial.number, 0),
        )


def _positive_zero(score: float | None) -> float | None:
    """The database knows no negative one."""
    return None if score is None else score + 0.0


def sealed(row: Row, digest: str) -> Values:
    """The values of a row and a checksum of them; ``digest`` is the run's, so that it fits no other."""
    values = astuple(row)
    return (*values, _checksum(values, digest))


def mistake(values: Sequence[Any], trials: Sequence[Trial], digest: str) -> str | None:
    """What is wrong with a row that was read, as a sentence's part; None if nothing is."""
    *kept, checksum = values
    number, seed, present, score, _, _, error, attempts = kept
    if not isinstance(number, int) or not 0 <= number < len(trials):
        return "there is no such trial"
    trial = trials[number]
    if seed != _seed(trial):
        return "its seed is not that of its number"
    if present not in (0, 1) or bool(present) != trial.present:
        return "its canary is not that of its number"
    wrong = _wrong_end(score, error, attempts)
    if wrong is not None:
        return wrong
    return None if checksum == _checksum(tuple(kept), digest) else "it was changed after it was written"


def _wrong_end(score: Any, error: Any, attempts: Any) -> str | None:
    if error is None and not (isinstance(score, float) and math.isfinite(score)):
        return "its score is not a finite number"
    if error is not None and (score is not None or not isinstance(error, str)):
        return "it has a score and an error"
    if not isinstance(attempts, int) or attempts < 1:
        return "it says that it was never tried"
    return None


def _seed(trial: Trial) -> str:
    return f"{trial.seed:032x}"


def _checksum(values: Values, digest: str) -> str:
    text = json.dumps([digest, *values], default=repr)  # the text of a float is exact
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
