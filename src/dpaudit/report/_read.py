"""Read the directory of a run, which may come from anybody.

Nothing in it is run, no pickle is opened, and nothing takes memory without an end. A result is checked once
for texts and numbers without an end; what is missing, or of another type, is refused where an object is made
of it, in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpaudit import _io
from dpaudit._io import LARGEST_ARRAY, NOT_AN_ARRAY, map_array, read_json
from dpaudit.diagnostics import Check, Diagnosis, Finding
from dpaudit.errors import InputError
from dpaudit.report._figures import Figures, drawable, rebuilt_hypothesis
from dpaudit.report._run import ClaimSummary, MethodBound, Run, fit, flattened
from dpaudit.stats import Bound, Kind, Observations, Power, Verdict
from dpaudit.stats._bound import LARGEST, number
from dpaudit.stats._serialization import SCHEMA_VERSION, upgraded

_LONGEST_TEXT = 10_000  # characters
_LARGEST_WHOLE = 2**63
_DEEPEST = 32  # objects and lists inside of each other
_MOST_NAMES = 10  # in a sentence
_ROUNDING = 0.01  # of epsilon: a claim's is accounted from above, a bound's from below
_NOTHING_CLAIMED = "No verdict: where nothing is claimed, nothing can be refuted."


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """What a finished ``dpaudit run`` left in its directory; the name is the directory's, if none is given.

    Files of anybody can be read: nothing in them is run, and what is not as it should be is refused.
    """
    folder = _io.expanded(path)
    file = folder / "result.json"
    values = _result(folder, file)
    with _named(str(file)):
        run = _audit(fit(name or folder.resolve().name), values, file)
        facts = dict(_facts(values))
    observed = _observations(folder, paired=values.get("mode") == "paper")
    tradeoff = drawable(run.bound)
    with _named(str(file)):
        figures = Figures.of(
            observed.observations,
            claimed=run.claim.parameter,
            bound=run.bound,
            tradeoff=tradeoff,
            hypothesis=rebuilt_hypothesis(values, tradeoff, run.claim.parameter),
            in_order=observed.in_order,
        )
    return replace(
        run,
        facts=facts,
        settings=_settings(folder),
        versions=_versions(folder),
        figures=figures,
        counted=observed.counted,
    )


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Say in which file a value is that was refused."""
    try:
        yield
    except InputError as error:
        if source in str(error):
            raise
        raise InputError(f"{str(error).removesuffix('.')}, in {source}.") from error


def _result(folder: Path, file: Path) -> dict[str, Any]:
    """All values of the result, checked, in the form of this version."""
    if not folder.is_dir():
        raise InputError(f"Expected {folder} to be the directory of a run, but there is none.")
    if not file.exists():
        begun = (folder / "config.json").exists()
        reason = "but it is not finished: call dpaudit run again" if begun else "but it has no result.json"
        raise InputError(f"Expected a finished run in {folder}, {reason}.")
    stored = read_json(file)
    _require_no_demo(folder, stored)
    with _named(str(file)):
        values = upgraded(_checked(stored))
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"Expected schema_version={SCHEMA_VERSION} in {file}, got {version!a:.60}: another version "
                "of dpaudit wrote it."
            )
    return values


def _require_no_demo(folder: Path, values: Mapping[str, Any]) -> None:
    """A demo keeps its runs in folders of their own, and what it found of all of them above."""
    if "schema_version" in values or not isinstance(values.get("trainings"), list):
        return
    inner = sorted(str(one.parent) for one in folder.glob("*/result.json"))
    runs = f"its runs: {', '.join(inner[:_MOST_NAMES])}" if inner else "which has no run any more"
    raise InputError(f"Expected {folder} to be the directory of a run, got that of dpaudit demo; {runs}.")


def _audit(name: str, values: Mapping[str, Any], file: Path) -> Run:
    """The parts of a run that come from its result."""
    bound = Bound.from_dict(_section(values, "bound"))
    claimed = _section(values, "claim")
    claim = ClaimSummary(
        summary=_text(claimed, "summary"),
        epsilon=number(claimed, "epsilon"),
        delta=number(claimed, "delta", high=1.0),
        parameter=number(claimed, "parameter"),
    )
    verdict = _verdict(values, claim, bound, file)
    tests = {} if values.get("diagnosis") is None else _section(values, "diagnosis")
    return Run(
        name=name,
        verdict=verdict,
        sentence=_NOTHING_CLAIMED if verdict is None else _sentence(verdict, _text(values, "sentence")),
        claim=claim,
        bound=bound,
        power=None if verdict is None else Power.from_dict(_section(values, "power")),
        methods=tuple(_methods(_items(values, "methods", Mapping), claim.delta)),
        notes=tuple(_items(values, "notes", str)),
        not_covered=tuple(_items(values, "not_covered", str)),
        diagnosis=_diagnosis(tests) if tests else None,
        likely_causes=tuple(_items(tests, "likely_causes", str)),
    )


