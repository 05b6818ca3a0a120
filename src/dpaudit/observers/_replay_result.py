"""What replays leave: the trace of each run of a step, and the results, without statistics.

A :class:`StepTrace` has the sums, the noise and the releases of a run, the gradients of the examples, and
everything that the step wrote.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from scipy import sparse

from dpaudit._types import FloatArray
from dpaudit.diagnostics import CheckResults, Finding, likely_causes
from dpaudit.errors import ViolationError

UNITS = 8.0  # in the last place, of a norm
ROUNDING = 1e-3  # relative, besides a few units in the last place
_FLOOR = 1e-6  # of the longest gradient: what is shorter is no gradient
_DISTANCE_ROUNDING = 1e-3  # in clipping norms, for sums of many single-precision numbers
_STEP_NOT_COVERED = (
    "only releases were compared: neither their noise nor what else the step writes, nor gradients that "
    "depend on other examples but stay within the clipping norm",
    "one batch and neighbors of it were released: a fault that only other examples trigger is not detected",
)
NumberArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class ReleaseTrace:
    """One release of a step, as vectors of all parameters."""

    total: NumberArray  # the sum before the noise
    noisy: NumberArray  # the same after it: the release
    unit: float  # the length by which one example may move the release
    eps: float  # of the data type
    rows: FloatArray | None  # norm and projections of each gradient in the sum, if they can be observed
    row_eps: float  # of the precision in which these are computed
    factor: float | None = None  # by which the sum was scaled before the noise, if this can be observed


@dataclass(kw_only=True)
class StepTrace:
    """Everything that a run of a step showed."""

    releases: list[ReleaseTrace] = field(default_factory=list)
    state: dict[tuple[str, str], str] = field(default_factory=dict)  # digests by finding and by name
    written: dict[str, str] = field(default_factory=dict)  # digests of other variables, by name
    random: list[Any] = field(default_factory=list)  # states of the generators before each noise
    has_same_randomness: bool = True  # as the first run had, at each release
    uses_randomness: bool = False  # before the noise
    error: Exception | None = None

    @property
    def is_finite(self) -> bool:
        """Whether all releases are finite."""
        return all(np.isfinite(release.noisy).all() for release in self.releases)

    def has_rows_of(self, other: StepTrace) -> bool:
        """Return whether all gradients are at the same places as in another run."""
        pairs = list(zip(self.releases, other.releases, strict=False))
        return bool(pairs) and all(
            one.rows is not None and two.rows is not None and np.array_equal(one.rows, two.rows)
            for one, two in pairs
        )


class ReplayedStep(ABC):
    """A training step that can be run again and again from the same state."""

    num_examples: int
    must_clip = False  # whether a release without any clipped gradient is an error
    accepts_any_size = True  # whether a correct step accepts any number of examples
    not_covered: tuple[str, ...] = ()
    how_to_repeat: str  # what a user can do if two runs on the same batch differ

    @abstractmethod
    def run(
        self, batch: Any, first: StepTrace | None, *, norm_factor: float = 1.0, next_batch: Any = None
    ) -> StepTrace:
        """Run the step on ``batch``, with the randomness and the releases of the ``first`` run if given.

        ``norm_factor`` multiplies the clipping norm. If ``next_batch`` is given, another step follows.
        """

    @property
    @abstractmethod
    def can_vary(self) -> bool:
        """Whether ``norm_factor`` and ``next_batch`` are supported."""


def rounding_of(one: ReleaseTrace, two: ReleaseTrace) -> float:
    """Return the largest distance of two releases that differ only by rounding."""
    rounding = UNITS * one.eps * (norm(one.noisy) + norm(two.noisy))
    # another batch size may use another kernel, whose results differ in the last place
    return rounding + 2 * two.row_eps * (0 if two.rows is None else len(two.rows)) * one.unit


def unmatched_rows(before: FloatArray, after: FloatArray, eps: float = 0.0) -> tuple[int, int]:
    """Return how many gradients of each side have no counterpart on the other, in whatever order they are.

    Rows are as in :class:`ReleaseTrace`; gradients of zero do not count. ``eps`` is the precision of rows
    that were computed in batches of different sizes.
    """
    floor = _FLOOR * float(np.abs(before[:, 0]).max(initial=0.0))
    limits = (ROUNDING + UNITS * eps) * np.abs(before[:, None, :1]) + floor
    with np.errstate(invalid="ignore"):
        is_same: Any = (np.abs(after[None] - before[:, None]) <= limits).all(axis=2)
    pairs = sparse.csgraph.maximum_bipartite_matching(sparse.csr_array(is_same))
    is_lost, is_new = np.ones(len(before), np.bool_), np.asarray(pairs) < 0
    is_lost[pairs[pairs >= 0]] = False
    lost, new = before[is_lost, 0], after[is_new, 0]
    return int((~(lost <= floor)).sum()), int((~(new <= floor)).sum())


def norm(vector: NumberArray) -> float:
    """Return the Euclidean norm, computed in double precision."""
    return float(np.linalg.norm(vector.astype(np.float64, copy=False)))


def dot(one: NumberArray, two: NumberArray) -> float:
    """Return the dot product, computed in double precision."""
    return float(one.astype(np.float64, copy=False) @ two.astype(np.float64, copy=False))


def scale_between(before: NumberArray, after: NumberArray, eps: float) -> float | None:
    """Return the factor between two vectors, or None if they are not multiples of each other."""
    length = dot(before, before)
    if length == 0 or not math.isfinite(length):
        return None
    factor = dot(before, after) / length
    is_multiple = norm(after - factor * before) <= (1e-5 + UNITS * eps) * norm(after)
    return factor if is_multiple else None


@dataclass(frozen=True, kw_only=True)
class NeighborCheck:
    """A replayed neighbor, and the distance by which it moved the release, in clipping norms."""

    change: str
    distance: float
    """NaN if the distance could not be compared."""
    allowed: float


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What one example can change in a training step, compared without statistics.

    A finding is certain: it names something that the step releases or writes and that depends on one example
    in a way that the noise does not hide. ``non_finite`` has findings that matter only if an example can have
    a non-finite gradient, as in every loop with Opacus 1.6; they are not violations.
    """

    checks: tuple[NeighborCheck, ...]
    findings: tuple[Finding, ...]
    non_finite: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    """Sentences that name what could not be checked, and why."""
    tests_coupling: ClassVar[bool] = True
    """Whether gradients that depend on other examples are detected; see ``dpaudit.recording``."""

    @property
    def largest(self) -> float:
        """The largest distance by which one example moved the release, as a fraction of what is allowed."""
        shares = [check.distance / check.allowed for check in self.checks if not math.isnan(check.distance)]
        return max(shares, default=math.nan)

    @property
    def is_violation(self) -> bool:
        """Whether one example changes more than the claim allows."""
        return bool(self.findings)

    def raise_for_violation(self) -> None:
        """Raise a ``ViolationError`` if one example changes more than the claim allows."""
        if self.is_violation:
            raise ViolationError(str(self))

    def likely_causes(self) -> tuple[str, ...]:
        """Return likely causes of the findings, best first."""
        return likely_causes(findings=[finding.name for finding in (*self.findings, *self.non_finite)])

    def results(self, claimed: object = None) -> CheckResults:  # noqa: ARG002
        """Return the findings as a part of a diagnosis, for the ``checks`` of a recorder."""
        notes = (*self.notes, *(finding.sentence for finding in self.non_finite))
        return CheckResults(certain=self.findings, notes=notes, not_covered=self.not_covered)

    def __str__(self) -> str:
        count = len(self.findings)
        found = f"{count or 'No'} {'finding' if count == 1 else 'findings'}"
        lines = [f"{found} in {len(self.checks)} replayed batches."]
        lines += [f"  {one.name}: {one.sentence}" for one in (*self.findings, *self.non_finite)]
        lines += [f"  possible cause: {cause}" for cause in self.likely_causes()]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines + [f"  not covered: {one}" for one in self.not_covered])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""

        def plain(values: dict[str, Any]) -> dict[str, Any]:
            return {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }

        return {
            "is_violation": self.is_violation,
            "checks": [plain(vars(check)) for check in self.checks],
            "findings": [plain(vars(finding)) for finding in self.findings],
            "non_finite": [plain(vars(finding)) for finding in self.non_finite],
            "notes": list(self.notes),
            "not_covered": list(self.not_covered),
            "likely_causes": list(self.likely_causes()),
        }


