"""The directory of a run, read without trusting it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dpaudit import _files
from dpaudit._foreign import read_json
from dpaudit.errors import InputError
from dpaudit.report._observed import read_observations
from dpaudit.report._rebuild import rebuilt_hypothesis, rebuilt_tradeoff
from dpaudit.report._run import Run, read_audit
from dpaudit.report._settings import flattened
from dpaudit.report._text import fit
from dpaudit.report._values import Values
from dpaudit.report.figures import Figures

__all__ = ["read_run"]

_SCHEMA_VERSION = 1
_MOST_NAMES = 10  # in a sentence


def read_run(path: str | Path, *, name: str | None = None) -> Run:
    """What a finished ``dpaudit run`` left in its directory; the name is the directory's, if none is given.

    Files of anybody can be read: nothing in them is run, and what is not as it should be is refused.
    """
    folder = _files.expanded(path)
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
    values = Values(read_json(path), str(path))
    _require_no_demo(folder, values)
    version = values.whole("schema_version")
    if version != _SCHEMA_VERSION:
        raise InputError(
            f"Expected schema_version={_SCHEMA_VERSION} in {path}, got {version}: another version of dpaudit "
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