def _methods(rows: list[Mapping[str, Any]], delta: float) -> Iterator[MethodBound]:
    """The bounds of all methods; those of steps have an epsilon for the whole training beside their own.

    A bound at delta = 0, as Katz's interval is, cannot be compared with a claim at another delta.
    """
    of_steps = any(row.get("training_epsilon") is not None for row in rows)
    for row in rows:
        bound = Bound.from_dict(row)
        compared = bound.epsilon if bound.delta == delta else None
        if of_steps:
            composed = row.get("training_epsilon") is not None
            compared = number(row, "training_epsilon") if composed else None
        yield MethodBound(_text(row, "name"), bound, compared)


def _diagnosis(values: Mapping[str, Any]) -> Diagnosis:
    """All tests, and what they found; of those that found nothing, no sentence is stored."""
    return Diagnosis(
        confidence=number(values, "confidence", high=1.0),
        checks=tuple(
            Check(
                name=_text(one, "name"),
                p_value=number(one, "p_value", high=1.0),
                sentence="",
                estimate=number(one, "estimate", low=-LARGEST, high=LARGEST),
            )
            for one in _items(values, "tests", Mapping)
        ),
        findings=tuple(
            Finding(
                name=_text(one, "name"),
                p_value=number(one, "p_value", high=1.0),
                adjusted=number(one, "adjusted", high=LARGEST),
                sentence=_text(one, "sentence"),
                estimate=number(one, "estimate", low=-LARGEST, high=LARGEST),
            )
            for one in _items(values, "findings", Mapping)
        ),
        notes=tuple(_items(values, "notes", str)),
    )


def _verdict(values: Mapping[str, Any], claim: ClaimSummary, bound: Bound, file: Path) -> Verdict | None:
    """The stored verdict, None where nothing is claimed; refused if no audit gives it for such numbers."""
    if values.get("verdict") is None and claim.epsilon == math.inf:
        return None
    word = _text(values, "verdict")
    if word not in Verdict.__members__:
        names = ", ".join(Verdict.__members__)
        raise InputError(f"Expected verdict to be {names} in {file}, got {word[:60]!a}.")
    if bound.kind is not Kind.CONFIDENCE:
        raise InputError(
            f"Expected the verdict in {file} to rest on a confidence bound, got a {bound.kind} one."
        )
    refutes = Verdict[word] is Verdict.VIOLATION
    if refutes is not (bound.parameter > claim.parameter) or _is_wrong_side(refutes, claim, bound):
        raise InputError(
            f"Expected the verdict in {file} to follow from its bound and its claim, got {word} "
            f"with a parameter of {bound.parameter:.4g} (epsilon {bound.epsilon:.4g}) where "
            f"{claim.parameter:.4g} (epsilon {claim.epsilon:.4g}) is claimed."
        )
    return Verdict[word]


def _is_wrong_side(refutes: bool, claim: ClaimSummary, bound: Bound) -> bool:
    """Whether the epsilons say the opposite; a bound of 0 says nothing, and none is above infinity."""
    if refutes:
        return 0 < bound.epsilon < claim.epsilon * (1 - _ROUNDING) < math.inf
    return bound.epsilon > claim.epsilon * (1 + _ROUNDING)


def _sentence(verdict: Verdict, stored: str) -> str:
    """The verdict's own, whatever the file says; only the condition of a violation is the file's."""
    _, holds, condition = stored.partition(" This holds if ")
    return f"{verdict.value}{holds}{condition}" if verdict is Verdict.VIOLATION else verdict.value


