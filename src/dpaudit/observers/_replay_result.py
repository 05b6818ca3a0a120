"""What replays leave: the trace of each run of a step, and the result of comparing them.

A :class:`StepTrace` has the sums, the noise and the releases of a run, fingerprints of the gradients of its
examples, and digests of everything that the step wrote.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse

from dpaudit._types import FloatArray
from dpaudit.diagnostics import CheckResults, Finding, likely_causes
from dpaudit.errors import InputError, ViolationError
from dpaudit.observers._arrays import as_numpy, is_torch, precision

ULPS = 8.0  # units in the last place by which a norm may be rounded
RELATIVE_ROUNDING = 1e-3  # besides these units: for sums of many single-precision numbers
NumberArray = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True)
class ReleaseTrace:
    """One release of a step, as vectors of all parameters."""

    total: NumberArray | None = None  # the sum before the noise, if it can be observed
    noisy: NumberArray  # the same after the noise: the release
    unit: float  # the length by which one example may move the release
    eps: float  # of the data type
    rows: FloatArray | None = None  # fingerprints of the gradients in the sum, if they can be observed
    row_eps: float = 0.0  # of the precision in which these are computed
    factor: float | None = None  # by which the sum was scaled before the noise, if this can be observed


@dataclass(kw_only=True)
class StepTrace:
    """Everything that a run of a step showed."""

    releases: list[ReleaseTrace] = field(default_factory=list)
    state: dict[tuple[str, str], str] = field(default_factory=dict)  # digests by finding and by name
    attributes: dict[str, str] = field(default_factory=dict)  # digests of what the model keeps besides
    random: list[Any] = field(default_factory=list)  # states of the RNGs before each noise
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
            mine.rows is not None and theirs.rows is not None and np.array_equal(mine.rows, theirs.rows)
            for mine, theirs in pairs
        )

    def difference(self, other: StepTrace) -> str | None:
        """Return what another run has instead of this one's releases and state, None if both agree."""
        pairs = zip(self.releases, other.releases, strict=False)
        is_raised = (self.error is None) != (other.error is None)
        if (
            is_raised
            or len(self.releases) != len(other.releases)
            or not all(np.array_equal(mine.noisy, theirs.noisy, equal_nan=True) for mine, theirs in pairs)
        ):
            return "other releases"
        changed = [
            name for kind, name in self.state if self.state[kind, name] != other.state.get((kind, name))
        ]
        changed += [name for kind, name in other.state if (kind, name) not in self.state]
        return f"another state ({changed[0]})" if changed else None


class ReplayedStep(ABC):
    """A training step that can be run again and again from the same state."""

    num_examples: int
    must_clip = False  # whether a release without any clipped gradient is an error
    accepts_any_size = True  # whether a correct step accepts any number of examples
    observes_rows = True  # whether gradients of single examples are observed
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
        """Whether ``norm_factor`` and ``next_batch`` are supported, as for a step that writes to objects.

        Other steps are functions, which may depend on their arguments alone.
        """


class ReleaseFunction(ReplayedStep):
    """A function from a batch to a release: neither its sum nor gradients of its examples are observed."""

    can_vary = False
    observes_rows = False
    how_to_repeat = "let reseed() reset the RNG of the noise"
    not_covered = (
        "only releases were compared: neither their noise nor what else the step writes, nor gradients that "
        "depend on other examples but stay within the clipping norm",
    )

    def __init__(
        self, release: Callable[[Any], Any], reseed: Callable[[], object], *, unit: float, divisor: float
    ) -> None:
        self._release, self._reseed, self._unit, self._divisor = release, reseed, unit, divisor

    def run(
        self, batch: Any, first: StepTrace | None, *, norm_factor: float = 1.0, next_batch: Any = None
    ) -> StepTrace:
        assert norm_factor == 1.0 and next_batch is None  # noqa: PT018  # a function has no other arguments
        self._reseed()
        trace = StepTrace()
        try:
            with np.errstate(all="ignore"):  # neighbors may be extreme
                released = self._release(batch)
        except Exception as error:  # noqa: BLE001  # an error is a result, too
            trace.error = error
            return trace
        noisy = self._divisor * as_numpy(released).reshape(-1)
        if first is not None and first.releases[0].noisy.shape != noisy.shape:
            raise InputError(
                f"Releases must have the same shape, got {first.releases[0].noisy.size} numbers for the "
                f"batch and {noisy.size} for a neighboring one."
            )
        trace.releases.append(ReleaseTrace(noisy=noisy, unit=self._unit, eps=_eps(released)))
        return trace


