"""The table of findings: complete, consistent, and the source of the page."""

import ast
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dpaudit
from dpaudit.diagnostics import finding_kinds
from dpaudit.diagnostics._diagnosis import root_findings
from dpaudit.diagnostics._facts import PREPARED, REPLAYED, UPDATED
from dpaudit.diagnostics._findings import _IN_ORDER, _OTHERS

SOURCE = Path(dpaudit.__file__).parent
ROOT = SOURCE.parents[1]
# functions that make a finding, and the position of its name among their arguments
MAKERS = {"certain": 0, "_spread": 0, "_least": 1, "_add": 0, "_keep": 1}


@cache
def produced() -> frozenset[str]:
    """Return the names of findings that are written where one is made."""
    names = set[str]()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if "Finding" not in text and "Check(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call):
                names |= set(_name_of(node))
    return frozenset(names)


def _name_of(call: ast.Call) -> Iterator[str]:
    function = ast.unparse(call.func).rpartition(".")[2]
    place = MAKERS.get(function, len(call.args))
    values = [keyword.value for keyword in call.keywords if function == "Check" and keyword.arg == "name"]
    for value in (*values, *call.args[place : place + 1]):
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and value.value:
            yield value.value


def test_every_finding_that_is_produced_is_declared() -> None:
    assert len(produced()) > 40
    assert produced() <= set(finding_kinds())


def test_every_declared_finding_is_produced() -> None:
    texts = [path.read_text() for path in SOURCE.rglob("*.py")]
    declared = {name for name in finding_kinds() if sum(text.count(f'"{name}"') for text in texts) < 2}
    assert declared == set()


def test_explanations_are_names_or_groups_of_findings() -> None:
    kinds = finding_kinds().values()
    known = {name for kind in kinds for name in (kind.name, *kind.groups)}
    for kind in kinds:
        assert kind.follows | kind.may_follow | kind.explains <= known, kind.name


def test_a_finding_is_declared_once() -> None:
    declared = (*_IN_ORDER, *_OTHERS, *UPDATED, *REPLAYED, *PREPARED)
    assert len(finding_kinds()) == len(declared)


def test_consequences_are_left_out() -> None:
    assert list(root_findings(["tied-noise", "repeated-noise"])) == ["repeated-noise"]
    assert list(root_findings(["low-rank-noise", "step-correlation"])) == ["low-rank-noise"]
    assert list(root_findings(["step-correlation", "low-rank-noise"])) == ["step-correlation"]
    assert list(root_findings(["own-test", "sum-norm"])) == ["own-test", "sum-norm"]


def test_the_page_is_made_from_the_table() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "pages" / "findings.py"))["page"]
    assert (ROOT / "docs" / "findings.md").read_text() == page(), "run python tools/pages/findings.py"
