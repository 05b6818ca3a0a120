"""How often weaker bounds exceed the truth: what pages quote is what docs/soundness.md has."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
POSTERIOR, CLOPPER_PEARSON = "`Posterior()`", "`ClopperPearson()`"
FIXED, SAME_DATA = "`Fixed(threshold=0.5)`", "`SameData()`"
NO_LEAK, LEAK = ("0",), ("0.1", "0.39", "1", "3", "6")
SMALL = ("0.1", "0.39", "1")

QUOTES = [
    ("verdicts.md", "{} % with a leak", POSTERIOR, FIXED, LEAK),
    ("verdicts.md", "{} % without one", POSTERIOR, FIXED, NO_LEAK),
    ("verdicts.md", "{} % with `Posterior` for μ from 0.1 to 1", POSTERIOR, SAME_DATA, SMALL),
    ("verdicts.md", "{} % without a leak", POSTERIOR, SAME_DATA, NO_LEAK),
    ("verdicts.md", "{} % with `ClopperPearson`", CLOPPER_PEARSON, SAME_DATA, NO_LEAK + LEAK),
    ("choose-threshold.md", "At nominal 95 %, {} % of such bounds", POSTERIOR, SAME_DATA, SMALL),
    ("statistics.md", "it was wrong in {} % of the simulated audits", POSTERIOR, FIXED, LEAK),
    ("statistics.md", "*some* leak is reported for any data ({} % in", POSTERIOR, FIXED, NO_LEAK),
]


def _rates(inference: str, rule: str, parameters: tuple[str, ...]) -> list[float]:
    """The rates of a method at these parameters, for all numbers of scores."""
    section = (DOCS / "soundness.md").read_text().split("## The paper's practice")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    header = next(row for row in rows if row[0] == "method")
    places = [header.index(f"mu = {parameter}") for parameter in parameters]
    found = [row for row in rows if row[0] == f"{inference} + {rule}"]
    assert len(found) == 4, "one row for each number of scores per side"
    return [float(re.match(r"[\d.]+", row[place])[0]) for row in found for place in places]  # type: ignore[index]


def _quoted(rates: list[float]) -> str:
    low, high = (f"{end:.0f}" for end in (min(rates), max(rates)))
    return low if low == high else f"{low} to {high}"


@pytest.mark.parametrize(("page", "words", "inference", "rule", "parameters"), QUOTES)
def test_a_page_quotes_the_range_that_was_simulated(
    page: str, words: str, inference: str, rule: str, parameters: tuple[str, ...]
) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert words.format(_quoted(_rates(inference, rule, parameters))) in text
