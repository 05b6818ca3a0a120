"""Counts, bounds and verdict of a stored run, derived again from its scores and compared with its result.

The methods follow from the config: a result cannot choose a confidence, a bound or a method of its own, nor
omit one. What is not derived, such as power, tests, likely causes and what is not covered, only the seal
protects; ``docs/run.md`` lists it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit._io import read_json
from dpaudit._provenance import digest, seed_digest
from dpaudit.diagnostics import Check, Diagnosis, Finding
from dpaudit.errors import DpauditError, IncompleteError, InputError, quoted, said
from dpaudit.experiments._run_analysis import RETRIED, THRESHOLD_RULES, RunAnalysis, StoredScores, analyze
from dpaudit.experiments._seal import require_checksum
from dpaudit.methods import REVERSED
from dpaudit.stats import SCHEMA_VERSION, Bound, Power, Verdict, number, unrefuted, verdict_sentence

_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # other machines and versions of SciPy round differently
_SMALL = "delta", "p_value", "adjusted"  # keys of numbers that may be much smaller
_ROUNDED = 1e-3  # relative difference of a number that a sentence rounds
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")
_UNTESTED = "the noise is not tested"
# the values that an analysis computes with, besides the scores
_SETTINGS = "noise_multiplier", "sample_rate", "num_steps", "delta"
_WHOLE = int | None
_TABLE = {"confidence": float, "methods": list | None, "first_steps": _WHOLE, "num_guesses": _WHOLE}


@dataclass(frozen=True)
class _Difference:
    """A stored value, and what follows from the scores instead."""

    key: str
    stored: object
    derived: object


def derive(folder: Path, values: Mapping[str, Any]) -> None:
    """Compare a result with what follows from scores and config; raise if it differs, or they are missing."""
    with _naming(folder):
        scores = _read_scores(folder, values)
        for wrong in _differences(values, scores):
            raise InputError(
                f"Expected {wrong.key} = {_shown(wrong.derived)} in {folder / 'result.json'}, as follows "
                f"from the other files of the run, got {_shown(wrong.stored)}: {_reason(values)}."
            )
        _require_start(folder, values)


def _read_scores(folder: Path, values: Mapping[str, Any]) -> StoredScores:
    """Return the scores of a run, after checking its config and that they can be counted."""
    if values.get("schema_version") != SCHEMA_VERSION:
        raise InputError(f"Expected schema_version={SCHEMA_VERSION}, got another one.")
    config = _config(folder)
    _require_config(values, config, folder)
    table = config.get("config", {}).get("audit") or values.get("audit") or {}
    _require_settings(values, table)
    scores = StoredScores.read(folder, values, table)
    try:
        if not scores.are_guessed:
            _ = scores.observations
    except InputError as error:
        raise InputError(f"The observations in {folder} are damaged. {error}") from error
    return scores


def _require_settings(values: Mapping[str, Any], table: Mapping[str, Any]) -> None:
    """Raise if a value that the analysis computes with has another type, as only an edit leaves it."""
    for key in _SETTINGS:
        number(values, key)
    for key, kind in _TABLE.items():
        if not isinstance(table.get(key), kind):
            raise InputError(f"Expected audit.{key} as a run writes it, got {quoted(table.get(key))}.")
    if table.get("threshold") not in (None, *THRESHOLD_RULES):
        raise InputError(f"Expected audit.threshold as a run writes it, got {quoted(table['threshold'])}.")


def _reason(values: Mapping[str, Any]) -> str:
    try:
        writer = ascii(str(values["provenance"]["packages"]["dpaudit"]))[1:41].removesuffix("'")
    except (KeyError, TypeError):
        writer = dpaudit.__version__
    reason = "one of them has changed"
    if writer == dpaudit.__version__:
        return reason
    return f"{reason}, or version {writer} of dpaudit, which the run names, computed it otherwise"


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Add the name of the result to errors; a value of another type is damage."""
    path = folder / "result.json"
    try:
        yield
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"{str(error).removesuffix('.')}, in {path}.") from error
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"Expected the result of a run in {path}, but it is damaged; delete it and run the same command "
            "again to recreate it."
        ) from error


def _shown(value: object) -> str:
    if isinstance(value, list) and all(isinstance(one, Mapping) and "name" in one for one in value):
        value = [one["name"] for one in value]
    return "nothing" if value is None else f"{value!a:.200}"  # without control characters


def _differences(values: Mapping[str, Any], scores: StoredScores) -> Iterator[_Difference]:
    """Yield what differs from the analysis that the config implies."""
    if not isinstance(values.get("provenance"), Mapping):
        yield _Difference("provenance", values.get("provenance"), {"packages": "..."})
    found = _analyzed(scores)
    derived = {
        "claim": found.claim,
        "bound": _bound_values(values, found.bound),
        "delta": scores.values["delta"],
        "confidence": found.confidence,
        "shapes": found.shapes,
        "methods": found.methods,
        "one_run_bound": None,
        "mode": scores.audit["mode"],
        **({"canary": scores.audit["canary"]} if "canary" in values else {}),
        **found.more,
        **_size_values(values, scores),
    }
    yield from _unequal("", values, derived)
    yield from _unequal("", values, _verdict_values(values, found))
    if found.is_reversed and REVERSED not in values["notes"]:
        yield _Difference("notes", values["notes"], [REVERSED])


