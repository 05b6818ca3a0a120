"""What an observer saw of one release: the value that every check reads, whatever library trains the model.

An observer fills the fields that its library gives and leaves the others out. A check says itself what it
cannot test without a field (:func:`missing_fields`), so that no observer lists it by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dpaudit._types import FloatArray, IntArray
from dpaudit.diagnostics._p_values import CheckResults

Leaves = Mapping[str, int] | Sequence[int]
"""The sizes of the parameters that a gradient consists of, in order, with their names if they have any."""
MAX_SAMPLED = 1024  # coordinates that an observer reads, which takes a few microseconds per step

# what no check can test without a field, whatever the training run is
UNTESTED_WITHOUT = {
    "noise": "the noise",
    "total": "noise that depends on the sum, or contains a part of an earlier one",
    "weights": "noise that contains a penalty of the weights",
    "sum_norm": "noise that depends on the norm of the sum",
    "num_rows": "noise that depends on the size of the batch",
    "max_row_norm": "noise that depends on the largest gradient of the batch",
    "example_sum_norm": "sums that are longer than their clipped rows allow",
    "batch": "how batches are drawn",
}


class NoiseMaximum(NamedTuple):
    """The largest absolute noise of a step, and the number of coordinates that it is the largest of."""

    value: float
    num_coordinates: float


class SumChange(NamedTuple):
    """The norm of a sum before and after it changed between clipping and noise, in clipping norms.

    ``is_scaled`` means that all its parts changed by the same factor.
    """

    before: float
    after: float
    is_scaled: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class ObservedStep:
    """What was seen of one release, in clipping norms; a field that is None was not seen.

    Vectors hold the same sampled coordinates of the model in every step. ``scores`` are projections of the
    release onto each canary, 0 on average if it is absent and 1 if it is ``present``.

    >>> step = ObservedStep(noise=np.array([0.3, -0.1]), num_rows=12, noise_multiplier=1.0)
    >>> step.given
    ('noise', 'num_rows', 'noise_multiplier')
    """

    scores: Any = None
    present: Any = None
    lengths: FloatArray | None = None
    """The lengths of the clipped canaries, if they are not known before the first step."""
    noise: Any = None
    """The release minus the sum before the noise."""
    noise_apart: Any = None
    """The same with other noise along the present canaries, whatever is left of them in the release."""
    leaves: Leaves | None = None
    """How many of the coordinates belong to each parameter tensor, by name if names are known."""
    total: Any = None
    """The sum before the noise, with the canaries."""
    examples: Any = None
    """The same without canaries, which may be much longer than examples."""
    released: Any = None
    """The release exactly as it was returned, in its own units: its numbers show its precision."""
    release_unit: float | None = None
    """What 1 in ``released`` is in clipping norms."""
    weights: Any = None
    """The weights before the step, in their own units."""
    eps: Any = None
    """The relative precision of the sums; one number, or one per coordinate."""
    rounding: float = 0.0
    """The largest rounding error of the noise."""
    max_noise: NoiseMaximum | None = None
    """The largest noise over all coordinates of the model, if the vectors hold only some of them."""
    sum_norm: float | None = None
    """The norm of the sum before the noise."""
    num_rows: float | None = None
    """The number of rows that were clipped."""
    has_padding: bool = False
    """Whether these rows may include rows of zeros that are no examples."""
    max_row_norm: float | None = None
    """The norm of the longest row before clipping."""
    num_canaries: float | None = None
    """The number of present canaries."""
    noise_multiplier: float | None = None
    """The noise multiplier that the step states, which may follow a public schedule."""
    clipping_norm: float = 1.0
    """The clipping norm, in the units of the gradients."""
    example_sum_norm: float | None = None
    """The norm of the sum of the examples."""
    sum_limit: float | None = None
    """The largest norm that the clipped rows allow; by default, their number."""
    sum_excess: float | None = None
    """The largest ratio of a norm to its limit, if parts of the sum have limits of their own."""
    row_limit: float | None = None
    """The largest norm to which rows of the sum were clipped, which must not exceed 1."""
    sum_changes: tuple[SumChange, ...] = ()
    """Changes of the sum after its rows were added."""
    sum_remainder: float = 0.0
    """What was left of the previous sum when this one began."""
    changed_weights: tuple[str, ...] | None = None
    """Names of parameters that changed between the previous update and this release, which should be none."""
    follows_release: bool | None = None
    """Whether the update is the same with other sums before the noise; None if it was not repeated."""
    batch: IntArray | None = None
    """The indices of the examples in the data set."""
    num_examples: int | None = None
    """The size of the data set."""
    row_digests: Any = None
    """A number for each example of the batch that recognizes it, if its index is unknown."""

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the fields that were seen."""
        return tuple(item.name for item in fields(self) if _is_given(getattr(self, item.name), item.default))

    @classmethod
    def of_release(
        cls,
        released: Any,
        total: Any,
        *,
        clipping_norm: float = 1.0,
        divisor: float = 1.0,
        eps: float = 0.0,
        examples: Any = None,
        **more: Any,
    ) -> ObservedStep:
        """Describe a release by sums in the units of the gradients.

        ``released`` is the noisy sum divided by ``divisor``, ``total`` the sum before the noise with its
        canaries, ``examples`` the same without them; ``eps`` is the relative precision of these numbers. The
        other keywords are fields.
        """
        raw, sums = np.asarray(released, dtype=np.float64), np.asarray(total, dtype=np.float64)
        more.setdefault("sum_norm", float(np.linalg.norm(sums)) / clipping_norm)
        ulps = 8.0  # rounding error of a difference of two sums, in last places of the largest number
        return cls(
            noise=(divisor * raw - sums) / clipping_norm,
            total=sums / clipping_norm,
            examples=None if examples is None else np.asarray(examples, dtype=np.float64) / clipping_norm,
            released=raw,
            release_unit=divisor / clipping_norm,
            eps=eps,
            rounding=ulps * eps * float(np.abs(sums).max(initial=0.0)) / clipping_norm,
            clipping_norm=clipping_norm,
            **more,
        )

    @staticmethod
    def accumulated(releases: Sequence[ObservedStep]) -> ObservedStep:
        """Return the step whose noisy sum several releases add up to; its canaries are those of the first."""
        first = releases[0]
        if len(releases) == 1:
            return first

        def combined(name: str, combine: Callable[..., Any]) -> Any:
            values = [getattr(release, name) for release in releases]
            return None if any(value is None for value in values) else combine(values)

        vectors = ("scores", "noise", "total", "examples", "released")
        sums = (*vectors, "num_rows", "example_sum_norm", "sum_limit")
        return replace(
            first,
            **{name: combined(name, sum) for name in sums},
            max_row_norm=combined("max_row_norm", max),
            row_limit=combined("row_limit", max),
            row_digests=combined("row_digests", np.concatenate),
            has_padding=any(release.has_padding for release in releases),
            sum_excess=max(map(_sum_excess, releases)),
            sum_norm=None,  # norms and maxima of several releases do not add up
            max_noise=None,
            rounding=sum(release.rounding for release in releases),
        )


