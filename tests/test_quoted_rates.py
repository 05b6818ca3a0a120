"""How often weaker bounds exceed the truth: what pages quote is what docs/data/soundness.csv has."""

import csv
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
POSTERIOR, CLOPPER_PEARSON = "Posterior()", "ClopperPearson()"
FIXED, SAME_DATA = "Fixed(threshold=0.5)", "SameData()"
NO_LEAK, LEAK = ("0",), ("0.1", "0.39", "1", "3", "6")
SMALL = ("0.1", "0.39", "1")

QUOTES = [
    ("verdicts.md", "{} % with a leak", POSTERIOR, FIXED, LEAK),
    ("verdicts.md", "{} % without one", POSTERIOR, FIXED, NO_LEAK),
    ("verdicts.md", "{} % with `Posterior` for μ from 0.1 to 1", POSTERIOR, SAME_DATA, SMALL),
    ("verdicts.md", "{} % without a leak", POSTERIOR, SAME_DATA, NO_LEAK),
    ("verdicts.md", "{} % with `ClopperPearson`", CLOPPER_PEARSON, SAME_DATA, NO_LEAK + LEAK),
    ("choose.md", "At nominal 95 %, {} % of such bounds", POSTERIOR, SAME_DATA, SMALL),
    ("statistics.md", "it was wrong in {} % of the simulated audits", POSTERIOR, FIXED, LEAK),
    ("statistics.md", "*some* leak is reported for any data ({} % in", POSTERIOR, FIXED, NO_LEAK),
]


def _rates(inference: str, rule: str, parameters: tuple[str, ...]) -> list[float]:
    """The rates of a method at these parameters, for all numbers of scores."""
    with (DOCS / "data" / "soundness.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == "The paper's practice"]
    shares = [
        float(row["exceeded_percent"])
        for row in rows
        if row["setting"].startswith(f"method: {inference} + {rule};")
        and row["parameter"].removeprefix("mu = ") in parameters
    ]
    assert len(shares) == 4 * len(parameters), "one row for each number of scores per side"
    return shares


def _quoted(rates: list[float]) -> str:
    low, high = (f"{end:.0f}" for end in (min(rates), max(rates)))
    return low if low == high else f"{low} to {high}"


@pytest.mark.parametrize(("page", "words", "inference", "rule", "parameters"), QUOTES)
def test_a_page_quotes_the_range_that_was_simulated(
    page: str, words: str, inference: str, rule: str, parameters: tuple[str, ...]
) -> None:
    text = " ".join((DOCS / page).read_text().split())
    assert words.format(_quoted(_rates(inference, rule, parameters))) in text
