"""Read the directory of a finished run, which is untrusted.

Nothing in it is executed, no pickle is loaded, and memory is bounded. A result is checked once for strings
and numbers that are too long; a value that is missing or has another type raises an error where an object is
built from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpaudit import _io
from dpaudit._io import LARGEST_ARRAY, read_array, read_json
from dpaudit.diagnostics import Check, Diagnosis, Finding
from dpaudit.errors import InputError
from dpaudit.experiments._recompute import remarks_on
from dpaudit.experiments._run_analysis import SCORE_FILES
from dpaudit.experiments._seal import check_seal, require_checksum
from dpaudit.report._plot_data import PlotData, drawable, rebuilt_hypothesis
from dpaudit.report._run import ClaimSummary, MethodBound, Run, flattened, printable
from dpaudit.stats import (
    LARGEST,
    MECHANISM,
    OTHER_MECHANISM,
    PRIVACY,
    SCHEMA_VERSION,
    Bound,
    ClaimPart,
    Estimate,
    Kind,
    Observations,
    Power,
    Verdict,
    number,
    verdict_sentence,
)

_LONGEST_TEXT = 10_000  # characters
_DEEPEST = 32  # nested objects and lists
_ROUNDING = 0.01  # tolerance for epsilon, which is rounded up in a claim and down in a bound


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """Read the directory of a finished ``dpaudit run``; it is named after the directory by default.

    Untrusted files can be read: nothing in them is executed, and invalid values raise ``InputError``. So do
    files that have changed since the run was sealed, and numbers that do not follow from the scores.
    """
    return _read(_io.expanded(path), name, remarks_on)


def read_own_run(path: Path, *, name: str) -> Run:
    """Read a run that this process has just finished: there is no need to derive its numbers again."""
    return _read(path, name, lambda *_: ())


def _read(folder: Path, name: str | None, remarks_on: Callable[..., tuple[str, ...]]) -> Run:
    seal = check_seal(folder)
    values, run = read_result(folder, printable(name or folder.resolve().name))
    remarks = remarks_on(folder, values, seal)
    observations, counted = _observations(folder, paired=values.get("mode") == "paper")
    tradeoff = drawable(run.bound)
    with _naming(folder / "result.json"):
        figures = PlotData.of(
            observations,
            claimed=run.claim.parameter,
            bound=run.bound,
            tradeoff=tradeoff,
            hypothesis=rebuilt_hypothesis(values, tradeoff, run.claim.parameter),
            in_order=counted != "canary",  # canaries of one run have no order in time
        )
        provenance = _section(values, "provenance")
        versions = _versions(provenance)
    return replace(
        run,
        notes=(*run.notes, *remarks),
        remarks=remarks,
        settings=_settings(folder),
        versions=versions,
        provenance=flattened(provenance, hidden=()),
        seal=None if seal is None else seal.digest,
        figures=figures,
        counted=counted,
    )


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Add the name of the file to the error about an invalid value."""
    try:
        yield
    except InputError as error:
        if str(file) in str(error):
            raise
        raise InputError(f"{str(error).removesuffix('.')}, in {file}.") from error


def read_result(folder: Path, name: str) -> tuple[dict[str, Any], Run]:
    """Return the checked values of ``result.json``, and a run built from them."""
    file = folder / "result.json"
    if not folder.is_dir():
        raise InputError(f"Expected {folder} to be the directory of a run, but there is no such directory.")
    if not file.exists():
        begun = (folder / "config.json").exists()
        reason = (
            "but it is unfinished: resume it with dpaudit run" if begun else "but there is no result.json"
        )
        raise InputError(f"Expected a finished run in {folder}, {reason}.")
    stored = read_json(file)
    _require_no_demo(folder, stored)
    with _naming(file):
        values = _checked(stored)
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise InputError(
                f"Expected schema_version={SCHEMA_VERSION} in {file}, got {version!a:.60}: it was written by "
                "another version of dpaudit."
            )
        return values, _run(name, values, file)


