"""Read the entries of the zoo from ``catalogue.toml``, run and judge them, and store the results.

The module of an engine holds the code of its entries by name, in ``SCENARIOS``: training runs of the native
engine in ``_native``, functions of gradients in ``_steps``, and Opacus in ``_opacus``, ``_opacus_loops`` and
``_opacus_distributed``, which are imported only when one of their entries is run. Entries of the engine
"step" name a fault of :mod:`dpaudit.zoo.faults` instead. Add new entries at the end.

Bound and tests share one error rate. The in-depth mode also compares every method with the claim and finds
the smallest sufficient number of steps.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module, metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io, _validate
from dpaudit._io import JsonCache
from dpaudit.diagnostics import Diagnosis, share_error
from dpaudit.errors import InputError, MissingExtraError
from dpaudit.methods import examine
from dpaudit.recording import Recorder
from dpaudit.stats import Fixed, Gaussian, Result, SameData, audit_recorded, plain
from dpaudit.zoo._evidence import Evidence, Scenario, Scores, checkpoints
from dpaudit.zoo._native import SCENARIOS as NATIVE
from dpaudit.zoo._steps import SCENARIOS as STEPS
from dpaudit.zoo._steps import ObservedFault


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One fault of the zoo, with a broken scenario and a correct twin."""

    name: str
    public: str
    """Where the fault was reported."""
    wrong: str
    """What was wrong, in one sentence."""
    kind: str
    """The kind of code that contains the fault."""
    scenario: Scenario
    not_caught: str | None = None
    """Why the fault is not expected to be caught; None if it is."""
    fix: str | None = None
    """How the fault is repaired, in one sentence; the twin does so."""
    family: str | None = None
    """The family of faults that the entry stands for."""
    expected: tuple[str, ...] = ()
    """What must be among the things that flag the fault: the bound, a replay, or names of findings."""

    def described(self) -> dict[str, str | None]:
        """Return the description as plain values."""
        names = "name", "public", "wrong", "kind", "not_caught", "fix", "family"
        return {name: getattr(self, name) for name in names}

    def observe(self, *, is_broken: bool, seed: int) -> Evidence:
        """Run the broken scenario or its twin, with a seed that does not depend on other entries."""
        digest = hashlib.sha256(f"{seed} {self.name}".encode()).digest()
        return self.scenario(is_broken, int.from_bytes(digest[:4], "big"))


def _lazy(engine: str, name: str) -> Scenario:
    """Return a scenario whose module is imported only when it runs."""

    def scenario(is_broken: bool, seed: int) -> Evidence:
        scenarios: Mapping[str, Scenario] = import_module(f"dpaudit.zoo._{engine}").SCENARIOS
        return scenarios[name](is_broken, seed)

    return scenario


def _entry(values: dict[str, Any]) -> Entry:
    engine, name, expected = values.pop("engine"), values["name"], tuple(values.pop("expected"))
    if engine == "step":
        scenario: Scenario = ObservedFault(**values.pop("step"))
    else:
        scenario = {"native": NATIVE, "steps": STEPS}.get(engine, {}).get(name) or _lazy(engine, name)
    return Entry(scenario=scenario, expected=expected, **values)


ENTRIES = tuple(map(_entry, tomllib.loads(_io.packaged("zoo", "catalogue.toml"))["entry"]))
ENTRIES_OF_PUBLIC_CODE = tuple(entry for entry in ENTRIES if entry.family is None)
"""Faults that were reported for public code, each observed in the way that suits it best."""
ENTRIES_FOUND_BY_TESTS = tuple(entry for entry in ENTRIES if entry.family is not None)
"""Faults that only tests of noise, sums and batches, lints or a replay reveal, with default settings."""


def run_zoo(
    entries: Sequence[Entry],
    *,
    seed: int,
    output: Path,
    watch: Callable[[int, int, str], None] = lambda *_: None,
    confidence: float = 0.95,
) -> dict[str, Any]:
    """Return the results of all entries as plain values.

    All twins of the zoo share the error rate: the probability that any of them is flagged is at most
    1 - confidence, whichever entries are run. Entries stored in ``output`` with the same seed, confidence and
    versions are reused. ``watch`` is called with the number of finished entries, the total number, and the
    name of the current entry.
    """
    twins = 1 - (1 - confidence) / max(len(entries), len(ENTRIES))
    cache, results = _finished(output, seed=seed, confidence=confidence, twin_confidence=twins), []
    with _io.locked(cache.folder):
        for number, entry in enumerate(entries):
            stored = cache.read(entry.name)
            if stored is None:
                watch(number, len(entries), entry.name)
                stored = _examined(entry, cache)
            results.append(stored)
    watch(len(entries), len(entries), "done")
    return {
        **cache.identity,
        "is_as_expected": all(result["is_as_expected"] for result in results),
        "entries": results,
    }


