"""The directory of a run, read without trusting it.

The observations that a run keeps, in whichever form its audit has them. Arrays of a run, which may be of
anybody: no pickle, and no memory without an end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dpaudit import _io
from dpaudit._io import LARGEST_ARRAY, NOT_AN_ARRAY, map_array, read_json
from dpaudit.errors import InputError
from dpaudit.report._figures import Figures, rebuilt_hypothesis, rebuilt_tradeoff
from dpaudit.report._run import Run, read_audit
from dpaudit.report._values import Values, fit, flattened
from dpaudit.stats import Observations
from dpaudit.stats._serialization import SCHEMA_VERSION, upgraded


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


@dataclass(frozen=True)
class Observed:
    """Observations, if there are any; what each is of; and whether they came one after the other."""

    observations: Observations | None
    counted: str
    in_order: bool


def read_observations(folder: Path, *, paired: bool) -> Observed:
    """Scores of steps, scores of whole trainings, or one likelihood ratio a canary.

    ``paired`` says that a step has one score without the canary and one with it, and no coins.
    """
    try:
        return (
            _of_steps(folder, paired)
            or _of_trials(folder)
            or _of_canaries(folder)
            or Observed(None, "observation", in_order=False)
        )
    except InputError as error:
        if str(folder) in str(error):
            raise
        raise InputError(f"The observations in {folder} are damaged. {error}") from error


def _of_steps(folder: Path, paired: bool) -> Observed | None:
    scores, present = read_array(folder / "scores.npy", "f"), read_array(folder / "present.npy", "b")
    if scores is None or present is None:
        return None
    if paired:
        scores, present = scores.reshape(-1), present.reshape(-1)
    return Observed(Observations.from_presence(scores, present), "step", in_order=True)


def _of_trials(folder: Path) -> Observed | None:
    """One score a training, of trainings with the canary and without it."""
    sides = [read_array(folder / f"{name}.npy", "f") for name in ("with_canary", "without_canary")]
    if sides[0] is None or sides[1] is None:
        return None
    found = Observations(with_canary=sides[0], without_canary=sides[1])
    return Observed(found, "trial", in_order=True)


def _of_canaries(folder: Path) -> Observed | None:
    """One score a canary of the same training: they have no order in time."""
    ratios = read_array(folder / "log_likelihood_ratios.npy", "f")
    present = read_array(folder / "present.npy", "b")
    if ratios is None or present is None:
        return None
    return Observed(Observations.from_presence(ratios, present), "canary", in_order=False)


_MOST_NAMES = 10  # in a sentence


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """What a finished ``dpaudit run`` left in its directory; the name is the directory's, if none is given.

    Files of anybody can be read: nothing in them is run, and what is not as it should be is refused.
    """
    folder = _io.expanded(path)
    values = _result(folder)
    audit = read_audit(values)
    observed = read_observations(folder, paired=values.raw.get("mode") == "paper")
    tradeoff = rebuilt_tradeoff(audit["bound"].tradeoff)
    figures = Figures.of(
        observed.observations,
        claim=audit["claim"],
        bound=audit["bound"],
        tradeoff=tradeoff,
        hypothesis=rebuilt_hypothesis(values, tradeoff, audit["claim"].parameter),
        in_order=observed.in_order,
    )
    return Run(
        name=fit(name or folder.resolve().name),
        facts=dict(_facts(values)),
        settings=_settings(folder),
        versions=_versions(folder),
        figures=figures,
        counted=observed.counted,
        **audit,
    )


def _result(folder: Path) -> Values:
    if not folder.is_dir():
        raise InputError(f"Expected {folder} to be the directory of a run, but there is none.")
    path = folder / "result.json"
    if not path.exists():
        begun = (folder / "config.json").exists()
        reason = "but it is not finished: call dpaudit run again" if begun else "but it has no result.json"
        raise InputError(f"Expected a finished run in {folder}, {reason}.")
    values = Values(upgraded(read_json(path)), str(path))
    _require_no_demo(folder, values)
    version = values.whole("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"Expected schema_version={SCHEMA_VERSION} in {path}, got {version}: another version of dpaudit "
            "wrote it."
        )
    return values


def _require_no_demo(folder: Path, values: Values) -> None:
    """A demo keeps its runs in folders of their own, and what it found of all of them above."""
    if values.has("schema_version") or not isinstance(values.raw.get("trainings"), list):
        return
    inner = sorted(str(one.parent) for one in folder.glob("*/result.json"))
    runs = f"its runs: {', '.join(inner[:_MOST_NAMES])}" if inner else "which has no run any more"
    raise InputError(f"Expected {folder} to be the directory of a run, got that of dpaudit demo; {runs}.")


def _settings(folder: Path) -> dict[str, str]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    stored = Values(read_json(path), str(path))
    resolved = stored.section("resolved").raw if stored.has("resolved") else {}
    return flattened(stored.section("config").raw) | {
        f"resolved.{label}": text for label, text in flattened(resolved).items()
    }


def _versions(folder: Path) -> dict[str, str]:
    path = folder / "versions.json"
    return flattened(read_json(path)) if path.exists() else {}


def _facts(values: Values) -> Iterator[tuple[str, str]]:
    """What a run has beside its verdict, as far as it has it."""
    for key in ("mode", "threat_model"):
        if values.has(key):
            yield key.replace("_", " "), values.text(key)
    if values.has("num_done") and values.has("num_steps"):
        early = ", stopped at the first violation" if values.raw.get("stopped_early") is True else ""
        yield "steps", f"{values.whole('num_done'):,} of {values.whole('num_steps'):,}{early}"
    for key, label in (("num_canaries", "canaries"), ("num_parameters", "parameters of the model")):
        if values.has(key):
            yield label, f"{values.whole(key):,}"
    for key, label in (("noise_multiplier", "noise multiplier"), ("sample_rate", "sample rate")):
        if values.has(key):
            yield label, f"{values.number(key):.6g}"
    if values.has("accuracy"):
        yield "test accuracy", f"{values.share('accuracy'):.3f}"
    if values.has("timing") and values.section("timing").has("training_seconds"):
        yield "training took", f"{values.section('timing').number('training_seconds'):,.1f} s"