def _facts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What a run has beside its verdict, as far as it has it."""
    known = {key for key, value in values.items() if value is not None}
    for key in ("mode", "threat_model"):
        if key in known:
            yield key.replace("_", " "), _text(values, key)
    if {"num_done", "num_steps"} <= known:
        early = ", stopped at the first violation" if values.get("stopped_early") is True else ""
        yield "steps", f"{number(values, 'num_done'):,.0f} of {number(values, 'num_steps'):,.0f}{early}"
    for key, label, form in (
        ("num_canaries", "canaries", ",.0f"),
        ("num_parameters", "parameters of the model", ",.0f"),
        ("noise_multiplier", "noise multiplier", ".6g"),
        ("sample_rate", "sample rate", ".6g"),
        ("accuracy", "test accuracy", ".3f"),
    ):
        if key in known:
            yield label, f"{number(values, key):{form}}"
    if "timing" in known and _section(values, "timing").get("training_seconds") is not None:
        yield "training took", f"{number(_section(values, 'timing'), 'training_seconds'):,.1f} s"


def _settings(folder: Path) -> dict[str, str]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    stored = read_json(path)
    with _named(str(path)):
        resolved = {} if stored.get("resolved") is None else _section(stored, "resolved")
        lines = {f"resolved.{label}": value for label, value in flattened(resolved).items()}
        return flattened(_section(stored, "config")) | lines


def _versions(folder: Path) -> dict[str, str]:
    path = folder / "versions.json"
    return flattened(read_json(path)) if path.exists() else {}


@dataclass(frozen=True)
class StoredObservations:
    """Observations, if there are any; what each is of; and whether they came one after the other."""

    observations: Observations | None
    counted: str
    in_order: bool


def _observations(folder: Path, *, paired: bool) -> StoredObservations:
    """Scores of steps, scores of whole trainings, or one likelihood ratio a canary.

    ``paired`` says that a step has one score without the canary and one with it, and no coins.
    """
    try:
        return (
            _step_scores(folder, paired)
            or _trial_scores(folder)
            or _canary_ratios(folder)
            or StoredObservations(None, "observation", in_order=False)
        )
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"The observations in {folder} are damaged. {error}") from error


def _step_scores(folder: Path, paired: bool) -> StoredObservations | None:
    scores, present = read_array(folder / "scores.npy", "f"), read_array(folder / "present.npy", "b")
    if scores is None or present is None:
        return None
    if paired:
        scores, present = scores.reshape(-1), present.reshape(-1)
    return StoredObservations(Observations.from_presence(scores, present), "step", in_order=True)


def _trial_scores(folder: Path) -> StoredObservations | None:
    """One score a training, of trainings with the canary and without it."""
    sides = [read_array(folder / f"{name}.npy", "f") for name in ("with_canary", "without_canary")]
    if sides[0] is None or sides[1] is None:
        return None
    found = Observations(with_canary=sides[0], without_canary=sides[1])
    return StoredObservations(found, "trial", in_order=True)


def _canary_ratios(folder: Path) -> StoredObservations | None:
    """One score a canary of the same training: they have no order in time."""
    ratios = read_array(folder / "log_likelihood_ratios.npy", "f")
    present = read_array(folder / "present.npy", "b")
    if ratios is None or present is None:
        return None
    return StoredObservations(Observations.from_presence(ratios, present), "canary", in_order=False)


def read_array(path: Path, kinds: str) -> np.ndarray | None:
    """An array of one of these kinds of numpy; None if there is no such file."""
    if not path.exists():
        return None
    try:
        mapped = map_array(path)
    except InputError:
        raise
    except (OSError, *NOT_AN_ARRAY) as error:
        raise InputError(f"Expected an array in {path}, but it cannot be read.") from error
    if not isinstance(mapped, np.ndarray) or mapped.dtype.kind not in kinds:
        raise InputError(f"Expected numbers in {path}, got something else.")
    if mapped.nbytes > LARGEST_ARRAY:  # a file has as many bytes as it says, and need not fill a disk
        raise InputError(
            f"Expected an array of at most {LARGEST_ARRAY:,} bytes in {path}, got one of {mapped.nbytes:,}."
        )
    return np.array(mapped)


def _checked(value: Any, place: str = "", depth: int = 0) -> Any:
    """Return plain values with all texts fit to be shown; raise ``InputError`` where one has no end.

    >>> _checked({"name": "a" + chr(27), "sizes": [1, 2.5]}) == {"name": "a" + chr(0xFFFD), "sizes": [1, 2.5]}
    True
    """
    if depth > _DEEPEST:
        raise _refused(place, f"to have at most {_DEEPEST} levels", value)
    if isinstance(value, Mapping):
        inside = {key: _checked(one, f"{place}.{key}".lstrip("."), depth + 1) for key, one in value.items()}
        return {fit(key[:_LONGEST_TEXT]): one for key, one in inside.items()}
    if isinstance(value, list):
        return [_checked(one, f"{place}.{number}", depth + 1) for number, one in enumerate(value)]
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            raise _refused(place, f"to be a text of at most {_LONGEST_TEXT:,} characters", value)
        return fit(value)
    if isinstance(value, int) and abs(value) >= _LARGEST_WHOLE:
        raise _refused(place, "to be a smaller number", value)
    if isinstance(value, float) and math.isinf(value):  # JSON has none, but numbers that are read as one
        raise _refused(place, "to be a finite number", value)
    return value


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key, or raise ``InputError``."""
    value = values.get(key)
    if not isinstance(value, Mapping):
        raise _refused(key, "to be an object", value)
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    """Return the text under a key, or raise ``InputError``."""
    value = values.get(key)
    if not isinstance(value, str):
        raise _refused(key, "to be a text", value)
    return value


def _items(values: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """Return the list of texts or objects under a key, no list as an empty one, or raise ``InputError``."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(one, kind) for one in value):
        raise _refused(key, f"to be a list of {'texts' if kind is str else 'objects'}", value)
    return value


def _refused(place: str, expected: str, value: object) -> InputError:
    """The error that says what is wrong with a value of a file."""
    got = "nothing" if value is None else f"{value!a:.60}"  # it goes to a terminal
    return InputError(f"Expected {ascii(place)[1:-1]:.200} {expected}, got {got}.")
