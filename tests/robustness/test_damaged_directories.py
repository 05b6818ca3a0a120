"""Random damage to the directories of runs: no number or verdict changes without being told.

A damage is a flipped bit, a file that is cut, edited, emptied, removed, added, or swapped with that of
another run. After it, `verify`, `report` and `run` print what they print of the whole directory, or refuse in
a sentence.
"""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import altered, damaged, examples
from damage import forged as resealed
from digits_config import digits_config, models_config
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dpaudit.cli._app import app
from dpaudit.experiments import Progress, Running, parse_config, run
from dpaudit.experiments._directory import seal, with_checksum

SMALL = digits_config(
    "{output}",
    hidden=4,
    num_examples=100,
    num_steps=3,
    top="checkpoint_seconds = 0",
    audit='num_canaries = 4\nmethods = ["f-DP(CP)"]',
)
ROOT = Path(__file__).parents[2]
PRIVATE = ("config.json", "checkpoint.pt", "trials.jsonl")
# depend on the clock, or on the place of the directory
NOT_NUMBERS = ("timing", "provenance", "seal", "remarks", "name", "notes", "settings", "facts", "sealed")


class StoppedError(Exception):
    """Stands for a power failure."""


class Runs:
    """Directories of a run, as they were left, and what is printed of them."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.text = folder, text
        self.at = folder / "run"  # always in the same place: its path is part of what is printed
        self.config = folder / "run.toml"
        self.config.write_text(text.replace("{output}", str(self.at)))
        self._make("other", "seed=4")
        self._make("finished")
        self._make("unfinished", stops=True)
        self.expected = {}
        for name in ("finished", "unfinished"):
            self.restored(name)
            self.expected[name] = self.printed()

    def _make(self, name: str, *changes: str, stops: bool = False) -> None:
        def stop(progress: Progress | Running) -> None:
            done = progress.num_done if isinstance(progress, Progress) else progress.progress.num_done
            if done >= 2:
                raise StoppedError

        config = parse_config(self.config.read_text(), "run.toml", changes)
        if stops:
            with pytest.raises(StoppedError):
                run(config, watch=stop, trials=stop)
        else:
            run(config)
        self.at.rename(self.folder / name)

    def restored(self, name: str) -> None:
        """Put the directory in its place, whole."""
        shutil.rmtree(self.at, ignore_errors=True)
        shutil.copytree(self.folder / name, self.at)

    def printed(self, *commands: str) -> dict[str, tuple[int, Any, str]]:
        """The status, the numbers and the sentences of each of these or all commands, one after another."""
        page = self.folder / "page.json"
        words = {
            "verify": ("verify", self.at),
            "report": ("report", self.at, "--output", page),
            "run": ("run", self.config),
            "verify again": ("verify", self.at),
        }
        return {name: self._call(*words[name]) for name in commands or words}

    @staticmethod
    def _call(*words: object) -> tuple[int, Any, str]:
        arguments = [*map(str, words), "--json"]
        found = CliRunner().invoke(app, arguments, env={"DPAUDIT_ENVIRONMENT": "as-is"})
        assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
        assert "Traceback" not in found.output
        printed = numbers(json.loads(found.stdout)) if found.stdout else None
        return found.exit_code, printed, found.stderr + found.stdout


def numbers(values: Any) -> Any:
    """What is printed, without what depends on the clock or the place."""
    if isinstance(values, dict):
        return {key: numbers(one) for key, one in values.items() if key not in NOT_NUMBERS}
    return [numbers(one) for one in values] if isinstance(values, list) else values


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of one training run of three steps."""
    return Runs(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Of forty models in a store."""
    return Runs(tmp_path_factory.mktemp("many"), models_config("{output}", num_examples=100))


Damage = Callable[[np.random.Generator, Path], None]


def _flip(rng: np.random.Generator, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def _cut(rng: np.random.Generator, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.integers(len(content))])


def _empty(_: np.random.Generator, path: Path) -> None:
    path.write_bytes(b"")


def _remove(_: np.random.Generator, path: Path) -> None:
    path.unlink()


def _link(_: np.random.Generator, path: Path) -> None:
    target = path.parent.parent / f"target of {path.name}"
    shutil.copy(path, target)
    path.unlink()
    path.symlink_to(target)


def _edit(rng: np.random.Generator, path: Path) -> None:
    """Change one value and leave the file valid."""
    if path.suffix == ".npy":
        values = np.load(path)
        place = np.unravel_index(rng.integers(values.size), values.shape)
        values[place] = not values[place] if values.dtype == np.bool_ else values[place] + 3.0
        np.save(path, values)
    elif path.suffix == ".json":
        edited = json.loads(path.read_text())
        leaves = list(_leaves(edited))
        inner, key = leaves[rng.integers(len(leaves))]
        inner[key] = _other(inner[key])
        path.write_text(json.dumps(edited))
    elif path.suffix == ".jsonl":
        path.write_text(path.read_text().replace('"score": ', '"score": 3', 1))
    else:
        _flip(rng, path)


def _leaves(values: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            yield from _leaves(value)
        else:
            yield values, key


def _other(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return {"NO_VIOLATION": "VIOLATION", "VIOLATION": "NO_VIOLATION"}.get(value, f"{value}0")


DAMAGES: dict[str, Damage] = {
    "flip": _flip,
    "cut": _cut,
    "edit": _edit,
    "empty": _empty,
    "remove": _remove,
    "link": _link,
}
ADDED = "log_likelihood_ratios.npy", "with_canary.npy", "trials.jsonl", "canary.json"


def damage(rng: np.random.Generator, runs: Runs, state: str) -> str:
    """Damage the directory in one way; returns what was done, empty if nothing has changed."""
    names = sorted(path.name for path in runs.at.iterdir() if path.name != ".lock")
    kind = str(rng.choice([*DAMAGES, "flip", "edit", "swap", "add"]))
    name = str(rng.choice(ADDED if kind == "add" else names))
    path = runs.at / name
    before = path.read_bytes() if path.exists() else None
    if kind == "swap":
        other = runs.folder / "other" / name
        if other.exists():
            shutil.copy(other, path)
    elif kind == "add":
        if not path.exists():
            np.save(runs.at / "added.npy", np.linspace(-1, 1, 12))
            (runs.at / "added.npy").rename(path)
    else:
        DAMAGES[kind](rng, path)
    is_same = path.exists() and not path.is_symlink() and path.read_bytes() == before
    return "" if is_same else f"{kind} {name} of the {state} run"


def is_told(found: tuple[int, Any, str], runs: Runs, name: str) -> bool:
    """Refused, in sentences that name the directory or one of its files."""
    status, _, text = found
    return status == 2 and (str(runs.at) in text or name in text) and len(text) < 3000


def check(runs: Runs, state: str, seed: int) -> str:
    """Damage the directory, and compare what is printed with what is printed of the whole one."""
    runs.restored(state)
    done = damage(np.random.default_rng([seed, len(state)]), runs, state)
    if not done:
        return ""
    kind, name = done.split()[:2]
    expected = runs.expected[state]
    for command, found in runs.printed().items():
        is_equal = found[:2] == expected[command][:2]
        assert is_equal or is_told(found, runs, name), (seed, done, command, found)
        # a file with seeds may be removed, and the manifest may lose the end of its last line
        is_harmless = (kind == "remove" and name in PRIVATE) or (name == "manifest.json" and kind == "cut")
        if state == "finished" and command == "verify" and not is_harmless:
            assert found[0] == 2, (seed, done)
    return done


@pytest.mark.parametrize("seed", range(10))
def test_a_damage_to_a_finished_run_is_told(seed: int, small: Runs) -> None:
    check(small, "finished", seed)


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json"])
def test_an_unfinished_run_does_not_go_on_with_a_file_of_another_run(name: str, small: Runs) -> None:
    small.restored("unfinished")
    shutil.copy(small.folder / "other" / name, small.at / name)
    status, printed, text = small.printed()["run"]
    assert status == 2
    assert {*printed} == {"error", "exit_status"}
    assert name in text or "instead of the stored" in text


@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json"])
def test_an_unfinished_run_does_not_go_on_with_a_link(name: str, small: Runs) -> None:
    """It could be finished, but its seal would be refused."""
    small.restored("unfinished")
    _link(np.random.default_rng(0), small.at / name)
    for found in small.printed("verify", "run").values():
        assert found[0] == 2
        assert f"{small.at / name} must be a file of the run, but it is a link; restore it" in found[2]


def test_a_config_that_was_edited_before_the_first_checkpoint_is_refused(small: Runs) -> None:
    small.restored("unfinished")
    (small.at / "checkpoint.pt").unlink()
    path = small.at / "config.json"
    values = json.loads(path.read_text())
    values["resolved"]["noise_multiplier"] = 2.0
    path.write_text(json.dumps(values))
    found = small.printed()
    for command in ("verify", "run"):
        assert found[command][0] == 2
        assert f"{path} was changed after the run wrote it" in found[command][2]


@pytest.mark.long
@pytest.mark.parametrize("state", ["finished", "unfinished"])
@pytest.mark.parametrize("name", ["small", "many"])
def test_no_number_changes_without_being_told(name: str, state: str, request: pytest.FixtureRequest) -> None:
    """75 damages of each kind of directory, 300 in all."""
    runs, done, seed = request.getfixturevalue(name), [], 1000
    while len(done) < 75:
        found = check(runs, state, seed)
        done += [found] if found else []
        seed += 1
    assert {one.split()[0] for one in done} >= {*DAMAGES, "swap"}


def _by_another_method(values: dict[str, Any]) -> None:
    """Put the bound of another method, which is right, in the place of that of the verdict."""
    row = values["methods"][0]
    values["bound"] = {key: row[key] for key in values["bound"]}


def _as_of_another_version(values: dict[str, Any], version: str | None = "0.3.0") -> None:
    values["bound"].update(epsilon=0.5)
    if version is None:
        del values["provenance"]
    else:
        values["provenance"]["packages"]["dpaudit"] = version


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "verdict": lambda values: values.update(verdict="NO_VIOLATION", refuted=[]),
    "verdict alone": lambda values: values.update(verdict="NO_VIOLATION"),
    "refuted": lambda values: values.update(refuted=["privacy"]),
    "refuted, none": lambda values: values.pop("refuted"),
    "sentence": lambda values: values.update(sentence="The training run is private."),
    "bound.epsilon": lambda values: values["bound"].update(epsilon=0.5),
    "bound.parameter": lambda values: values["bound"].update(parameter=0.4),
    "bound.kind": lambda values: values["bound"].update(kind="heuristic"),
    "bound.statement": lambda values: values["bound"].update(statement="epsilon >= 0.1 at delta = 1e-05"),
    "bound.label": lambda values: values["bound"].update(label="Gaussian() + JointExact()"),
    "bound.assumptions": lambda values: values["bound"]["assumptions"].pop(),
    "bound.counts": lambda values: values["bound"]["counts"].update(false_positives=0, false_negatives=0),
    "bound.confidence": lambda values: [
        values["bound"].update(confidence=0.9),
        values.update(confidence=0.9),
    ],
    "confidence, higher": lambda values: [
        one.update(confidence=0.99) for one in (values, values["bound"], *values["methods"])
    ],
    "bound.inference": lambda values: values["bound"].update(inference={"type": "Unknown"}, epsilon=0.5),
    "bound, by another method": _by_another_method,
    "claim.epsilon": lambda values: values["claim"].update(epsilon=50.0),
    "claim.summary": lambda values: values["claim"].update(summary="DP-SGD: epsilon = 0.1 at delta = 1e-05"),
    "noise_multiplier": lambda values: values.update(noise_multiplier=0.5),
    "noise_multiplier, a little": lambda values: values.update(noise_multiplier=1.0000001),
    "claim.delta, a little": lambda values: values["claim"].update(delta=1.05e-5),
    "bound.delta, a little": lambda values: values["bound"].update(delta=1.05e-5),
    "methods.f-DP(CP).epsilon": lambda values: values["methods"][0].update(epsilon=0.25),
    "methods, one less": lambda values: values["methods"].pop(),
    "methods, none": lambda values: values.update(methods=[]),
    "refuted, as a table": lambda values: values.update(refuted={"nothing": "at all"}),
    "findings": lambda values: values["diagnosis"]["tests"][0].update(p_value=1e-12),
    "diagnosis": lambda values: values.update(diagnosis=None),
    "diagnosis.confidence": lambda values: values["diagnosis"].update(confidence=0.95),
    "estimate": lambda values: values["estimate"].update(confidence=0.99),
    "num_done": lambda values: values.update(num_done=300),
    "stopped_early": lambda values: values.update(stopped_early=True, methods=[]),
    "audit": lambda values: values["audit"].update(confidence=0.9),
    "provenance": lambda values: values["provenance"].update(data="0" * 64),
    "provenance.platform": lambda values: values["provenance"].update(platform="Another"),
    "provenance.started": lambda values: values["provenance"].update(started="2020-01-01T00:00:00+00:00"),
    "another version": _as_of_another_version,
    "version 0.1": lambda values: _as_of_another_version(values, "0.1.0"),
    "schema": lambda values: values.update(schema_version=1),
    "no version": lambda values: _as_of_another_version(values, None),
}


def forged(runs: Runs, change: Callable[[dict[str, Any]], object]) -> dict[str, tuple[int, Any, str]]:
    """Edit the result of a finished run together with its manifest; what is then printed of it."""
    runs.restored("finished")
    path = runs.at / "result.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    seal(runs.at)
    return runs.printed("verify", "report", "run")


@pytest.mark.parametrize("key", FORGED)
def test_a_number_that_was_edited_together_with_the_manifest_is_derived_again(key: str, small: Runs) -> None:
    found = forged(small, FORGED[key])
    for command in ("verify", "report", "run"):
        assert found[command][0] == 2
        assert "result.json" in found[command][2]


def test_a_forged_number_is_refused_with_the_version_that_it_is_said_to_be_of(small: Runs) -> None:
    found = forged(small, _as_of_another_version)
    assert "one of them has changed, or version 0.3.0 of dpaudit" in found["verify"][2]
    named = forged(small, lambda values: values["provenance"]["packages"].update(dpaudit="0.3.0"))
    assert "but '0.2.0' in provenance.json: one of them has changed" in named["verify"][2]
    # where nothing but the name of the version differs, nothing has to be excused
    path = small.at / "provenance.json"
    starts = json.loads(path.read_text())["starts"]
    starts[0]["packages"]["dpaudit"] = "0.3.0"
    path.write_text(json.dumps(with_checksum({"starts": starts})))
    seal(small.at)
    assert small._call("verify", small.at)[0] == 0


UNPROTECTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "which of them were run": lambda values: values["diagnosis"].update(
        tests=values["diagnosis"]["tests"][:1]
    ),
    "p-values": lambda values: values["diagnosis"]["tests"][0].update(p_value=0.99),
    "estimates": lambda values: values["diagnosis"]["tests"][0].update(estimate=0.5),
    "the measured noise": lambda values: values["diagnosis"]["noise"].update(ratio=9.0),
    "power": lambda values: values["power"].update(probability=0.5),
    "likely causes": lambda values: values.update(likely_causes=["none"]),
    "notes": lambda values: values.update(notes=["All is well."]),
    "`not_covered`": lambda values: values.update(not_covered=[]),
    "number of parameters": lambda values: values.update(num_parameters=10**9),
    "accuracy": lambda values: values.update(accuracy=1.0),
    "times": lambda values: values["timing"].update(training_seconds=1e-3),
    "0.001 %": lambda values: values["claim"].update(epsilon=values["claim"]["epsilon"] * (1 + 9e-6)),
}


@pytest.mark.parametrize("words", UNPROTECTED)
def test_what_a_forger_can_change_is_listed(words: str, small: Runs) -> None:
    """Only the digest of the seal, if it was published, shows these."""
    before = json.loads((small.folder / "finished" / "manifest.json").read_text())["seal"]
    found = forged(small, UNPROTECTED[words])
    assert found["verify"][0] == 0
    assert before not in found["verify"][2]
    listed = (ROOT / "docs" / "experiments.md").read_text().partition("but a forger can change")[2]
    assert words in listed.partition("Publish the seal")[0]


@pytest.mark.parametrize(
    ("key", "value"), [("confidence", "high"), ("methods", 3), ("first_steps", "all"), ("threshold", "low")]
)
def test_a_setting_that_no_run_writes_is_refused_without_a_config(key: str, value: Any, small: Runs) -> None:
    small.restored("finished")
    (small.at / "config.json").unlink()
    path = small.at / "result.json"
    values = json.loads(path.read_text())
    values["audit"][key] = value
    path.write_text(json.dumps(values))
    seal(small.at)
    status, _, text = small._call("verify", small.at)
    assert status == 2
    assert f"audit.{key} is not as a run writes it" in text


@pytest.mark.parametrize("key", ["bound.counts", "methods, one less", "audit", "bound, by another method"])
def test_a_published_run_without_its_config_is_derived_again_all_the_same(key: str, small: Runs) -> None:
    small.restored("finished")
    (small.at / "config.json").unlink()
    assert small._call("verify", small.at)[0] == 0
    path = small.at / "result.json"
    values = json.loads(path.read_text())
    FORGED[key](values)
    path.write_text(json.dumps(values))
    seal(small.at)
    status, _, text = small._call("verify", small.at)
    assert status == 2
    assert "result.json" in text


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("small", "scores"),
        ("small", "present"),
        pytest.param("many", "with_canary", marks=pytest.mark.long),
    ],
)
def test_a_sealed_run_without_its_scores_is_refused(
    name: str, file: str, request: pytest.FixtureRequest
) -> None:
    runs = request.getfixturevalue(name)
    runs.restored("finished")
    (runs.at / f"{file}.npy").unlink()
    seal(runs.at)
    found = runs.printed("verify", "report", "run")
    for command in ("verify", "report", "run"):
        assert found[command][0] == 2
        assert f"{runs.at / file}.npy, from which the numbers of the run follow" in found[command][2]


def test_scores_of_another_kind_of_run_are_refused(small: Runs) -> None:
    small.restored("finished")
    for name in ("with_canary", "without_canary"):
        np.save(small.at / f"{name}.npy", np.linspace(0, 1, 20))
    seal(small.at)
    status, _, text = small._call("verify", small.at)
    assert status == 2
    assert f"{small.at / 'with_canary.npy'} does not belong to a run of mode one-run" in text


def test_a_private_file_that_a_killed_process_left_may_be_removed(small: Runs) -> None:
    small.restored("finished")
    path = small.at / "trials.jsonl"
    path.write_bytes(b"seeds")
    assert "trials.jsonl" in small._call("verify", small.at)[2]
    seal(small.at)
    assert small._call("verify", small.at)[0] == 0
    path.unlink()
    status, _, text = small._call("verify", small.at)
    assert status == 0
    assert "Removed since the run was sealed: trials.jsonl." in text


def test_a_run_that_ended_before_it_was_sealed_is_sealed_by_the_next_one(small: Runs) -> None:
    small.restored("finished")
    (small.at / "manifest.json").unlink()
    found = small.printed()
    assert [found[one][0] for one in ("verify", "report")] == [2, 2]
    assert '"status": "unsealed"' in found["verify"][2]
    assert "manifest.json" in found["report"][2]
    assert found["run"][:2] == small.expected["finished"]["run"][:2]
    assert found["verify again"][:2] == small.expected["finished"]["verify"][:2]


def test_a_report_and_notes_of_the_user_are_not_part_of_the_seal(small: Runs) -> None:
    small.restored("finished")
    for name in ("report.html", "notes.txt"):
        (small.at / name).write_text("mine")
    status, printed, text = small._call("verify", small.at)
    assert (status, printed) == small.expected["finished"]["verify"][:2]
    assert "notes.txt" in text
    assert "report.html" not in text


@pytest.mark.parametrize("name", ["result.json", "config.json"])
@examples(40)
@given(data=st.data())
def test_strange_values_are_shown_or_refused(name: str, data: st.DataObject, small: Runs) -> None:
    small.restored("finished")
    path = small.at / name
    path.write_text(json.dumps(data.draw(altered(json.loads(path.read_text())))))
    resealed(small.at)
    status, printed, text = small._call("run", small.config)
    assert status in (0, 1, 3) or {*printed} == {"error", "exit_status"}
    assert "\x1b" not in text


@pytest.mark.parametrize("resolved", [{}, {"resolved": 3}, {"resolved": {"seed": "three"}}])
def test_a_run_without_the_values_that_it_started_with_is_refused(
    resolved: dict[str, Any], small: Runs
) -> None:
    small.restored("unfinished")
    path = small.at / "config.json"
    config = json.loads(path.read_text())["config"]
    path.write_text(json.dumps(with_checksum({"config": config, **resolved})))
    status, _, text = small._call("run", small.config)
    assert status == 2
    assert f"{path} has no " in text


def test_a_result_that_was_changed_is_not_shown_in_part(small: Runs) -> None:
    small.restored("finished")
    path = small.at / "result.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "timing": None}))
    resealed(small.at)
    status, _, text = small._call("run", small.config)
    assert status == 2
    assert "result.json is damaged" in text
    path.unlink()
    assert small._call("run", small.config)[:2] == small.expected["finished"]["run"][:2]
    assert json.loads(path.read_text())["timing"] is not None


def _with_checkpoint(runs: Runs, content: bytes) -> tuple[int, Any, str]:
    """Resume an unfinished run from a checkpoint with a digest that fits."""
    runs.restored("unfinished")
    (runs.at / "checkpoint.pt").write_bytes(content)
    resealed(runs.at)
    return runs._call("run", runs.config)


@examples(25)
@given(data=st.data())
def test_a_damaged_checkpoint_is_refused_or_goes_on(data: st.DataObject, small: Runs) -> None:
    whole = io.BytesIO((small.folder / "unfinished" / "checkpoint.pt").read_bytes())
    edited = io.BytesIO()
    with zipfile.ZipFile(whole) as before, zipfile.ZipFile(edited, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(name, data.draw(damaged(content)) if name.endswith("data.pkl") else content)
    assert _with_checkpoint(small, edited.getvalue())[0] in (0, 1, 2, 3)


class _Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_checkpoint_with_code_or_packed_is_refused_and_not_run(small: Runs, tmp_path: Path) -> None:
    harmful, saved, packed = {"training": _Harmful(tmp_path / "harm")}, io.BytesIO(), io.BytesIO()
    torch.save(harmful, saved)
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data/0", b"\0" * 10_000_000)
    for content in (pickle.dumps(harmful), saved.getvalue(), packed.getvalue()):
        status, _, text = _with_checkpoint(small, content)
        assert status == 2
        assert "The checkpoint" in text
    assert not (tmp_path / "harm").exists()