def _examined(entry: Entry, cache: JsonCache) -> dict[str, Any]:
    options = {name: cache.identity[name] for name in ("seed", "confidence", "twin_confidence")}
    try:
        values = examine_entry(entry, **options)
    except MissingExtraError as error:  # not stored: the extra may be installed next time
        return {**entry.described(), "left_out": str(error), "is_as_expected": True}
    cache.write(entry.name, values)
    return values


def examine_entry(
    entry: Entry, *, seed: int, confidence: float = 0.95, twin_confidence: float | None = None
) -> dict[str, Any]:
    """Judge the broken run in depth, and its correct twin at ``twin_confidence`` if given."""
    level = confidence if twin_confidence is None else twin_confidence
    broken = judge(entry.observe(is_broken=True, seed=seed), confidence=confidence, in_depth=True)
    correct = judge(entry.observe(is_broken=False, seed=seed), confidence=level)
    is_caught = bool(broken.caught_by) or entry.not_caught is not None
    return {
        **entry.described(),
        "left_out": None,
        "is_as_expected": is_caught and not correct.caught_by,
        "broken": broken.to_dict(),
        "correct": correct.to_dict(),
    }


def chosen(entries: Sequence[Entry], names: Iterable[str]) -> list[Entry]:
    """Return the entries with these names, or all entries if no names are given."""
    by_name = {entry.name: entry for entry in entries}
    wanted = dict.fromkeys(names)
    for name in wanted:
        if name not in by_name:
            hint = _validate.suggestion(name, by_name) or " List all with: dpaudit zoo --list"
            raise InputError(f"The zoo has no entry {name!r}.{hint}")
    return [by_name[name] for name in wanted] if wanted else list(entries)


def _finished(output: Path, *, seed: int, confidence: float, twin_confidence: float) -> JsonCache:
    """Return the cache of finished entries, identified by seed, confidence and versions."""
    identity = {
        "schema_version": 2,
        "seed": seed,
        "confidence": confidence,
        "twin_confidence": twin_confidence,
        **{f"{name}_version": _version(name) for name in ("dpaudit", "torch", "opacus")},
    }
    keys = {*ENTRIES[0].described(), "left_out", "is_as_expected", "broken", "correct"}
    return JsonCache(_io.expanded(output), identity, keys=keys, content="an entry of the zoo")


def _version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    if name == "dpaudit":
        return dpaudit.__version__  # the running code may be newer than the installed metadata
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def judge(evidence: Evidence, *, confidence: float = 0.95, in_depth: bool = False) -> Judged:
    """Judge a run by its bound and tests, at a joint confidence; a replay has no error.

    ``in_depth`` also compares every method with the claim and finds the smallest sufficient number of steps.
    """
    if evidence.recorder is not None:
        return _judge_record(evidence, evidence.recorder, confidence, in_depth=in_depth)
    scores, tests = evidence.scores, evidence.diagnostics
    levels = share_error(1 - confidence, has_bound=scores is not None, has_tests=bool(tests))
    results = cache(partial(_audited, evidence, confidence=levels[0]))
    diagnoses = cache(lambda num_steps: tests[num_steps].diagnose(levels[1]))
    judged = Judged(
        evidence=evidence,
        result=results(evidence.num_steps) if scores else None,
        diagnosis=diagnoses(max(tests)) if tests else None,
    )
    if not in_depth:
        return judged
    counts = scores.sufficient_counts(evidence.num_steps) if scores else []
    return replace(
        judged,
        bound_steps=_steps_needed(counts, lambda num_steps: bool(results(num_steps).refuted)),
        tests_steps=_steps_needed(tests, lambda num_steps: bool(diagnoses(num_steps).findings)),
        methods=_compare_methods(evidence, scores, counts, confidence) if scores else (),
    )


def _steps_needed(counts: Iterable[int], is_flagged: Callable[[int], bool]) -> int | None:
    """Return the smallest of these numbers of steps from which on the run is always flagged."""
    return min(takewhile(is_flagged, sorted(counts, reverse=True)), default=None)


