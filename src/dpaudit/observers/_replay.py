"""Replay of a training step from its examples: same randomness, one example changed, everything compared.

:func:`compare_neighbors` runs a step on a batch and on its neighbors. A neighbor gets the release of the
first run in place of its own, so that what still differs after it depends on the example in another way.
It also runs two steps, of which one has a neighboring batch: the second one shows what an example leaves
behind, and faults that need a history. No check needs statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from dpaudit.diagnostics import Finding
from dpaudit.errors import InputError
from dpaudit.observers._neighbors import REPLACED, Neighbor, exchanged, neighbors, other_batches
from dpaudit.observers._replay_result import (
    ROUNDING,
    UNITS,
    NeighborCheck,
    ReleaseTrace,
    ReplayedStep,
    ReplayResult,
    StepTrace,
    dot,
    norm,
    rounding_of,
    unmatched_rows,
)

_LARGER_NORM = 1000.0  # factor of the clipping norm at which gradients are not clipped
_NON_FINITE = "non-finite-example"
_SAME_LENGTH = 0.2  # share of the length in a change of the noise that is mainly one of its direction
# causes before their consequences
_ORDER = (
    "failing-step",
    "release-count",
    "missing-clipping",
    "rows-per-example",
    "coupled-examples",
    "batch-dependent-noise",
    "divisor",
    "sensitivity",
    "gradient-after-noise",
    "hyperparameters",
    "optimizer-state",
    "buffers",
    "weights",
    "other-state",
    "next-release",
)
# what differs anyway if an earlier part of the same update does
_CONSEQUENCES = {
    "divisor": {"gradient-after-noise", "hyperparameters", "optimizer-state", "weights", "other-state"},
    "gradient-after-noise": {"optimizer-state", "weights", "other-state"},
    "hyperparameters": {"weights", "other-state"},
    "optimizer-state": {"weights", "other-state"},
    "weights": {"other-state"},
}
_SAME_RELEASE = "with one example changed, although the release is the same"
_STATE_SENTENCES = {
    "divisor": "The noisy sum is divided by {what} with one example changed.",
    "gradient-after-noise": f"The gradient of the update changes {_SAME_RELEASE}: {{what}}.",
    "hyperparameters": f"A setting of the optimizer changes {_SAME_RELEASE}: {{what}}.",
    "optimizer-state": f"The state of the optimizer changes {_SAME_RELEASE}: {{what}}.",
    "buffers": f"A buffer of the model changes {_SAME_RELEASE}: {{what}}.",
    "weights": f"A weight changes {_SAME_RELEASE}: {{what}}.",
    "other-state": f"A state that the step writes changes {_SAME_RELEASE}: {{what}}.",
}
_RESIZED = (
    "the model uses randomness such as dropout, which depends on the number of examples: the release was "
    "compared only for replaced examples"
)
_DIFFERENT = (
    "gradients of unchanged examples depend on the number of examples, as with random masks for the whole "
    "batch: the release was compared only for replaced examples"
)
_ORDERED = (
    "the step orders its examples by their content, and its model uses randomness such as dropout, which "
    "follows the order: neither gradients nor releases were compared"
)
_RANDOM = "random numbers depend on the data if one example is {}: its release was not compared"


def compare_neighbors(step: ReplayedStep, batch: Any, *, padding: Any = None) -> ReplayResult:
    """Run the step on the batch and on its neighbors, and return what differs."""
    first = step.run(batch, None)
    _require_repeatable(step, first, step.run(batch, None))
    # random numbers follow the order of the examples, which the step may determine itself
    is_ordered = first.uses_randomness and step.run(exchanged(batch), first).has_rows_of(first)
    found = _Comparison(step, first, is_ordered)
    tried = []
    for neighbor in neighbors(batch, padding=padding):
        found.add_neighbor(neighbor, step.run(neighbor.batch, first))
        if neighbor.is_finite and not neighbor.is_variant:
            tried.append(neighbor)
    found.require_effect()
    for condition, other in other_batches(batch):
        found.add_batch(condition, other, step.run(other, first))
    if step.can_vary:
        free = step.run(batch, None, norm_factor=_LARGER_NORM)
        for neighbor in tried:
            run = step.run(neighbor.batch, free, norm_factor=_LARGER_NORM)
            found.add_noise(f"if the clipping norm is large and one example is {neighbor.change}", free, run)
        _compare_pairs(step, batch, tried, found)
    else:
        found.add_again(step.run(batch, None))
    return found.result()


def _compare_pairs(step: ReplayedStep, batch: Any, tried: list[Neighbor], found: _Comparison) -> None:
    """Run two steps, and change an example of the first or of the second one."""
    pair = step.run(batch, None, next_batch=batch)
    if pair.error is not None:
        found.add_failed_pair(pair.error)
        return
    second, after = found.with_first(pair), found.with_first(pair)
    for neighbor in tried:
        second.add_neighbor(neighbor, step.run(batch, pair, next_batch=neighbor.batch))
        after.add_next(neighbor, step.run(neighbor.batch, pair, next_batch=batch), found.num_releases)
    found.add_later(second, after)


def _require_repeatable(step: ReplayedStep, first: StepTrace, second: StepTrace) -> None:
    for trace in (first, second):
        if trace.error is not None:
            raise trace.error
    if not first.releases:
        raise InputError(
            "Expected step(batch) to release a noisy gradient, but it added no noise: does it call the "
            "private optimizer or privatizer that was passed?"
        )
    if not first.is_finite:
        raise InputError("Expected a batch with a finite release, got one that is infinite or NaN.")
    different = [name for key, name in first.state if first.state[key, name] != second.state.get((key, name))]
    pairs = zip(first.releases, second.releases, strict=False)
    is_same = len(first.releases) == len(second.releases) and all(
        np.array_equal(one.noisy, two.noisy) for one, two in pairs
    )
    if not is_same or different:
        what = "other releases" if not is_same else f"another state ({different[0]})"
        raise InputError(
            f"Expected two runs of the step on the same batch to agree bit for bit, got {what}: "
            f"{step.how_to_repeat}; let it read no data but its batch."
        )
    # what differs anyway, such as a time
    first.written = {name: one for name, one in first.written.items() if second.written.get(name) == one}


class _Comparison:
    """The differences between the first run and the others."""

    def __init__(self, step: ReplayedStep, first: StepTrace, is_ordered: bool = False) -> None:
        self._step, self._first, self._is_ordered = step, first, is_ordered
        self._checks: list[NeighborCheck] = []
        self._findings: dict[str, Finding] = {}
        self._non_finite: dict[str, Finding] = {}
        self._not_covered: dict[str, None] = {}
        self._has_effect = False
        self._varies = False  # whether the factor of the sum depends on more than the number of examples
        self._divisor: str | None = None
        self._written: dict[str, None] = {}  # variables that depend on examples
        if step.must_clip and any(release.rows is None for release in first.releases):
            sentence = "The step releases a gradient without clipping that of any example."
            self._keep(self._findings, "missing-clipping", sentence, math.nan)

    def add_neighbor(self, neighbor: Neighbor, run: StepTrace) -> None:
        """Compare the run of a neighbor."""
        allowed = 1.0 if neighbor.is_resized else 2.0
        distance = math.nan
        if run.error is not None:
            self._add_error(neighbor, run.error)
        elif not run.is_finite:
            self._add_non_finite(f"The release is not finite if one example is {neighbor.change}.")
            self._has_effect = True
        else:
            distance = self._add_finite(neighbor, run, allowed)
        self._checks.append(NeighborCheck(change=neighbor.change, distance=distance, allowed=allowed))

    def _add_error(self, neighbor: Neighbor, error: Exception) -> None:
        text = f"{type(error).__name__} if one example is {neighbor.change}: {_first_line(error)}"
        if not neighbor.is_finite:
            self._add_non_finite(f"The step raises {text}")
        elif neighbor.is_natural and (self._step.accepts_any_size or not neighbor.is_resized):
            self._add("failing-step", f"The step raises {text}", math.nan, neighbor)
        else:
            self._not_covered[f"the step raised {text}"] = None

    def _add_finite(self, neighbor: Neighbor, run: StepTrace, allowed: float) -> float:
        first = self._first
        if [one.noisy.size for one in run.releases] != [one.noisy.size for one in first.releases]:
            count = len(run.releases)
            differs = (
                "in another order" if count == len(first.releases) else f"instead of {len(first.releases)}"
            )
            self._add(
                "release-count",
                f"The step makes {count} releases {differs} if one example is {neighbor.change}.",
                len(run.releases),
                neighbor,
            )
            return math.nan
        self._add_state(neighbor, run)
        if neighbor.is_finite:
            self.add_noise(f"if one example is {neighbor.change}", first, run)
        obstacle = self._obstacle(neighbor, run)
        if obstacle is not None:
            self._not_covered[obstacle] = None
            self._has_effect |= self._is_ordered
            return math.nan
        for one, two in zip(first.releases, run.releases, strict=True):
            if one.rows is not None and two.rows is not None:
                self._add_rows(neighbor, one, two)
        return self._add_distance(neighbor, run, allowed)

    def _obstacle(self, neighbor: Neighbor, run: StepTrace) -> str | None:
        """Return why neither gradients nor releases can be compared, None if they can."""
        if self._is_ordered:
            return _ORDERED
        if neighbor.is_resized and self._first.uses_randomness:
            return _RESIZED
        if run.has_same_randomness:
            return None
        return _DIFFERENT if neighbor.is_resized else _RANDOM.format(neighbor.change)

    def _add_distance(self, neighbor: Neighbor, run: StepTrace, allowed: float) -> float:
        largest = 0.0
        for one, two in zip(self._first.releases, run.releases, strict=True):
            moved = norm(two.noisy - one.noisy)
            self._has_effect |= moved > 0
            largest = max(largest, moved / one.unit)
            rounding = rounding_of(one, two) + UNITS * one.eps * allowed * one.unit
            if moved > allowed * one.unit * (1 + ROUNDING) + rounding:
                self._add(
                    "sensitivity",
                    f"The release moves by {moved / one.unit:.4g} clipping norms if one example is "
                    f"{neighbor.change}, more than the {allowed:g} allowed.",
                    moved / one.unit,
                    neighbor,
                )
            self._add_factor(neighbor, one, two)
        return largest

    def _add_factor(self, neighbor: Neighbor, one: ReleaseTrace, two: ReleaseTrace) -> None:
        if one.factor is None or two.factor is None or one.factor == 0:
            return
        if abs(two.factor / one.factor - 1) <= ROUNDING + UNITS * one.eps:
            return
        sentence = (
            f"The sum is scaled by {two.factor:.4g} instead of {one.factor:.4g} if one example is "
            f"{neighbor.change}."
        )
        if neighbor.is_resized:
            self._divisor = sentence
        else:
            self._varies = True

    def add_noise(self, condition: str, first: StepTrace, run: StepTrace) -> None:
        """Compare the noise of two runs, whose sums may differ in any way."""
        if run.error is not None or not run.is_finite:
            return
        for one, two in zip(first.releases, run.releases, strict=False):
            change, totals = two.noisy - one.noisy, two.total - one.total
            length = dot(totals, totals)
            factor = dot(change, totals) / length if length > 0 else 1.0
            moved, noise = norm(change - factor * totals), norm(one.noisy - factor * one.total)
            numbers = (one.noisy, two.noisy, factor * one.total, factor * two.total)
            rounding = UNITS * one.eps * sum(map(norm, numbers))
            if moved > ROUNDING * noise + rounding:
                ratio = norm(two.noisy - factor * two.total) / noise if noise > 0 else math.inf
                size = abs(math.log(ratio)) if 0 < ratio < math.inf else math.inf
                how = f"has {ratio:.4g} of its length"
                if noise > 0 and abs(ratio - 1) <= _SAME_LENGTH * moved / noise:
                    size, how = moved / noise, f"changes its direction by {moved / noise:.4g} of its length"
                sentence = f"The noise from the same random numbers {how} {condition}."
                self._keep(self._findings, "batch-dependent-noise", sentence, size)

    def add_batch(self, condition: str, batch: Any, run: StepTrace) -> None:
        """Compare the run of another batch: with the same release, everything after it is the same, too."""
        self.add_noise(f"if {condition}", self._first, run)
        if run.error is None and run.is_finite and len(run.releases) == len(self._first.releases):
            whole = self.with_first(self._first)
            whole._add_state(Neighbor(REPLACED, condition, batch), run)
            for name, finding in whole._findings.items():
                sentence = finding.sentence.replace("with one example changed", f"if {condition}")
                self._findings.setdefault(name, replace(finding, sentence=sentence))

    def add_next(self, neighbor: Neighbor, run: StepTrace, start: int) -> None:
        """Compare the step after the one whose batch was changed, which made ``start`` releases."""
        first = self._first
        if run.error is not None or not run.is_finite or len(run.releases) != len(first.releases):
            return  # found before
        self._add_state(neighbor, run)
        for one, two in zip(first.releases[start:], run.releases[start:], strict=True):
            moved = norm(two.noisy - one.noisy)
            if moved > rounding_of(one, two):
                self._add(
                    "next-release",
                    f"The release of the next step moves by {moved / one.unit:.4g} clipping norms if one "
                    f"example of this step is {neighbor.change}, although this release is the same.",
                    moved / one.unit,
                    neighbor,
                )

    def add_later(self, second: _Comparison, after: _Comparison) -> None:
        """Add what only the second of two steps showed: if its example changed, or one of the first."""
        for name, finding in second._findings.items():
            sentence = f"{finding.sentence.rstrip('.')}, in the second of two steps."
            self._findings.setdefault(name, replace(finding, sentence=sentence))
        has_state = any(name in _STATE_SENTENCES for name in self._findings)
        for name, finding in after._findings.items():
            if name != "next-release" or not has_state:  # otherwise it is a consequence
                sentence = finding.sentence.replace(
                    "one example changed", "an example of the step before changed"
                )
                self._findings.setdefault(name, replace(finding, sentence=sentence))

    def add_again(self, run: StepTrace) -> None:
        """Compare a run on the same batch after those on its neighbors, from which nothing may be left."""
        pairs = zip(self._first.releases, run.releases, strict=False)
        is_same = run.error is None and all(np.array_equal(one.noisy, two.noisy) for one, two in pairs)
        if not is_same or run.state != self._first.state:
            sentence = (
                "The same step on the same batch differs after steps on other batches: it keeps data outside "
                "of its state."
            )
            self._keep(self._findings, "next-release", sentence, math.nan)

    def add_failed_pair(self, error: Exception) -> None:
        """Note that a second step cannot be compared."""
        text = f"{type(error).__name__}: {_first_line(error)}"
        self._not_covered[f"what one step leaves to the next: a second call of the step raised {text}"] = None

    def with_first(self, first: StepTrace) -> _Comparison:
        """Return a comparison with another first run of the same step, without any finding."""
        return _Comparison(self._step, first, self._is_ordered)

    @property
    def num_releases(self) -> int:
        """The number of releases of one step."""
        return len(self._first.releases)

    def _add_rows(self, neighbor: Neighbor, one: ReleaseTrace, two: ReleaseTrace) -> None:
        """Compare the gradients as sets, because a step may sort or split its examples by their content."""
        assert one.rows is not None and two.rows is not None  # noqa: PT018
        eps = max(one.row_eps, two.row_eps) if neighbor.is_resized else 0.0
        lost, new = unmatched_rows(one.rows, two.rows, eps)
        count = max(lost, new)
        if count <= 1 and not (neighbor.is_resized and lost and new):
            return
        if len(one.rows) > self._step.num_examples or (neighbor.is_resized and not (lost and new)):
            self._add_row_count(count, neighbor)
            return
        others = min(lost, new) if neighbor.is_resized else count - 1
        who = "gradient of another example changes"
        if others > 1:
            who = f"gradients of {others} other examples change"
        self._add("coupled-examples", f"The {who} if one example is {neighbor.change}.", others, neighbor)

    def _add_row_count(self, count: int, neighbor: Neighbor) -> None:
        self._add(
            "rows-per-example",
            f"The clipped gradients of {count} rows change if one example is {neighbor.change}.",
            count,
            neighbor,
        )

    def _add_state(self, neighbor: Neighbor, run: StepTrace) -> None:
        changed: dict[str, list[str]] = {}
        for (kind, name), digest in self._first.state.items():
            if run.state.get((kind, name)) != digest:
                changed.setdefault(kind, []).append(name)
        for kind, name in run.state.keys() - self._first.state.keys():
            changed.setdefault(kind, []).append(name)
        if neighbor.is_finite:
            differs = [name for name, one in self._first.written.items() if run.written.get(name) != one]
            self._written |= dict.fromkeys(differs)
        hidden = set().union(*(_CONSEQUENCES.get(kind, set()) for kind in changed))
        for kind, names in changed.items():
            if kind not in hidden:
                what = _listed(names)
                if kind == "divisor":
                    what = f"{run.state.get((kind, what))} instead of {self._first.state.get((kind, what))}"
                sentence = _STATE_SENTENCES[kind].format(what=what)
                self._add(kind, sentence, len(names), neighbor)

    def _add(self, name: str, sentence: str, estimate: float, neighbor: Neighbor) -> None:
        if neighbor.is_finite:
            self._keep(self._findings, name, sentence, estimate)
        else:
            self._add_non_finite(sentence)

    def _add_non_finite(self, sentence: str) -> None:
        text = f"{sentence.rstrip('.')}: this reveals an example if it can have a non-finite gradient."
        self._non_finite.setdefault(_NON_FINITE, Finding.certain(_NON_FINITE, text))

    @staticmethod
    def _keep(findings: dict[str, Finding], name: str, sentence: str, estimate: float) -> None:
        """Keep the largest of the findings with one name."""
        known = findings.get(name)
        if known is None or estimate > known.estimate:
            findings[name] = Finding.certain(name, sentence, estimate)

    def require_effect(self) -> None:
        """Raise if no neighbor changed any release."""
        if not self._has_effect and not self._findings:
            raise InputError(
                "Expected step(batch) to train on its batch, but no change of an example changed the "
                "release: does the step read from a loader of its own?"
            )

    def _notes(self) -> Iterator[str]:
        if self._written:
            names = _listed(list(self._written))
            yield (
                f"What the step writes to {names} depends on the examples without noise: publish neither it "
                "nor what is computed from it, or pass it as also=[...]."
            )

    def result(self) -> ReplayResult:
        """Return all findings, causes before consequences."""
        if self._divisor is not None and not self._varies:
            self._keep(self._findings, "divisor", self._divisor, math.nan)
        return ReplayResult(
            checks=tuple(self._checks),
            findings=tuple(sorted(self._findings.values(), key=lambda one: _ORDER.index(one.name))),
            non_finite=tuple(self._non_finite.values()),
            notes=tuple(self._notes()),
            not_covered=(
                "one batch and neighbors of it were replayed: a fault that only other examples trigger is "
                "not detected",
                *self._step.not_covered,
                *self._not_covered,
            ),
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or ["no message"])[0]
    return text if text.endswith(".") else f"{text}."