def _require_no_demo(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise for the directory of a demo, whose runs are in subdirectories."""
    if "schema_version" in values or not isinstance(values.get("trainings"), list):
        return
    inner = sorted(str(path.parent) for path in folder.glob("*/result.json"))
    runs = f"its runs are {', '.join(inner[:10])}" if inner else "it no longer contains any run"
    raise InputError(f"Expected {folder} to be the directory of a run, got that of dpaudit demo; {runs}.")


def _run(name: str, values: Mapping[str, Any], file: Path) -> Run:
    bound = Bound.from_dict(_section(values, "bound"))
    claimed = _section(values, "claim")
    claim = ClaimSummary(
        summary=_text(claimed, "summary"),
        epsilon=number(claimed, "epsilon"),
        delta=number(claimed, "delta", high=1.0),
        parameter=number(claimed, "parameter"),
        parts=tuple(map(ClaimPart.from_dict, _items(claimed, "parts", Mapping))),
    )
    tests = {} if values.get("diagnosis") is None else _section(values, "diagnosis")
    has_findings = bool(_items(tests, "findings", Mapping))
    verdict = _verdict(values, claim, bound, file, has_findings=has_findings)
    refuted = None if values.get("refuted") is None else _refuted(claim, bound, has_findings=has_findings)
    has_estimate = values.get("estimate") is not None
    return Run(
        name=name,
        verdict=verdict,
        sentence="No verdict: without a claim, there is nothing to refute."
        if verdict is None
        else _sentence(verdict, refuted, _text(values, "sentence")),
        claim=claim,
        bound=bound,
        power=None if verdict is None else Power.from_dict(_section(values, "power")),
        attack_power=Power.from_dict(values["attack_power"]) if values.get("attack_power") else None,
        p_value=None if values.get("p_value") is None else number(values, "p_value", high=1.0),
        estimate=Estimate.from_dict(_section(values, "estimate")) if has_estimate else None,
        methods=tuple(_methods(_items(values, "methods", Mapping), claim.delta)),
        notes=tuple(_items(values, "notes", str)),
        not_covered=tuple(_items(values, "not_covered", str)),
        refuted=refuted,
        diagnosis=_diagnosis(tests) if tests else None,
        likely_causes=tuple(_items(values, "likely_causes", str)),
        facts=dict(_facts(values)),
    )


def _methods(rows: list[Mapping[str, Any]], delta: float) -> Iterator[MethodBound]:
    """Yield the bounds of all methods; bounds on steps also have an epsilon for the whole training run.

    A bound at delta = 0, such as Katz's interval, cannot be compared with a claim at another delta.
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
    """Return all tests and their findings; a test without a finding has no stored sentence."""
    return Diagnosis(
        confidence=number(values, "confidence", high=1.0),
        checks=tuple(
            Check(
                name=_text(test, "name"),
                p_value=number(test, "p_value", high=1.0),
                sentence="",
                estimate=_estimate(test),
            )
            for test in _items(values, "tests", Mapping)
        ),
        findings=tuple(
            Finding(
                name=_text(finding, "name"),
                p_value=number(finding, "p_value", high=1.0),
                adjusted=number(finding, "adjusted", high=LARGEST),
                sentence=_text(finding, "sentence"),
                estimate=_estimate(finding),
            )
            for finding in _items(values, "findings", Mapping)
        ),
        notes=tuple(_items(values, "notes", str)),
        assumptions=tuple(_items(values, "assumptions", str)),
    )


def _estimate(values: Mapping[str, Any]) -> float:
    """Return the estimate of a test; a finding without statistics may have none."""
    if values.get("estimate") is None:
        return math.nan
    return number(values, "estimate", low=-LARGEST, high=LARGEST)


def _refuted(claim: ClaimSummary, bound: Bound, *, has_findings: bool) -> tuple[str, ...]:
    """Return what is refuted, from the numbers: a file cannot say otherwise."""
    privacy = (PRIVACY,) if bound.parameter > claim.parameter else ()
    return (*privacy, MECHANISM) if has_findings else privacy


def _verdict(
    values: Mapping[str, Any], claim: ClaimSummary, bound: Bound, file: Path, *, has_findings: bool
) -> Verdict | None:
    """Return the stored verdict, None without a claim; raise if its numbers contradict it.

    A violation rests on the bound or, if there are findings that share its error rate, on them.
    """
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
    refutes, is_above = Verdict[word] is Verdict.VIOLATION, bound.parameter > claim.parameter
    if refutes is not (is_above or has_findings) or _is_wrong_side(is_above, claim, bound):
        raise InputError(
            f"Expected the verdict in {file} to follow from its bound and its claim, got {word} "
            f"with a parameter of {bound.parameter:.4g} (epsilon {bound.epsilon:.4g}) where "
            f"{claim.parameter:.4g} (epsilon {claim.epsilon:.4g}) is claimed."
        )
    return Verdict[word]


def _is_wrong_side(refutes: bool, claim: ClaimSummary, bound: Bound) -> bool:
    """Return whether the epsilons contradict the verdict; a bound of 0 or an infinite claim never does."""
    if refutes:
        return 0 < bound.epsilon < claim.epsilon * (1 - _ROUNDING) < math.inf
    return bound.epsilon > claim.epsilon * (1 + _ROUNDING)


def _sentence(verdict: Verdict, refuted: tuple[str, ...] | None, stored: str) -> str:
    """Return the verdict's own sentence; only the condition of a violation comes from the file."""
    condition = stored.partition(" This holds if ")[2]
    condition = condition.removesuffix(f" {OTHER_MECHANISM}").removesuffix(".")
    return verdict_sentence(verdict, (PRIVACY,) if refuted is None else refuted, condition or None)


def _facts(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield labeled facts about the training run."""
    available = {key for key, value in values.items() if value is not None}
    for key in ("mode", "threat_model"):
        if key in available:
            yield key.replace("_", " "), _text(values, key)
    if {"num_done", "num_steps"} <= available:
        early = ", stopped at the first violation" if values.get("stopped_early") is True else ""
        yield "steps", f"{number(values, 'num_done'):,.0f} of {number(values, 'num_steps'):,.0f}{early}"
    for key, label, form in (
        ("num_canaries", "canaries", ",.0f"),
        ("num_parameters", "parameters of the model", ",.0f"),
        ("noise_multiplier", "noise multiplier", ".6g"),
        ("sample_rate", "sample rate", ".6g"),
        ("accuracy", "test accuracy", ".3f"),
    ):
        if key in available:
            yield label, f"{number(values, key):{form}}"
    if "timing" in available and _section(values, "timing").get("training_seconds") is not None:
        yield "training took", f"{number(_section(values, 'timing'), 'training_seconds'):,.1f} s"


def _settings(folder: Path) -> dict[str, str]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    stored = require_checksum(path, read_json(path))
    with _naming(path):
        resolved = {} if stored.get("resolved") is None else _section(stored, "resolved")
        lines = {f"resolved.{label}": value for label, value in flattened(resolved).items()}
        return flattened(_section(stored, "config")) | lines


def _versions(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the software."""
    packages = flattened(_section(provenance, "packages"))
    return packages | flattened({key: provenance.get(key) for key in ("python", "platform")})


def _observations(folder: Path, *, paired: bool) -> tuple[Observations | None, str]:
    """Return the observations, if there are any, and what each comes from: a step, a trial or a canary.

    ``paired`` states that each step has one score without and one with the canary, and no coins.
    """
    try:
        require_moderate_sum(folder, [folder / f"{name}.npy" for name in SCORE_FILES])
        arrays = {name: read_array(folder / f"{name}.npy", kinds) for name, kinds in SCORE_FILES.items()}
        scores, present, with_canary, without_canary, ratios = arrays.values()
        if scores is not None and present is not None:
            return Observations.from_presence(scores, present, paired=paired), "step"
        if with_canary is not None and without_canary is not None:
            return Observations(with_canary=with_canary, without_canary=without_canary), "trial"
        if ratios is not None and present is not None:
            return Observations.from_presence(ratios, present), "canary"
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"The observations in {folder} are damaged. {error}") from error
    return None, "observation"


def require_moderate_sum(folder: Path, paths: Iterable[Path]) -> None:
    """Raise if all arrays of a folder together are too large to read."""
    total = sum(path.stat().st_size for path in paths if path.is_file())
    if total > LARGEST_ARRAY:
        raise InputError(
            f"Expected arrays of at most {LARGEST_ARRAY:,} bytes in all in {folder}, got {total:,}."
        )


def _checked(value: Any, path: str = "", depth: int = 0) -> Any:
    """Return plain values with all strings printable; raise ``InputError`` if one is too long.

    >>> _checked({"name": "a" + chr(27), "sizes": [1, 2.5]}) == {"name": "a" + chr(0xFFFD), "sizes": [1, 2.5]}
    True
    """
    if depth > _DEEPEST:
        raise _refused(path, f"to have at most {_DEEPEST} levels", value)
    if isinstance(value, Mapping):
        inside = {key: _checked(item, f"{path}.{key}".lstrip("."), depth + 1) for key, item in value.items()}
        return {printable(key[:_LONGEST_TEXT]): item for key, item in inside.items()}
    if isinstance(value, list):
        return [_checked(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str):
        if len(value) > _LONGEST_TEXT:
            raise _refused(path, f"to be a string of at most {_LONGEST_TEXT:,} characters", value)
        return printable(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise _refused(path, "to be a smaller number", value)
    if isinstance(value, float) and math.isinf(value):  # as 1e999 is read
        raise _refused(path, "to be a finite number", value)
    return value


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key, or raise ``InputError``."""
    value = values.get(key)
    if not isinstance(value, Mapping):
        raise _refused(key, "to be an object", value)
    return value


def _text(values: Mapping[str, Any], key: str) -> str:
    """Return the string under a key, or raise ``InputError``."""
    value = values.get(key)
    if not isinstance(value, str):
        raise _refused(key, "to be a string", value)
    return value


def _items(values: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """Return the list of strings or objects under a key, empty if missing, or raise ``InputError``."""
    value = values.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise _refused(key, f"to be a list of {'strings' if kind is str else 'objects'}", value)
    return value


def _refused(path: str, expected: str, value: object) -> InputError:
    """Return the error for an unexpected value."""
    got = "nothing" if value is None else f"{value!a:.60}"  # ASCII, since it is printed on a terminal
    return InputError(f"Expected {ascii(path)[1:-1]:.200} {expected}, got {got}.")
