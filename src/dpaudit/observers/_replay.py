"""Replay of a training step from its examples: same randomness, one example changed, everything compared.

:func:`compare_neighbors` runs a step on a batch and on its neighbors. A neighbor gets the release of the
first run in place of its own, so that what still differs after it depends on the example in another way.
It also runs two steps, of which one has a neighboring batch: the second one shows what an example leaves
behind, and faults that need a history. No check needs statistics.

A :class:`ReplayedStep` is what a library knows of its step: at least the release, and if it can be observed,
the sum before the noise, the gradients and the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from dpaudit.diagnostics import Finding, finding_kinds
from dpaudit.errors import InputError, first_line
from dpaudit.observers._neighbors import Neighbor, exchanged, neighbors_of, other_batches
from dpaudit.observers._replay_result import (
    RELATIVE_ROUNDING,
    ULPS,
    NeighborCheck,
    ReleaseTrace,
    ReplayedStep,
    ReplayResult,
    StepTrace,
    noise_difference,
    norm,
    release_rounding,
    unmatched_rows,
)

# what differs anyway if an earlier part of the same update does
_CONSEQUENCES = {
    "divisor": {"gradient-after-noise", "hyperparameters", "optimizer-state", "weights", "other-state"},
    "gradient-after-noise": {"optimizer-state", "weights", "other-state"},
    "hyperparameters": {"weights", "other-state"},
    "optimizer-state": {"weights", "other-state"},
    "weights": {"other-state"},
}
_STATES = {
    "gradient-after-noise": "The gradient of the update",
    "hyperparameters": "A setting of the optimizer",
    "optimizer-state": "The state of the optimizer",
    "buffers": "A buffer of the model",
    "weights": "A weight",
    "other-state": "A state that the step writes",
}


def compare_neighbors(
    step: ReplayedStep, batch: Any, neighbors: Iterable[Neighbor] | None = None, *, padding: Any = None
) -> ReplayResult:
    """Run the step on the batch and on its neighbors, and return what differs.

    A batch whose ``neighbors`` are given may be of any type; otherwise they are made from its arrays.
    """
    first = step.run(batch, None)
    _require_repeatable(step, first, step.run(batch, None))
    # random numbers follow the order of the examples, which the step may determine itself
    is_ordered = first.uses_randomness and step.run(exchanged(batch), first).has_rows_of(first)
    comparison = _Comparison(step, first, is_ordered)
    usual = []
    for neighbor in neighbors_of(batch, padding=padding) if neighbors is None else neighbors:
        comparison.add_neighbor(neighbor, comparison.run(neighbor.batch))
        if neighbor.is_finite and not neighbor.is_variant:
            usual.append(neighbor)
    comparison.require_effect()
    for condition, other in other_batches(batch) if neighbors is None else ():
        changed = comparison.with_first(first)
        changed.add_batch(condition, changed.run(other))
        comparison.add_findings(changed)
    if step.can_vary:
        _compare_unclipped(comparison, batch, usual)
        _compare_pairs(comparison, batch, usual)
    comparison.add_again(step.run(batch, None))
    return comparison.result()


def _compare_unclipped(
    comparison: _Comparison, batch: Any, neighbors: list[Neighbor], factor: float = 1000.0
) -> None:
    """Compare the noise at ``factor`` times the clipping norm, at which no gradient is clipped."""
    unclipped = comparison.with_first(comparison.step.run(batch, None, norm_factor=factor))
    for neighbor in neighbors:
        run = unclipped.run(neighbor.batch, norm_factor=factor)
        unclipped.add_noise(f"if the clipping norm is large and one example is {neighbor.change}", run)
    comparison.add_findings(unclipped)


def _compare_pairs(comparison: _Comparison, batch: Any, neighbors: list[Neighbor]) -> None:
    """Run two steps, and change an example of the first or of the second one."""
    pair = comparison.step.run(batch, None, next_batch=batch)
    if pair.error is not None:
        comparison.add_failed_pair(pair.error)
        return
    second, after = comparison.with_first(pair), comparison.with_first(pair)
    num_releases = len(comparison.first.releases)
    for neighbor in neighbors:
        second.add_neighbor(neighbor, second.run(batch, next_batch=neighbor.batch))
        after.add_next(neighbor, after.run(neighbor.batch, next_batch=batch), num_releases)
    comparison.add_later(second, after)


def _require_repeatable(step: ReplayedStep, first: StepTrace, second: StepTrace) -> None:
    """Raise if the step cannot be compared: it fails, releases nothing, or differs when it is repeated."""
    for trace in (first, second):
        if trace.error is not None:
            raise trace.error
    if not first.releases:
        raise InputError(
            "step(batch) added no noise. Does it call the private optimizer or privatizer that was passed?"
        )
    if not first.is_finite:
        raise InputError("The release of this batch is infinite or NaN; pass a batch with a finite release.")
    _require_same(step, first, second)
    # what differs anyway, such as a time
    shared = first.attributes.items() & second.attributes.items()
    first.attributes = {name: digest for name, digest in first.attributes.items() if (name, digest) in shared}


def _require_same(step: ReplayedStep, first: StepTrace, second: StepTrace) -> None:
    """Raise if two runs on the same batch differ, because the step keeps a state that is not restored."""
    difference = first.difference(second)
    if difference is not None:
        raise InputError(
            f"Two runs of the step on the same batch must agree bit for bit, got {difference}: "
            f"{step.how_to_repeat}; let it read no data but its batch."
        )


class _Comparison:
    """The differences between the first run and the others."""

    def __init__(self, step: ReplayedStep, first: StepTrace, is_ordered: bool = False) -> None:
        self.step, self.first, self._is_ordered = step, first, is_ordered
        self._checks: list[NeighborCheck] = []
        self._findings: dict[str, Finding] = {}
        self._non_finite: Finding | None = None
        self._not_covered: dict[str, None] = {}
        self._has_effect = False
        self._varies = False  # whether the factor of the sum depends on more than the number of examples
        self._divisor: str | None = None
        self._attributes: dict[str, None] = {}  # of the model, that depend on examples
        self._repeat: Callable[[], None] | None = None  # the last run, which a finding needs twice
        if step.must_clip and any(release.rows is None for release in first.releases):
            sentence = "The step releases a gradient without clipping that of any example."
            self._keep(Finding.certain("missing-clipping", sentence))

    def run(self, batch: Any, **options: Any) -> StepTrace:
        """Run the step with the randomness and the releases of the first run."""
        trace = self.step.run(batch, self.first, **options)

        def repeat() -> None:
            _require_same(self.step, trace, self.step.run(batch, self.first, **options))

        self._repeat = repeat if self.step.can_vary else None
        return trace

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
        text = f"{type(error).__name__} if one example is {neighbor.change}: {first_line(error)}."
        if not neighbor.is_finite:
            self._add_non_finite(f"The step raises {text}")
        elif neighbor.is_natural and (self.step.accepts_any_size or not neighbor.is_resized):
            self._add("failing-step", f"The step raises {text}", math.nan, neighbor)
        else:
            self._not_covered[f"the step raised {text}"] = None

    def _add_finite(self, neighbor: Neighbor, run: StepTrace, allowed: float) -> float:
        releases, count = self.first.releases, len(run.releases)
        if [release.noisy.size for release in run.releases] != [release.noisy.size for release in releases]:
            differs = "in another order" if count == len(releases) else f"instead of {len(releases)}"
            sentence = f"The step makes {count} releases {differs} if one example is {neighbor.change}."
            self._add("release-count", sentence, count, neighbor)
            return math.nan
        self._add_state(neighbor, run)
        if neighbor.is_finite:
            self.add_noise(f"if one example is {neighbor.change}", run)
        obstacle = self._obstacle(neighbor, run)
        if obstacle is not None:
            self._not_covered[obstacle] = None
            self._has_effect |= self._is_ordered
            return math.nan
        for first, second in zip(releases, run.releases, strict=True):
            self._add_rows(neighbor, first, second)
        return self._add_distance(neighbor, run, allowed)

    def _obstacle(self, neighbor: Neighbor, run: StepTrace) -> str | None:
        """Return why neither gradients nor releases can be compared, None if they can."""
        only_replaced = "the release was compared only for replaced examples"
        if self._is_ordered:
            return (
                "the step orders its examples by their content, and its model uses randomness such as "
                "dropout, which follows the order: neither gradients nor releases were compared"
            )
        if neighbor.is_resized and self.first.uses_randomness:
            return (
                "the model uses randomness such as dropout, which depends on the number of examples: "
                f"{only_replaced}"
            )
        if run.has_same_randomness:
            return None
        if neighbor.is_resized:
            return (
                "gradients of unchanged examples depend on the number of examples, as with random masks for "
                f"the whole batch: {only_replaced}"
            )
        return (
            f"random numbers depend on the data if one example is {neighbor.change}: its release was not "
            "compared"
        )

    def _add_distance(self, neighbor: Neighbor, run: StepTrace, allowed: float) -> float:
        largest = 0.0
        for first, second in zip(self.first.releases, run.releases, strict=True):
            moved = norm(second.noisy - first.noisy)
            self._has_effect |= moved > 0
            largest = max(largest, moved / first.unit)
            rounding = release_rounding(first, second) + ULPS * first.eps * allowed * first.unit
            if moved > allowed * first.unit * (1 + RELATIVE_ROUNDING) + rounding:
                self._add(
                    "sensitivity",
                    f"The release moves by {moved / first.unit:.4g} clipping norms if one example is "
                    f"{neighbor.change}, more than the {allowed:g} allowed.",
                    moved / first.unit,
                    neighbor,
                )
            self._add_factor(neighbor, first, second)
        return largest

    def _add_factor(self, neighbor: Neighbor, first: ReleaseTrace, second: ReleaseTrace) -> None:
        if first.factor is None or second.factor is None or first.factor == 0:
            return
        if abs(second.factor / first.factor - 1) <= RELATIVE_ROUNDING + ULPS * first.eps:
            return
        if neighbor.is_resized:
            self._divisor = (
                f"The sum is scaled by {second.factor:.4g} instead of {first.factor:.4g} if one example is "
                f"{neighbor.change}."
            )
        else:
            self._varies = True

    def add_noise(self, condition: str, run: StepTrace) -> None:
        """Compare the noise of two runs, whose sums may differ in any way."""
        if run.error is not None or not run.is_finite:
            return
        for first, second in zip(self.first.releases, run.releases, strict=False):
            difference = noise_difference(first, second)
            if difference is not None:
                sentence = f"The noise from the same random numbers {difference[0]} {condition}."
                self._keep(Finding.certain("batch-dependent-noise", sentence, difference[1]))

    def add_batch(self, condition: str, run: StepTrace) -> None:
        """Compare the run of another batch: with the same release, everything after it is the same, too."""
        self.add_noise(f"if {condition}", run)
        if run.error is None and run.is_finite and len(run.releases) == len(self.first.releases):
            self._add_state(Neighbor(change=condition, batch=None), run, f"if {condition}")

    def add_next(self, neighbor: Neighbor, run: StepTrace, start: int) -> None:
        """Compare the step after the one whose batch was changed, which made ``start`` releases."""
        releases = self.first.releases
        if run.error is not None or not run.is_finite or len(run.releases) != len(releases):
            return  # a single step shows it
        self._add_state(neighbor, run, "with an example of the step before changed")
        for first, second in zip(releases[start:], run.releases[start:], strict=True):
            moved = norm(second.noisy - first.noisy)
            if moved > release_rounding(first, second):
                self._add(
                    "next-release",
                    f"The release of the next step moves by {moved / first.unit:.4g} clipping norms if one "
                    f"example of this step is {neighbor.change}, although this release is the same.",
                    moved / first.unit,
                    neighbor,
                )

    def add_findings(self, other: _Comparison) -> None:
        """Add what another comparison of the same step showed."""
        for name, finding in other._findings.items():
            if name == "batch-dependent-noise":
                self._keep(finding)
            else:
                self._findings.setdefault(name, finding)

    def add_later(self, second: _Comparison, after: _Comparison) -> None:
        """Add what only the second of two steps showed: if its example changed, or one of the first."""
        for name, finding in second._findings.items():
            sentence = f"{finding.sentence.rstrip('.')}, in the second of two steps."
            self._findings.setdefault(name, replace(finding, sentence=sentence))
        if any(name == "divisor" or name in _STATES for name in self._findings):
            after._findings.pop("next-release", None)  # a consequence
        for name, finding in after._findings.items():
            self._findings.setdefault(name, finding)

    def add_again(self, run: StepTrace) -> None:
        """Compare a run on the same batch after those on its neighbors, from which nothing may be left."""
        if self.step.can_vary:
            _require_same(self.step, self.first, run)
        elif run.error is not None or self.first.difference(run) is not None:
            sentence = (
                "The same step on the same batch differs after steps on other batches: it keeps data outside "
                "of its state."
            )
            self._keep(Finding.certain("next-release", sentence))

    def add_failed_pair(self, error: Exception) -> None:
        """Note that a second step cannot be compared."""
        text = f"{type(error).__name__}: {first_line(error)}."
        self._not_covered[f"what one step leaves to the next: a second call of the step raised {text}"] = None

    def with_first(self, first: StepTrace) -> _Comparison:
        """Return a comparison with another first run of the same step, without any finding."""
        return _Comparison(self.step, first, self._is_ordered)

    def _add_rows(self, neighbor: Neighbor, first: ReleaseTrace, second: ReleaseTrace) -> None:
        """Compare the gradients as sets, because a step may sort or split its examples by their content."""
        if first.rows is None or second.rows is None:
            return
        eps = max(first.row_eps, second.row_eps) if neighbor.is_resized else 0.0
        lost, new = unmatched_rows(first.rows, second.rows, eps)
        count, num_exchanged = max(lost, new), min(lost, new)
        num_others = num_exchanged if neighbor.is_resized else count - 1
        is_repeated = len(first.rows) > self.step.num_examples or num_others == 0
        if count <= 1 and num_others <= 0:
            return
        if is_repeated:
            sentence = f"The clipped gradients of {count} rows change if one example is {neighbor.change}."
            self._add("rows-per-example", sentence, count, neighbor)
            return
        changes = f"gradients of {num_others} other examples change"
        if num_others == 1:
            changes = "gradient of another example changes"
        sentence = f"The {changes} if one example is {neighbor.change}."
        self._add("coupled-examples", sentence, num_others, neighbor)

    def _add_state(
        self, neighbor: Neighbor, run: StepTrace, condition: str = "with one example changed"
    ) -> None:
        """Compare digests of everything that the step wrote."""
        changed: dict[str, list[str]] = {}
        for kind, name in {**self.first.state, **run.state}:
            if run.state.get((kind, name)) != self.first.state.get((kind, name)):
                changed.setdefault(kind, []).append(name)
        if neighbor.is_finite:
            pairs = self.first.attributes.items()
            self._attributes |= {name: None for name, text in pairs if run.attributes.get(name) != text}
        hidden = set().union(*(_CONSEQUENCES.get(kind, set()) for kind in changed))
        for kind, names in changed.items():
            if kind == "divisor":
                before, after = (trace.state.get((kind, names[0])) for trace in (self.first, run))
                sentence = f"The noisy sum is divided by {after} instead of {before} {condition}."
            elif kind not in hidden:
                fact = f"{_STATES[kind]} changes {condition}, although the release is the same"
                sentence = f"{fact}: {_listed(names)}."
            else:
                continue
            self._add(kind, sentence, len(names), neighbor)

    def _add(self, name: str, sentence: str, estimate: float, neighbor: Neighbor) -> None:
        if neighbor.is_finite:
            self._keep(Finding.certain(name, sentence, estimate))
        else:
            self._add_non_finite(sentence)

    def _add_non_finite(self, sentence: str) -> None:
        if self._non_finite is None:
            text = f"{sentence.rstrip('.')}: this reveals an example if it can have a non-finite gradient."
            self._non_finite = Finding.certain("non-finite-example", text)

    def _keep(self, finding: Finding) -> None:
        """Keep the largest of the findings with one name, after the run that shows it was repeated."""
        earlier = self._findings.get(finding.name)
        if earlier is None or finding.estimate > earlier.estimate:
            self._findings[finding.name] = finding
            if self._repeat is not None:
                self._repeat()
                self._repeat = None

    def require_effect(self) -> None:
        """Raise if no neighbor changed any release."""
        if not self._has_effect and not self._findings:
            raise InputError(
                "No change of an example changed the release of step(batch). Does the step read from a "
                "loader of its own?"
            )

    def result(self) -> ReplayResult:
        """Return all findings, causes before consequences."""
        if self._divisor is not None and not self._varies:
            self._findings.setdefault("divisor", Finding.certain("divisor", self._divisor))
        note = (
            f"What the step writes to {_listed(list(self._attributes))} depends on the examples without "
            "noise: publish neither it nor what is computed from it."
        )
        return ReplayResult(
            checks=tuple(self._checks),
            findings=tuple(self._findings[name] for name in finding_kinds() if name in self._findings),
            non_finite=() if self._non_finite is None else (self._non_finite,),
            notes=(note,) if self._attributes else (),
            not_covered=(
                "one batch and neighbors of it were replayed: a fault that only other examples trigger is "
                "not detected",
                *self.step.not_covered,
                *self._not_covered,
            ),
            tests_coupling=self.step.observes_rows,
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
