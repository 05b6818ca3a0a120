"""What a page says of the zoo."""

import re
from pathlib import Path

from dpaudit import zoo
from dpaudit.diagnostics import likely_causes

PITFALLS = Path(__file__).parent.parent.parent / "docs" / "pitfalls.md"
# not findings, or with causes that depend on what was measured
WITHOUT_CAUSE = {"bound", "noise-variance", "clipping"}


def test_the_page_of_pitfalls_names_findings_and_entries_that_exist():
    rows = [line.split("|") for line in PITFALLS.read_text().splitlines() if line.count("|") == 6]
    quoted = [[set(re.findall("`([a-z-]+)`", cell)) for cell in row[3:5]] for row in rows]
    findings, entries = (set().union(*column) for column in zip(*quoted, strict=True))
    findings.discard("check")  # the function
    assert len(findings) > 40
    assert [name for name in findings - WITHOUT_CAUSE if not likely_causes(findings=[name])] == []
    assert entries - {one.name for one in zoo.ENTRIES} == set()
    named = entries & {one.name for one in zoo.ENTRIES_FOUND_BY_TESTS}
    assert len(named) > 25