def _analyzed(scores: StoredScores) -> RunAnalysis:
    """Analyze scores that were read and counted: what fails now is dpaudit, and nothing is damaged."""
    try:
        return analyze(scores)
    except (DpauditError, MemoryError):
        raise
    except Exception as error:
        raise IncompleteError(f"dpaudit failed with {type(error).__name__}: {said(error)}") from error


def _bound_values(values: Mapping[str, Any], bound: Bound) -> dict[str, Any]:
    """Return the bound; it has one more assumption if failed training runs were repeated."""
    derived, stored = bound.to_dict(), values["bound"]["assumptions"]
    if stored and str(stored[-1]).startswith(RETRIED) and values["mode"] == "many-runs":
        derived["assumptions"] = [*derived["assumptions"], stored[-1]]
    return derived


def _size_values(values: Mapping[str, Any], scores: StoredScores) -> dict[str, Any]:
    """Return the numbers of canaries, steps and models that the scores show."""
    if values["mode"] == "many-runs":
        return {"num_models": sum(len(array) for array in scores.arrays.values())}
    if scores.are_guessed or values["mode"] == "end-to-end":
        size = scores.arrays["present"].size
        return {"num_canaries": size, "num_done": values["num_steps"], "stopped_early": False}
    recorded, width = scores.arrays["scores"].shape
    planned, done = scores.audit.get("first_steps") or values["num_steps"], values["num_steps"]
    stopped = values["stopped_early"] is True and scores.audit["stop_on_violation"] is True
    if recorded > planned or (recorded < planned and not stopped):
        raise InputError(f"Expected the scores of {planned!s:.40} steps, got those of {recorded}.")
    if stopped:  # unless all scores were recorded before
        done = recorded if recorded < planned else values["num_done"]
    width = 1 if values["mode"] == "paper" else width
    return {"num_canaries": width, "num_done": done, "stopped_early": stopped}


def _verdict_values(values: Mapping[str, Any], found: RunAnalysis) -> dict[str, Any]:
    """Return the verdict that follows from bound and tests, and everything that depends on it."""
    result = found.result
    if result is None:
        verdict = None if found.refutes is None else _verdict(values, found, is_refuted=found.refutes)
        name, sentence = (None, None) if verdict is None else (verdict.name, verdict.value)
        missing = dict.fromkeys(("refuted", "estimate", "diagnosis"))
        return {"verdict": name, "sentence": sentence, **missing}
    tests: dict[str, Any] | None = None
    if found.tests is not None and values["diagnosis"] is not None:
        diagnosis = _stored_diagnosis(values["diagnosis"], found.tests)
        result = replace(result, diagnosis=diagnosis)
        keys = "name", "p_value", "adjusted"
        rows = [{key: getattr(one, key) for key in keys} for one in diagnosis.findings]
        tests = {"confidence": found.tests, "findings": rows}
    elif found.tests is not None and not any(str(one).startswith(_UNTESTED) for one in values["not_covered"]):
        raise InputError("Expected the tests of the noise, got no diagnosis.")
    verdict = _verdict(values, found, is_refuted=bool(result.refuted))
    return {
        "verdict": verdict.name,
        "refuted": list(result.refuted),
        "sentence": verdict_sentence(verdict, result.refuted, result.hypothesis.condition),
        "p_value": result.p_value,
        "diagnosis": tests,
        "estimate": None if values.get("stopped_early") is True else result.estimate.to_dict(),
    }


def _verdict(values: Mapping[str, Any], found: RunAnalysis, *, is_refuted: bool) -> Verdict:
    """Return the verdict; whether a claim that is not refuted could have been rests on the stored power."""
    if is_refuted:
        return Verdict.VIOLATION
    if found.result is not None and found.result.is_blind:
        return Verdict.UNDERPOWERED
    claim = (math.inf if found.claim[key] == "inf" else found.claim[key] for key in ("epsilon", "parameter"))
    return unrefuted(Power.from_dict(values["power"]), *claim)


def _stored_diagnosis(stored: Mapping[str, Any], confidence: float) -> Diagnosis:
    """Return the findings that follow from the p-values, and those that need no test."""
    checks = [Check(sentence="", **_test_values(one)) for one in stored["tests"]]
    names = {check.name for check in checks}
    certain = [
        Finding(adjusted=0.0, sentence="", **_test_values(one))
        for one in stored["findings"]
        if one["name"] not in names
    ]
    return Diagnosis.of(checks, confidence=confidence, certain=certain)


