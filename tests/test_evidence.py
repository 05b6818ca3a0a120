"""The pages of evidence and their pictures are what the data in docs/data gives."""

import csv
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "data"
WRITERS = ("soundness_page.py", "_detection_page.py")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_page_and_its_pictures_are_what_the_data_gives(
    writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "pages"))
    documents = runpy.run_path(str(ROOT / "tools" / "pages" / writer))["documents"]()
    assert len(documents) >= 2
    for path, text in documents.items():
        assert path.read_text() == text, f"run python tools/pages/{writer.split('_', maxsplit=1)[0]} --as-is"


def test_no_confidence_bound_exceeds_5_percent_by_three_standard_errors() -> None:
    with (DATA / "soundness.csv").open() as file:
        cells = [row for row in csv.DictReader(file) if row["covered"] == "yes"]
    assert len(cells) > 700
    for row in cells:
        limit = 5 + 3 * 100 * (0.05 * 0.95 / int(row["audits"])) ** 0.5
        assert float(row["exceeded_percent"]) <= limit, row


@pytest.mark.parametrize(
    ("page", "pattern"),
    [
        ("soundness.md", r"\*\*(\d+) cells of confidence methods"),
        ("soundness.md", r"detected\s+in\s+(\d+\s+to\s+\d+ %)"),
        ("detection.md", r"(\d+ of \d+) cells are detected"),
        ("detection.md", r"(\d+ of \d+) correct runs"),
    ],
)
def test_the_summary_quotes_the_pages(page: str, pattern: str) -> None:
    match = re.search(pattern, (ROOT / "docs" / page).read_text())
    assert match is not None
    quoted = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    assert re.search(rf"\b{' '.join(match[1].split())}", quoted)


def test_every_entry_of_the_zoo_is_caught_with_every_seed() -> None:
    with (DATA / "zoo.csv").open() as file:
        rows = list(csv.DictReader(file))
    caught = sum(row["caught"] == "10 of 10" for row in rows)
    assert f"{caught} of {len(rows)}, each with 10 of 10 seeds" in (ROOT / "docs" / "evidence.md").read_text()