def _judge_record(evidence: Evidence, recorder: Recorder, confidence: float, *, in_depth: bool) -> Judged:
    """Judge the record of an observer as its user would; all tests use all steps."""
    result = recorder.audit(confidence=confidence)
    judged = Judged(evidence=evidence, result=result, diagnosis=result.diagnosis)
    if not in_depth:
        return judged
    bounds = recorder.curve(checkpoints(evidence.num_steps))
    return replace(
        judged,
        bound_steps=next((bound.num_done for bound in bounds if bound.is_violation), None),
        tests_steps=evidence.num_steps if result.findings or result.to_check else None,
    )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The results of bound, tests and replay for one run.

    ``bound_steps`` and ``tests_steps`` are the smallest sufficient numbers of steps, None if there is none.
    """

    evidence: Evidence
    result: Result | None
    diagnosis: Diagnosis | None
    bound_steps: int | None = None
    tests_steps: int | None = None
    methods: tuple[MethodOutcome, ...] = ()

    @property
    def caught_by(self) -> tuple[str, ...]:
        """The names of everything that flags the run, facts to check included."""
        result, diagnosis, replay = self.result, self.diagnosis, self.evidence.replay
        names = ["bound"] if result is not None and "privacy" in result.refuted else []
        facts = () if diagnosis is None else (*diagnosis.findings, *diagnosis.to_check)
        names += [fact.name for fact in facts]
        names += ["replay"] if replay is not None and replay.is_violation else []
        return tuple(dict.fromkeys([*names, *(finding.name for finding in self.evidence.certain)]))

    @property
    def steps_needed(self) -> int | None:
        """The smallest number of steps with which anything flags the run; a replay takes one."""
        if "replay" in self.caught_by:
            return 1
        if self.evidence.certain:
            return self.evidence.num_steps
        return min((n for n in (self.bound_steps, self.tests_steps) if n is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        claim, replay = self.evidence.claim, self.evidence.replay
        return {
            "claim": claim.summary,
            "claimed_epsilon": plain(claim.epsilon),
            "delta": claim.delta,
            "num_steps": self.evidence.num_steps,
            "caught_by": list(self.caught_by),
            "steps_needed": self.steps_needed,
            "bound": None if self.result is None else self._bound(self.result),
            "tests": None if self.diagnosis is None else self._tests(self.diagnosis),
            "replay": None if replay is None else dict(vars(replay)),
            "certain": [
                {"name": finding.name, "sentence": finding.sentence} for finding in self.evidence.certain
            ],
            "methods": [method.to_dict() for method in self.methods],
        }

    def _bound(self, result: Result) -> dict[str, Any]:
        return {
            "verdict": result.verdict.name,
            "epsilon": plain(result.bound.epsilon),
            "statement": result.bound.statement,
            "confidence": result.bound.confidence,
            "steps_needed": self.bound_steps,
        }

    def _tests(self, diagnosis: Diagnosis) -> dict[str, Any]:
        return {
            "confidence": diagnosis.confidence,
            "findings": [
                {"name": finding.name, "p_value": finding.p_value, "sentence": finding.sentence}
                for finding in diagnosis.findings
            ],
            "steps_needed": self.tests_steps,
        }


@dataclass(frozen=True)
class MethodOutcome:
    """One method's epsilon after all steps, whether it exceeds the claim, and the steps needed for that."""

    name: str
    rule: str
    epsilon: float
    kind: str
    is_violation: bool
    steps_needed: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "epsilon": plain(self.epsilon)}


def _audited(evidence: Evidence, num_steps: int, confidence: float) -> Result:
    scores = evidence.scores
    assert scores is not None
    return audit_recorded(
        scores.first(num_steps),
        claim=evidence.claim,
        confidence=confidence,
        tradeoff=scores.tradeoff,
        inference=scores.method(num_steps),
        threshold=scores.threshold,
    )


def _compare_methods(
    evidence: Evidence, scores: Scores, counts: Iterable[int], confidence: float
) -> tuple[MethodOutcome, ...]:
    """Run all methods whose threshold is not chosen on the scores that are counted.

    Among several threshold rules of a method the last one counts, as in a verdict.
    """
    claim, threshold = evidence.claim, None if scores.is_stepped else scores.threshold

    @cache
    def outcomes(num_steps: int) -> dict[str, MethodOutcome]:
        examined = examine(
            scores.first(num_steps),
            delta=claim.delta,
            confidence=confidence,
            tradeoff=scores.tradeoff or Gaussian(),
            threshold=threshold.threshold if isinstance(threshold, Fixed) else None,
        )
        return {
            name: MethodOutcome(
                name=name,
                rule=repr(row.bound.threshold_rule),
                epsilon=row.bound.epsilon,
                kind=str(row.bound.kind),
                is_violation=row.bound.epsilon > claim.epsilon,
            )
            for row in examined.rows
            for name in [row.name.split()[0]]
            if not isinstance(row.bound.threshold_rule, SameData)
        }

    def is_violation(num_steps: int, name: str) -> bool:
        return name in outcomes(num_steps) and outcomes(num_steps)[name].is_violation

    return tuple(
        replace(outcome, steps_needed=_steps_needed(counts, partial(is_violation, name=name)))
        for name, outcome in outcomes(evidence.num_steps).items()
    )