def _test_values(one: Mapping[str, Any]) -> dict[str, Any]:
    estimate = one.get("estimate")
    known = {"name": str(one["name"]), "p_value": float(one["p_value"])}
    return {**known, "estimate": math.nan if estimate is None else float(estimate)}


def _unequal(where: str, stored: object, derived: object, *, is_exact: bool = False) -> Iterator[_Difference]:
    """Yield the innermost values that differ; keys that are not derived are not compared."""
    if isinstance(derived, Mapping) and isinstance(stored, Mapping):
        for key, value in derived.items():
            yield from _unequal(f"{where}.{key}".lstrip("."), stored.get(key), value, is_exact=is_exact)
    elif isinstance(derived, list) and isinstance(stored, list) and len(derived) == len(stored):
        for index, (one, value) in enumerate(zip(stored, derived, strict=True)):
            name = value.get("name", index) if isinstance(value, Mapping) else index
            yield from _unequal(f"{where}.{name}", one, value, is_exact=is_exact)
    elif stored != derived and (is_exact or not _is_close(where, stored, derived)):
        yield _Difference(where, stored, derived)


def _is_close(key: str, stored: object, derived: object) -> bool:
    if isinstance(stored, str) and isinstance(derived, str):
        return _is_same_sentence(stored, derived)
    if isinstance(stored, bool) or isinstance(derived, bool):
        return False
    if not isinstance(stored, int | float) or not isinstance(derived, int | float):
        return False
    absolute = 0.0 if key.endswith(_SMALL) else _ABSOLUTE
    return math.isclose(stored, derived, rel_tol=_RELATIVE, abs_tol=absolute)


def _is_same_sentence(stored: str, derived: str) -> bool:
    """Return whether sentences differ only in how numbers are rounded."""
    if _NUMBER.sub("#", stored) != _NUMBER.sub("#", derived):
        return False
    pairs = zip(_NUMBER.findall(stored), _NUMBER.findall(derived), strict=True)
    numbers = [[float(one.replace(",", "")) for one in pair] for pair in pairs]
    return all(math.isclose(one, other, rel_tol=_ROUNDED) for one, other in numbers)


def _require_config(values: Mapping[str, Any], stored: Mapping[str, Any], folder: Path) -> None:
    """Raise if the result is not that of the training run that the config describes."""
    config, resolved = stored.get("config", {}), stored.get("resolved", {})
    training, audit = config.get("training", {}), config.get("audit", {})
    provenance = values.get("provenance") or {}
    expected = {
        "noise_multiplier": resolved.get("noise_multiplier"),
        "sample_rate": resolved.get("sample_rate"),
        "num_steps": training.get("num_steps"),
        "delta": training.get("delta"),
        "mode": audit.get("mode"),
        "threat_model": config.get("threat_model"),
        "canary": audit.get("canary") if "canary" in values else None,
        "audit": audit if "audit" in values else None,
        **({"provenance": _provenance_values(config, resolved)} if stored and provenance else {}),
    }
    known = {key: value for key, value in expected.items() if value is not None}
    for one in _unequal("", values, known, is_exact=True):
        raise InputError(
            f"Expected {quoted(one.key)[1:-1]} = {quoted(one.derived)} in {folder / 'result.json'}, as in "
            f"config.json, got {quoted(one.stored)}: one of the files has changed."
        )
    least = audit.get("confidence")
    if least is not None and values["confidence"] < least - _RELATIVE:
        raise InputError(
            f"Expected a confidence of at least {least:g} in {folder / 'result.json'}, as in config.json, "
            f"got {values['confidence']:g}: one of the files has changed."
        )


def _provenance_values(config: Mapping[str, Any], resolved: Mapping[str, Any]) -> dict[str, Any]:
    seeds = {"run": resolved["seed"], **resolved["seeds"]}
    return {
        "data": resolved["data_digest"],
        "configuration": digest({key: value for key, value in config.items() if key != "seed"}),
        "seeds": {name: seed_digest(name, seed) for name, seed in seeds.items()},
    }


def _require_start(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise if the provenance of the result is not that of the starts of the run."""
    path = folder / "provenance.json"
    first, *later = require_checksum(path, read_json(path), "run the config again elsewhere")["starts"]
    started = {key: value for key, value in first.items() if key != "at"}
    known = {**started, "started": first["at"], "resumed": later or None}
    for one in _unequal("provenance", values["provenance"], known, is_exact=True):
        raise InputError(
            f"Expected {quoted(one.key)[1:-1]} = {quoted(one.derived)} in {folder / 'result.json'}, as in "
            f"provenance.json, got {quoted(one.stored)}: one of the files has changed."
        )


def _config(folder: Path) -> Mapping[str, Any]:
    """Return the stored config; empty if it was removed, because it holds the seeds."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}