def _sum_excess(release: ObservedStep) -> float:
    """Return the ratio of the norm of a sum to the largest that its rows allow."""
    if release.sum_excess is not None:
        return release.sum_excess
    norm, limit = release.example_sum_norm, release.sum_limit
    return 0.0 if norm is None or limit is None else norm / max(limit, 1e-3)


def _is_given(value: Any, default: Any) -> bool:
    return value is not None and value is not default and not (isinstance(value, tuple) and not value)


def missing_fields(given: Iterable[str], needed: Iterable[str]) -> tuple[str, ...]:
    """Return a sentence for each missing field that says what is not tested without it."""
    seen = set(given)
    return tuple(UNTESTED_WITHOUT[name] for name in needed if name not in seen)


@dataclass(frozen=True, eq=False)
class CoordinateSample:
    """Coordinates whose noise is logged: all for a small model, the same ones of each leaf for a large model.

    The sample includes the first coordinates of each leaf (one parameter tensor), where an RNG that is
    reseeded for each leaf repeats its noise, and some at growing distances.
    """

    indices: IntArray
    leaves: tuple[int, ...]
    """The number of coordinates in each leaf."""

    @classmethod
    def of(cls, sizes: Sequence[int]) -> CoordinateSample:
        """Choose from the concatenation of leaves with these sizes."""
        offsets = np.cumsum([0, *sizes])[:-1]
        if sum(sizes) <= MAX_SAMPLED:
            return cls(np.arange(sum(sizes)), tuple(sizes))
        inside = _inside(max(1, MAX_SAMPLED // len(sizes)), max(sizes))
        num_chosen = min(len(sizes), MAX_SAMPLED)
        chosen = np.unique(np.linspace(0, len(sizes) - 1, num_chosen).astype(np.int64))
        coordinates = [offsets[leaf] + inside[inside < sizes[leaf]] for leaf in chosen]
        return cls(np.concatenate(coordinates), tuple(inside.size for inside in coordinates))

    def named(self, names: Sequence[str]) -> Leaves:
        """Return the number of coordinates in each leaf, by name if each leaf has one of its own."""
        is_named = len(names) == len(set(names)) == len(self.leaves)
        return dict(zip(names, self.leaves, strict=True)) if is_named else self.leaves


def _inside(count: int, size: int) -> IntArray:
    """Choose coordinates within a leaf: half at its beginning, the others at growing distances."""
    first = np.arange(-(-count // 2))
    rest = np.geomspace(first.size, max(size - 1, first.size), count - first.size)
    return np.unique(np.concatenate([first, rest.astype(np.int64)]))


@dataclass(frozen=True, kw_only=True)
class ClaimedStep:
    """The claimed numbers that checks compare steps with, and the confidence of all checks together."""

    noise_multiplier: float
    sample_rate: float | None = None
    confidence: float = 0.95
    has_signal: Callable[[], bool] = lambda: True
    """Whether canaries score as expected."""
    claim: Any = None
    """The whole claim, for a check that compares it with the settings of a training run."""


class RunCheck(Protocol):
    """A check of a training run, such as one of its settings."""

    def results(self, claimed: ClaimedStep) -> CheckResults:
        """Return what the run so far shows."""


@runtime_checkable
class StepCheck(RunCheck, Protocol):
    """A check of the steps of a run. It has state, so that a resumed run keeps its tests."""

    def observe(self, step: ObservedStep) -> None:
        """Add the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain values, for ``load_state_dict``."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a ``state_dict``."""