@dataclass(frozen=True)
class Sensitivity:
    """The distances between releases of neighboring batches, in clipping norms.

    No statistics are needed: a single distance above 1 proves that the noise is too small.
    """

    distances: tuple[float, ...]
    """Not a number for a neighbor whose release is not finite."""
    not_covered: tuple[str, ...] = _STEP_NOT_COVERED

    @property
    def largest(self) -> float:
        """The largest distance by which one example moved the release."""
        return max((one for one in self.distances if not math.isnan(one)), default=math.nan)

    @property
    def is_violation(self) -> bool:
        """Whether one example moves the release by more than the clipping norm."""
        return self.largest > 1 + _DISTANCE_ROUNDING

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The finding that the sensitivity is too large, if it is."""
        return (Finding.certain("sensitivity", self._sentence, self.largest),) if self.is_violation else ()

    @property
    def non_finite(self) -> tuple[Finding, ...]:
        """What matters only if an example can have a non-finite gradient; not a violation."""
        if not any(map(math.isnan, self.distances)):
            return ()
        sentence = (
            "The release is not finite for a neighboring batch: this reveals an example if it can have a "
            "non-finite gradient."
        )
        return (Finding.certain("non-finite-example", sentence),)

    def likely_causes(self) -> tuple[str, ...]:
        """Return likely causes of the findings, best first."""
        return likely_causes(findings=[finding.name for finding in (*self.findings, *self.non_finite)])

    def raise_for_violation(self) -> None:
        """Raise a ``ViolationError`` if one example moves the release too far."""
        if self.is_violation:
            raise ViolationError(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "is_violation": self.is_violation,
            "distances": [one if math.isfinite(one) else None for one in self.distances],
            "findings": [finding.sentence for finding in self.findings],
            "non_finite": [finding.sentence for finding in self.non_finite],
            "not_covered": list(self.not_covered),
            "likely_causes": list(self.likely_causes()),
        }

    @property
    def _sentence(self) -> str:
        relation = "more than the 1 allowed" if self.is_violation else "within the 1 allowed"
        return f"one example moves the release by {self.largest:.4g} clipping norms, {relation}"

    def __str__(self) -> str:
        return "\n".join([self._sentence, *(finding.sentence for finding in self.non_finite)])
