"""A fact that a correct run may have is shown in every form of a result, and refutes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

import dpaudit
from dpaudit.cli._app import app
from dpaudit.cli._console import output
from dpaudit.cli._result_table import Shown, print_block
from dpaudit.diagnostics import CheckResults, Diagnosis, Finding, _findings
from dpaudit.observers.opacus import _observe
from dpaudit.pytest_plugin._fixture import DpAudit
from dpaudit.pytest_plugin._suite import SuiteAudits
from dpaudit.recording import PerStep, Recorder
from dpaudit.report import Format, Report, Run, schema

CLAIM = dpaudit.Claim.gaussian(noise_multiplier=1.0, delta=1e-5)
CALL = "recorder.replay(train_step)"
FACT = Finding.certain("decayed-weights", "2 parameters changed after the update.")
SHOWN = f"decayed-weights ({CALL} decides): 2 parameters changed after the update."


class Decayed:
    """A check whose facts may be innocent."""

    def __init__(self, *facts: Finding) -> None:
        self._facts = facts

    def results(self, claimed: Any) -> CheckResults:  # noqa: ARG002
        return CheckResults(to_check=self._facts)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _findings._declared("replay", FACT.name, "whether weights change", "They matter.", "", CALL)
    kinds = MappingProxyType({**_findings.FINDINGS, kind.name: kind})
    monkeypatch.setattr(_findings, "FINDINGS", kinds)


def recorder(*facts: Finding) -> Recorder:
    recorder = Recorder(claim=CLAIM, num_steps=None, checks=[Decayed(*facts)], scorer=PerStep())
    rng = np.random.default_rng(0)
    for _ in range(60):
        present = rng.random(32) < 0.5
        recorder.record(rng.standard_normal(32) + present, present)
    return recorder


def test_a_fact_to_check_keeps_mark_and_verdict() -> None:
    result, plain = recorder(FACT).audit(), recorder().audit()
    assert result.to_check == (FACT,)
    assert not result.is_violation
    assert (result.verdict, result.p_value) == (plain.verdict, plain.p_value)
    assert result.block.mark == plain.block.mark
    assert result.likely_causes() == ()


def test_the_block_has_the_fact_with_the_call_that_decides_it_before_the_power() -> None:
    result = recorder(FACT, FACT).audit()
    labels = [label for label, _ in result.block.rows]
    assert labels.index("to check") < labels.index("gap") < labels.index("power")
    assert ("to check", SHOWN) in result.block.rows
    assert "1 more to check" in str(result)
    assert f"to check: {SHOWN}" in result.details()
    assert len(str(result).splitlines()) <= 9


def test_an_early_stop_keeps_facts_that_need_no_statistics() -> None:
    run = recorder(FACT)
    run.live()  # whoever sees the bound may stop the run
    result = run.audit()
    assert any("before the end" in text for text in result.not_covered)
    assert result.to_check == (FACT,)


def test_a_diagnosis_keeps_its_facts_as_plain_values_and_with_other_tests() -> None:
    diagnosis = recorder(FACT).audit().diagnosis
    assert diagnosis is not None
    assert Diagnosis.from_dict(json.loads(json.dumps(diagnosis.to_dict()))).to_check[0].name == FACT.name
    assert diagnosis.joined(CheckResults(to_check=(FACT,))).to_check == (FACT, FACT)
    assert f"to check: {FACT}" in str(diagnosis)
    without = {key: value for key, value in diagnosis.to_dict().items() if key != "to_check"}
    assert Diagnosis.from_dict(without).to_check == ()  # a file of an earlier version


def test_reports_show_the_fact_and_what_decides_it() -> None:
    report = Report(runs=(Run.of(recorder(FACT).audit(), name="run"),), title="t")
    assert CALL in report.to_text(Format.HTML)
    assert "| to check | decayed" in report.to_text(Format.MARKDOWN)
    values = json.loads(report.to_text(Format.JSON))
    jsonschema.Draft202012Validator(schema()).validate(values)
    assert values["runs"][0]["diagnosis"]["to_check"][0]["name"] == FACT.name


def test_the_terminal_names_the_command_that_explains_the_fact(capsys: pytest.CaptureFixture[str]) -> None:
    print_block(output(), recorder(FACT).audit().to_dict(), Shown())
    text = capsys.readouterr().out
    assert f"to check  {SHOWN[:40]}" in text
    assert "dpaudit explain decayed-weights" in text
    explained = CliRunner().invoke(app, ["explain", "decayed-weights"]).stdout
    assert f"no violation; {CALL} decides." in " ".join(explained.split())


def test_other_ranks_send_their_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(ranks: list[Any], own: Any) -> None:
        ranks[:] = [own, [CheckResults(to_check=(FACT,))]]

    group = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: 0, all_gather_object=gather)
    monkeypatch.setattr(_observe, "distributed", group)
    others = _observe._OtherRanks(SimpleNamespace(world_size=2))
    others.exchange([], SimpleNamespace())
    assert [fact.sentence for fact in others.results(None).to_check] == [f"On rank 1: {FACT.sentence}"]


class Doubted:
    """Tests whose only result is to check."""

    def diagnose(self, confidence: float = 0.95) -> Diagnosis:
        return Diagnosis.of((), confidence=confidence, to_check=(FACT,))


def dp_audit(*, is_strict: bool) -> DpAudit:
    session = SuiteAudits(seed=0, budget="full", confidence=0.95, is_strict=is_strict)
    session.count_tests([SimpleNamespace(nodeid="t.py::test", fixturenames=["dp_audit"])])
    config = SimpleNamespace(get_verbosity=lambda: 0)
    node = SimpleNamespace(nodeid="t.py::test", user_properties=[], warn=lambda _: None, config=config)
    return DpAudit(node, session)


def test_a_test_with_a_fact_to_check_passes_and_its_row_names_it() -> None:
    audit = dp_audit(is_strict=False)
    assert audit(recorder(FACT)).result.to_check == (FACT,)
    assert ("dp_audit.1.to_check", FACT.name) in audit._node.user_properties


@pytest.mark.parametrize("subject", [lambda: recorder(FACT), Doubted], ids=["recorder", "diagnosis"])
def test_a_strict_session_fails_the_test_with_the_call_that_decides(subject: Callable[[], Any]) -> None:
    audit = dp_audit(is_strict=True)
    with pytest.raises(pytest.fail.Exception) as error:
        audit(subject()) if isinstance(subject(), Recorder) else audit.diagnosed(subject())
    text = str(error.value)
    assert "to check" in text
    assert CALL in text
    assert "--dp-audit-seed 0 --dp-audit-strict" in text
    assert error.value._dpaudit_summary.startswith("decayed-weights: ")
    dp_audit(is_strict=True)(recorder())
