"""Check the directory of a run without its data: recompute its result from the scores, and compare.

``dpaudit verify`` does only this; ``dpaudit run`` and ``dpaudit report`` do it before they repeat a stored
result. The methods follow from the config: a result cannot choose a confidence, a bound or a method of its
own, nor omit one. What cannot be recomputed, such as power, tests, likely causes and what is not covered,
only the seal protects; ``docs/experiments.md`` lists it. An unfinished run is checked by its checksums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import dpaudit
from dpaudit import _io
from dpaudit._io import differences, read_json
from dpaudit._provenance import digest, seed_digest
from dpaudit.diagnostics import Diagnosis
from dpaudit.errors import DpauditError, IncompleteError, InputError, message_of, quoted
from dpaudit.experiments import _analysis as analysis
from dpaudit.experiments._directory import Seal, check_seal, check_unfinished, require_checksum
from dpaudit.methods import MethodComparison
from dpaudit.stats import Power


class Status(StrEnum):
    """What is known about the directory of a run."""

    SEALED = "sealed"
    """Every file is as the run left it, and counts, bounds and verdict follow from the scores."""
    UNSEALED = "unsealed"
    """There is a result, but no manifest, so it was not checked; what it can be derived from is intact."""
    UNFINISHED = "unfinished"
    """There is no result yet; what is stored is intact."""
    REFUSED = "refused"
    """A file has changed, or numbers do not follow from the scores."""


@dataclass(frozen=True)
class Verified:
    """The result of a finished run, whose files and numbers were checked."""

    values: dict[str, Any]
    seal: Seal
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The status of a directory, with verdict and seal of a finished run, or the error of a refused one."""

    directory: str
    status: Status
    verdict: str | None = None
    seal: str | None = None
    remarks: tuple[str, ...] = ()
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**vars(self), "status": str(self.status), "remarks": list(self.remarks)}


def verify(folder: str | Path) -> Verification:
    """Check the directory of a run; what is wrong is part of the result."""
    path = _io.expanded(folder)
    try:
        finished = verify_finished(path)
        if finished is None:
            remarks = tuple(check_unfinished(path))
            status = Status.UNSEALED if (path / "result.json").exists() else Status.UNFINISHED
            return Verification(directory=str(folder), status=status, remarks=remarks)
    except InputError as error:
        return Verification(directory=str(folder), status=Status.REFUSED, error=str(error))
    seal, remarks = finished.seal, finished.remarks
    if seal.uncovered:
        remarks = (*remarks, f"Not part of the run, and not sealed: {', '.join(seal.uncovered):.400}.")
    return Verification(
        directory=str(folder),
        status=Status.SEALED,
        verdict=finished.values.get("verdict"),
        seal=seal.digest,
        remarks=remarks,
    )


def verify_finished(folder: Path, *, is_own: bool = False) -> Verified | None:
    """Return the checked result of a sealed run; None without a seal.

    Such a run can be resumed: its numbers are then computed again from the checkpoint or the stored trials.
    The numbers of a run that this process has just made itself (``is_own``) need not be derived again.
    """
    seal = check_seal(folder)
    if seal is None:
        return None
    values = read_json(folder / "result.json")
    if not is_own:
        verify_against_scores(folder, values)
    remarks = (f"Removed since the run was sealed: {', '.join(seal.absent)}.",) if seal.absent else ()
    return Verified(values, seal, remarks)