def _eps(released: Any) -> float:
    """Return the relative precision of a release, which may be an array of any library or a list."""
    array = released if is_torch(released) else np.asarray(released)
    return precision(array if "float" in str(array.dtype) else np.zeros(0))[0]


def release_rounding(first: ReleaseTrace, second: ReleaseTrace) -> float:
    """Return the largest distance of two releases that differ only by rounding."""
    rounding = ULPS * first.eps * (norm(first.noisy) + norm(second.noisy))
    # another batch size may use another kernel, whose results differ in the last place
    return rounding + 2 * second.row_eps * (0 if second.rows is None else len(second.rows)) * first.unit


def fingerprint_rows(leaves: Iterable[Any]) -> FloatArray:
    """Return the norm and three fixed projections of each gradient, which identify it.

    ``leaves`` are the gradients of one parameter each, with one row per example.
    """
    squares: Any = 0.0
    projections: Any = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for index, leaf in enumerate(leaves):
            rows = as_numpy(leaf).reshape(len(leaf), math.prod(leaf.shape[1:]))
            angles = np.arange(index, index + rows.shape[1], dtype=np.float32)
            waves = np.stack([np.cos(angles * np.float32(rate)) for rate in (1.3, 2.3, 3.3)], axis=1)
            squares, projections = squares + np.square(rows).sum(axis=1), projections + rows @ waves
        return np.concatenate([np.sqrt(squares)[:, None], projections], axis=1)


def unmatched_rows(before: FloatArray, after: FloatArray, eps: float = 0.0) -> tuple[int, int]:
    """Return how many gradients of each side have no counterpart on the other, in whatever order they are.

    Rows are fingerprints; gradients of zero do not count. ``eps`` is the precision of rows that were
    computed in batches of different sizes.
    """
    floor = 1e-6 * float(np.abs(before[:, 0]).max(initial=0.0))  # what is shorter is no gradient
    limits = (RELATIVE_ROUNDING + ULPS * eps) * np.abs(before[:, None, :1]) + floor
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


def dot(left: NumberArray, right: NumberArray) -> float:
    """Return the dot product, computed in double precision."""
    return float(left.astype(np.float64, copy=False) @ right.astype(np.float64, copy=False))


def scale_between(before: NumberArray, after: NumberArray, eps: float) -> float | None:
    """Return the factor between two vectors, or None if they are not multiples of each other."""
    length = dot(before, before)
    if length == 0 or not math.isfinite(length):
        return None
    factor = dot(before, after) / length
    is_multiple = norm(after - factor * before) <= (1e-5 + ULPS * eps) * norm(after)
    return factor if is_multiple else None


def noise_difference(first: ReleaseTrace, second: ReleaseTrace) -> tuple[str, float] | None:
    """Return how the noise of two releases differs, and by how much; None if it is the same or unknown."""
    if first.total is None or second.total is None:
        return None
    change, totals = second.noisy - first.noisy, second.total - first.total
    length = dot(totals, totals)
    factor = dot(change, totals) / length if length > 0 else 1.0
    moved, noise = norm(change - factor * totals), norm(first.noisy - factor * first.total)
    numbers = (first.noisy, second.noisy, factor * first.total, factor * second.total)
    if moved <= RELATIVE_ROUNDING * noise + ULPS * first.eps * sum(map(norm, numbers)):
        return None
    ratio = norm(second.noisy - factor * second.total) / noise if noise > 0 else math.inf
    if noise > 0 and abs(ratio - 1) <= 0.2 * moved / noise:  # mainly a change of its direction
        return f"changes its direction by {moved / noise:.4g} of its length", moved / noise
    size = abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf
    return f"has {ratio:.4g} of its length", size


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
    tests_coupling: bool = True
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
        count = f"{len(self.findings) or 'No'} {'finding' if len(self.findings) == 1 else 'findings'}"
        lines = [
            f"{count} in {len(self.checks)} replayed batches.",
            *(f"  {finding.name}: {finding.sentence}" for finding in (*self.findings, *self.non_finite)),
            *(f"  possible cause: {cause}" for cause in self.likely_causes()),
            *(f"  note: {note}" for note in self.notes),
            *(f"  not covered: {gap}" for gap in self.not_covered),
        ]
        return "\n".join(lines)

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
