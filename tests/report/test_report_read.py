"""Directories of runs, whole, unfinished, damaged and hostile."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import forged

import dpaudit
from dpaudit._io import read_array
from dpaudit.diagnostics._findings import FINDINGS
from dpaudit.errors import InputError
from dpaudit.experiments._analysis import RunScores
from dpaudit.report import Format, Report, Run, read_run
from dpaudit.report._report import _observations, read_own_run

Copy = Callable[..., Path]


def refused(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_is_read_as_it_was_written(runs: dict[str, Path]) -> None:
    values = json.loads((runs["broken"] / "result.json").read_text())
    found = read_run(runs["broken"])
    assert (found.name, found.verdict.name) == ("broken", values["verdict"])
    assert found.bound.epsilon == values["bound"]["epsilon"]
    assert [row.epsilon for row in found.methods] == [row["epsilon"] for row in values["methods"]]
    assert found.facts["steps"] == "20 of 20"
    assert found.settings["training.fault.factor"] == "0.4"
    assert found.versions["dpaudit"] == dpaudit.__version__


@pytest.mark.parametrize(
    ("names", "mode", "counted"),
    [
        (("log_likelihood_ratios", "present"), "end-to-end", "canary"),
        (("with_canary", "without_canary"), "many-runs", "trial"),
    ],
)
def test_scores_of_whole_trainings_are_read(names: tuple[str, str], mode: str, counted: str) -> None:
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=32) for name in names}
    if "present" in arrays:
        arrays["present"] = np.arange(32) < 16
    observations, word = _observations(RunScores(arrays, {"mode": mode}, {}))
    assert word == counted
    assert observations.with_canary.size == (16 if "present" in arrays else 32)


def test_a_result_of_a_training_of_ones_own_has_a_report_as_well() -> None:
    rng = np.random.default_rng(0)
    seen = dpaudit.Observations(
        with_canary=rng.normal(1, 0.5, 300), without_canary=rng.normal(0, 0.5, 300), normalized=True
    )
    claim = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
    run = Run.of(dpaudit.audit(seen, claim=claim), seen, name="mine", settings={"model": {"name": "x"}})
    assert run.figures.course is not None
    text = Report(runs=(run,), title="An audit of mine").to_text()
    assert ", but 4.38 is claimed<" in text
    assert "<dd>95 % confidence, p " in text.replace("&lt;", "<")
    assert "model.name" in text


@pytest.mark.parametrize(
    ("tradeoff", "is_of_any"),
    [(dpaudit.ApproximateDP(1e-5), True), (dpaudit.PureDP(), False), (dpaudit.Gaussian(), False)],
)
def test_an_epsilon_is_refuted_only_where_no_mechanism_is_assumed(
    tradeoff: dpaudit.TradeOff, is_of_any: bool
) -> None:
    seen = dpaudit.Observations(
        with_canary=np.full(2000, 10.0), without_canary=np.full(2000, -10.0), normalized=True
    )
    claim = dpaudit.Claim.approximate_dp(epsilon=1.0, delta=1e-5)
    run = Run.of(dpaudit.audit(seen, claim=claim, tradeoff=tradeoff), seen, name="mine")
    assert run.verdict is dpaudit.Verdict.VIOLATION
    assert ("This holds if" not in run.sentence) == is_of_any
    assert any(text.startswith("This holds if") for _, text in run.block.rows) != is_of_any


def test_findings_of_diagnostics_are_shown() -> None:
    rng = np.random.default_rng(0)
    seen = dpaudit.Observations(with_canary=rng.normal(1, 1, 50), without_canary=rng.normal(0, 1, 50))
    result = dpaudit.audit(seen, claim=dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5))
    from dpaudit.diagnostics import Check, Diagnosis  # noqa: PLC0415

    check = Check(name="noise-variance", p_value=1e-9, sentence="The noise is smaller.", estimate=0.5)
    found = Diagnosis.of([check], confidence=0.95)
    text = Report(runs=(Run.of(result, name="mine", diagnosis=found),), title="t").to_text()
    assert "1 finding in 1 test, at 95 % joint confidence." in text
    assert "noise-variance: The noise is smaller." in text
    assert "<dd>95 % confidence, " in text  # that of the bound: these tests have an error rate of their own
    assert "A finding means that the accounting does not describe this training run" in text


def test_a_report_says_what_the_tests_of_the_noise_found_or_that_they_were_not_run(
    runs: dict[str, Path], copied: Copy
) -> None:
    def told(folder: Path) -> list[str]:
        return [text for label, text in read_run(folder).details if label == "finding"]

    assert told(runs["correct"]) == []
    assert told(runs["broken"])[0].startswith("noise-variance")
    untested = Report(
        runs=(read_own_run(copied(lambda values: values.pop("diagnosis")), name="own"),), title="t"
    )
    assert "| errors |" not in untested.to_text(Format.MARKDOWN)
    assert "<h3>Tests</h3>" not in untested.to_text()
    page = Report.read([runs["correct"]]).to_text()
    assert "<h3>Tests</h3>" in page
    assert "Bound and tests share one error rate, and the verdict rests on both." in page


def test_findings_without_a_bound_above_the_claim_are_a_violation_of_the_mechanism(
    runs: dict[str, Path], copied: Copy
) -> None:
    tests = json.loads((runs["broken"] / "result.json").read_text())["diagnosis"]

    def flagged(values: dict[str, Any]) -> None:
        values |= {"diagnosis": tests, "verdict": "VIOLATION", "refuted": ["mechanism"]}

    run = read_own_run(copied(flagged, name="correct"), name="own")
    assert "| finding | noise" in Report(runs=(run,), title="t").to_text(Format.MARKDOWN)
    assert run.block.title == "VIOLATION (mechanism)"
    assert run.block.numbers.endswith("is for another mechanism")


def test_an_unfinished_run_is_said_to_be_unfinished(copied: Copy, tmp_path: Path) -> None:
    folder = copied()
    for name in ("result.json", "manifest.json"):
        (folder / name).unlink()
    assert refused(folder).endswith("is not a finished run: resume it with dpaudit run.")
    assert refused(tmp_path) == f"{tmp_path} is not a finished run: it has no result.json."
    assert refused(tmp_path / "no").endswith("does not exist.")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not valid JSON"),
        ("[1]", "must contain a JSON object"),
        ('{"schema_version": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"schema_version": 2}', "result.json"),
    ],
)
def test_a_damaged_result_is_refused(copied: Copy, text: str, sentence: str) -> None:
    folder = copied()
    (folder / "result.json").write_text(text)
    assert sentence in refused(forged(folder))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("verdict", "SAFE"),
        ("verdict", "VIOLATION"),
        ("sentence", "All is well. This holds if you trust me."),
        ("bound.confidence", 5),
        ("bound.confidence", 1.0),
        ("bound.epsilon", -1),
        ("bound.epsilon", 10**400),
        ("bound.epsilon", True),
        ("bound.epsilon", "inf"),
        ("bound.kind", "certain"),
        ("bound.kind", "heuristic"),
        ("bound.counts.false_positives", 10**9),
        ("bound.assumptions", "none"),
        ("bound.threshold", "inf"),
        ("bound.threshold_rule", {"type": "BestOf", "chosen": "x", "rules": [1], "shares": []}),
        ("bound.threshold_rule", {"type": "CountedOnce", "fixed": 1, "counts": 2}),
        ("bound.inference", {"type": "Gaussian"}),
        ("claim.summary", ["x"]),
        ("claim.epsilon", 0.0),
        ("claim.parameter", "inf"),
        ("methods", [1]),
        ("power", None),
        ("not_covered", [1]),
        ("likely_causes", [["a"]]),
        ("estimate", [1]),
        ("estimate.kind", 10**20),
        ("estimate.noise_ratio.low", 1e9),
        ("estimate.epsilon", 4.0),
        ("estimate.roc.fpr", [0.5]),
        ("estimate.roc.low", [2.0] * 20),
        ("estimate.missing", 3),
    ],
)
def test_a_value_that_cannot_be_is_refused(copied: Copy, place: str, value: Any) -> None:
    def change(values: dict[str, Any]) -> None:
        *outer, key = place.split(".")
        for name in outer:
            values = values[name]
        values[key] = value

    assert refused(copied(change))


def test_an_infinite_number_is_refused(copied: Copy) -> None:
    folder = copied()
    text = (folder / "result.json").read_text().replace('"power": {', '"power": {"more": 1e999, ')
    (folder / "result.json").write_text(text)
    assert refused(forged(folder)).endswith("is damaged: it is not as a run writes it.")


@pytest.mark.parametrize("verdict", ["NO_VIOLATION", "UNDERPOWERED"])
def test_a_verdict_that_does_not_follow_from_its_numbers_is_refused(copied: Copy, verdict: str) -> None:
    folder = copied(lambda values: values.update(verdict=verdict), name="broken")
    assert refused(folder).startswith("verdict is ")


def test_a_pickle_is_never_opened(copied: Copy, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    folder = copied()
    np.save(folder / "scores.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    assert "does not contain an array, or is damaged" in refused(forged(folder))
    (folder / "scores.npy").write_bytes(pickle.dumps(Trap()))
    assert "does not contain an array, or is damaged" in refused(forged(folder))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["result.json", "config.json", "manifest.json", "scores.npy", "present.npy"])
@pytest.mark.usefixtures("no_waiting")
def test_a_pipe_in_the_place_of_a_file_is_refused(copied: Copy, name: str) -> None:
    path = copied() / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert refused(path.parent).startswith(f"{path} must be a file of the run, but it is not a file")


def test_an_array_of_holes_takes_no_memory(copied: Copy) -> None:
    path = copied() / "scores.npy"
    with path.open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (2**30,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 2**33)
    assert path.stat().st_blocks * 512 < 1_000_000
    with pytest.raises(InputError, match=r"at most 4,294,967,296 are read"):
        read_array(path, "f")


def test_observations_that_are_no_scores_are_refused(copied: Copy) -> None:
    folder = copied()
    scores = np.load(folder / "scores.npy")
    scores[3, 4] = np.nan
    np.save(folder / "scores.npy", scores)
    assert str(folder) in refused(forged(folder))
    np.save(folder / "scores.npy", scores[:5])
    assert "damaged" in refused(forged(folder))
    np.save(folder / "scores.npy", np.array(["a"]))
    assert "does not contain numbers" in refused(forged(folder))


def test_a_curve_of_an_unknown_name_is_not_drawn_and_not_evaluated(copied: Copy, tmp_path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        call = f"__import__('pathlib').Path({str(tmp_path / 'sprung')!r}).touch()"
        values["bound"]["tradeoff"] = {"type": call}

    folder = copied(change)
    assert str(folder) in refused(folder)
    assert read_own_run(folder, name="own").figures.plane is None
    assert not (tmp_path / "sprung").exists()


def test_another_claim_than_that_of_the_config_is_refused(copied: Copy) -> None:
    text = refused(copied(lambda values: values.update(noise_multiplier=3.0)))
    assert text.startswith("noise_multiplier is ")
    assert "but 1.0 in config.json: one of them has changed." in text


def test_runs_of_the_same_name_are_told_apart(runs: dict[str, Path], copied: Copy) -> None:
    found = Report.read([runs["correct"], copied()])
    assert len({run.name for run in found.runs}) == 2


def test_a_run_without_estimates_has_none(copied: Copy) -> None:
    run = read_own_run(copied(lambda values: values.pop("estimate")), name="own")
    assert run.estimate is None
    assert run.to_dict()["estimate"] is None
    assert "estimate" not in dict(run.details)


def test_estimates_are_read_as_they_were_written(runs: dict[str, Path]) -> None:
    stored = json.loads((runs["broken"] / "result.json").read_text())["estimate"]
    run = read_run(runs["broken"])
    assert run.estimate is not None
    assert run.estimate.to_dict() == stored
    assert run.estimate.noise_ratio is not None
    assert run.estimate.noise_ratio.low < 0.4 < run.estimate.noise_ratio.high
    assert dict(run.details)["estimate"].startswith("effective noise 0.")
    page = Report(runs=(run,), title="A run").to_text(Format.HTML)
    assert "True positive rates" in page
    assert "an estimate for this attack, not a bound" in page


def test_runs_are_shown_with_violations_first_and_shared_sentences_once(report: Report) -> None:
    text = report.to_text()
    assert [run.name for run in report.runs] == ["correct", "broken"]
    assert text.index('<h2 id="run-0">broken') < text.index('<h2 id="run-1">correct')
    shared = set(report.runs[0].not_covered) & set(report.runs[1].not_covered)
    assert shared
    assert all(text.count(escape(sentence)) == 1 for sentence in shared)
    assert not re.search(r"expected=\d\.\d{6,}", text)


def test_a_page_explains_each_finding_and_the_certainty_of_a_violation(runs: dict[str, Path]) -> None:
    run = read_run(runs["broken"])
    text = Report(runs=(run,), title="t").to_text()
    assert run.diagnosis is not None
    assert run.diagnosis.findings
    for finding in run.diagnosis.findings:
        assert escape(FINDINGS[finding.name].matters) in text
        assert escape(finding.sentence) in text
    assert all(escape(cause) in text for cause in run.likely_causes)
    assert "95 % confidence, p &lt; 1e-12, " in text
    levels = set(
        re.findall(r"(\d+) % confidence", text[text.index('<div class="dpaudit') :].partition("<figure")[0])
    )
    assert levels == {"95"}