def verify_against_scores(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise unless a result is what follows from scores, config and starts, or if these are missing."""
    path = folder / "result.json"
    with as_damage(path):
        if values.get("schema_version") != analysis.RESULT_SCHEMA:
            raise InputError(f"schema_version must be {analysis.RESULT_SCHEMA}.")
        config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
        raise_on_mismatch(path, "config.json", values, _config_values(config), rel_tol=0.0)
        audit = config["config"]["audit"] if config else values["audit"]
        _require_settings(audit)
        scores = analysis.RunScores.read(folder, values, audit)
        comparison = _compare(scores)
        writer = quoted(values["provenance"]["packages"]["dpaudit"])[1:-1]
        reason = f", or version {writer} of dpaudit, which the run names, computed it otherwise"
        raise_on_mismatch(
            path,
            "follows from the other files of the run",
            values,
            {**_recomputed_values(scores, comparison), **_size_values(scores)},
            reason="" if writer == dpaudit.__version__ else reason,
        )
        raise_on_mismatch(path, "provenance.json", values, _start_values(folder), rel_tol=0.0)


def raise_on_mismatch(
    path: Path,
    source: str,
    stored: Mapping[str, Any],
    expected: Mapping[str, Any],
    *,
    rel_tol: float = 1e-5,
    reason: str = "",
) -> None:
    """Raise on the first stored value that differs from what ``source``, a file or a clause, gives."""
    source = f"in {source}" if source.endswith(".json") else source
    is_equal = partial(_is_close, rel_tol=rel_tol)
    for key, value, other in differences(stored, expected, is_equal=is_equal):
        raise InputError(
            f"{quoted(key)[1:-1]} is {quoted(value)} in {path}, but {quoted(other)} {source}: one of them "
            f"has changed{reason}."
        )


def _is_close(key: str, stored: Any, expected: Any, *, rel_tol: float) -> bool:
    """Return whether values are equal; machines and versions of SciPy round numbers differently."""
    numbers = [value for value in (stored, expected) if type(value) in (int, float)]
    if stored == expected or len(numbers) < 2:
        return bool(stored == expected)
    is_small = key.endswith(("delta", "p_value", "adjusted"))  # zero is far from the smallest of them
    return math.isclose(*numbers, rel_tol=rel_tol, abs_tol=0.0 if is_small else rel_tol / 10)


@contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """Add the name of a file to the error about an invalid value; a value of another type is damage."""
    try:
        yield
    except InputError as error:
        if str(path.parent) in str(error):
            raise
        raise InputError(f"{str(error).removesuffix('.')}, in {path}.") from error
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise InputError(f"{path} is damaged: it is not as a run writes it.") from error


def _require_settings(audit: Mapping[str, Any]) -> None:
    """Raise if a setting that the analysis computes with is of another kind, as only an edit leaves it."""
    kinds = {"confidence": float, "methods": list | None, "canary_rate": int | float | None}
    kinds |= dict.fromkeys(("first_steps", "num_guesses"), int | None)
    wrong = [key for key, kind in kinds.items() if not isinstance(audit.get(key), kind)]
    if audit.get("threshold") not in analysis.THRESHOLD_RULES:
        wrong.append("threshold")
    for key in wrong:
        raise InputError(f"audit.{key} is not as a run writes it: {quoted(audit.get(key))}.")


def _compare(scores: analysis.RunScores) -> MethodComparison:
    """Analyze scores that were read and counted: what fails now is dpaudit, and nothing is damaged."""
    try:
        return analysis.compare(scores)
    except (DpauditError, MemoryError):
        raise
    except Exception as error:
        raise IncompleteError(f"dpaudit failed with {type(error).__name__}: {message_of(error)}") from error


def _recomputed_values(scores: analysis.RunScores, comparison: MethodComparison) -> dict[str, Any]:
    """Return all values of a result that follow from the analysis that the config implies.

    Whether a claim that is not refuted could have been rests on the stored power, and what the tests found on
    their stored p-values.
    """
    values, result = scores.values, comparison.result
    diagnosis = _recomputed_diagnosis(scores)
    if result is not None:
        result = replace(result, diagnosis=diagnosis)
        power = Power.from_dict(values["power"])
        vars(result).update(power=replace(power, parameter=math.inf) if result.is_blind else power)
        vars(result).update(attack_power=None)
    expected = analysis.plain_values(scores, replace(comparison, result=result))
    for key in ("power", "likely_causes", "not_covered", "specific", "notes", "scores_of"):
        expected.pop(key, None)
    for table, stored in ((expected, values), (expected["claim"], values["claim"])):
        for key in {"condition", "size", "needed", "description"} - stored.keys():
            table.pop(key, None)  # runs of version 0.2.0 lack them
    if diagnosis is not None:
        expected["diagnosis"] = _finding_values(diagnosis)
    assumptions = values["bound"]["assumptions"]
    if assumptions and str(assumptions[-1]).startswith(analysis.RETRIED) and values["mode"] == "many-runs":
        expected["bound"]["assumptions"].append(assumptions[-1])  # failed training runs were repeated
    missing = dict.fromkeys(("refuted", "estimate", "diagnosis", "one_run_bound"))
    return {**missing, **expected, "mode": scores.audit["mode"]}


def _size_values(scores: analysis.RunScores) -> dict[str, Any]:
    """Return the numbers of canaries, steps and models that the scores show."""
    values = scores.values
    if "with_canary" in scores.arrays:
        return {"num_models": sum(len(array) for array in scores.arrays.values())}
    if "log_likelihood_ratios" in scores.arrays or scores.are_guessed:
        size = scores.arrays["present"].size
        return {"num_canaries": size, "num_done": values["num_steps"], "stopped_early": False}
    return _step_sizes(scores, values)


def _step_sizes(scores: analysis.RunScores, values: Mapping[str, Any]) -> dict[str, Any]:
    num_recorded, width = scores.arrays["scores"].shape
    num_planned = scores.audit.get("first_steps") or values["num_steps"]
    is_stopped = values["stopped_early"] is True and scores.audit["stop_on_violation"] is True
    if num_recorded > num_planned or (num_recorded < num_planned and not is_stopped):
        raise InputError(f"The run planned {num_planned!s:.40} steps, but has the scores of {num_recorded}.")
    num_done = values["num_done" if is_stopped else "num_steps"]
    if num_recorded < num_planned:  # it was stopped before all scores were recorded
        num_done = num_recorded
    num_canaries = 1 if values["mode"] == "paper" else width
    return {"num_canaries": num_canaries, "num_done": num_done, "stopped_early": is_stopped}


def _recomputed_diagnosis(scores: analysis.RunScores) -> Diagnosis | None:
    """Return the findings that follow from the p-values, and those that need no test; None if untested."""
    stored = scores.values.get("diagnosis")
    if scores.values["threat_model"] == "black-box":
        return None
    if stored is None:
        if not any(str(text).startswith("the noise is not tested") for text in scores.values["not_covered"]):
            raise InputError("The diagnosis is missing, although the noise was tested.")
        return None
    restored = Diagnosis.from_dict(stored)
    names = {check.name for check in restored.checks}
    certain = [replace(finding, adjusted=0.0) for finding in restored.findings if finding.name not in names]
    return Diagnosis.of(restored.checks, confidence=analysis.confidences(scores)[1], certain=certain)


def _finding_values(diagnosis: Diagnosis) -> dict[str, Any]:
    keys = "name", "p_value", "adjusted"
    rows = [{key: getattr(finding, key) for key in keys} for finding in diagnosis.findings]
    return {"confidence": diagnosis.confidence, "findings": rows}


def _config_values(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a result that the config decides; none if it was removed: it holds the seeds."""
    if not stored:
        return {}
    config, resolved = stored["config"], stored["resolved"]
    training, audit = config["training"], config["audit"]
    seeds = {"run": resolved["seed"], **resolved["seeds"]}
    provenance = {
        "data": resolved["data_digest"],
        "configuration": digest({key: value for key, value in config.items() if key != "seed"}),
        "seeds": {name: seed_digest(name, seed) for name, seed in seeds.items()},
    }
    return {
        "noise_multiplier": resolved["noise_multiplier"],
        "sample_rate": resolved["sample_rate"],
        "num_steps": training["num_steps"],
        "delta": training["delta"],
        "mode": audit["mode"],
        "threat_model": config["threat_model"],
        "audit": audit,
        "provenance": provenance,
    }


def _start_values(folder: Path) -> dict[str, Any]:
    """Return the provenance that the starts of the run give its result."""
    path = folder / "provenance.json"
    first, *later = require_checksum(path, read_json(path), "run the config again elsewhere")["starts"]
    started = {key: value for key, value in first.items() if key != "at"}
    return {"provenance": {**started, "started": first["at"], "resumed": later or None}}
