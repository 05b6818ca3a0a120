"""The language of package, scripts and pages: avoided words, American spelling, imperative docstrings.

The words are not wrong in themselves, but the field has other terms for the same things. Names and stored
keys that contain such a word are exceptions, listed with their reason.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
FILES = [
    *SOURCES,
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "tools").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
    *sorted((ROOT / "src").rglob("*.toml")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
]

# what to write instead, by pattern; a space also matches the end of a line, of a comment or of a string
AVOIDED = {
    r"(?<!by.)chances?": "probability, randomness, RNG",
    "anew": "again, from scratch",
    "told|tell|tells|telling": "report, print, distinguish",
    "so many|so-manieth": "this number of",
    "who was present|who were present": "which canaries were present",
    "nobody|somebody|anybody": "no process, another user, any mechanism",
    "trainings": "training runs",
    r"(?:an?|any|another|each|every|one) (?:(?:broken|correct|finished|private|single|whole) )?(?-i:training)"
    r"(?=[.,:;)]| (?:and|does|has|in|is|of|on|or|that|was|which|with)\b)": "training run",
    r"(?:canaries|models|observations|scores|steps) a (?:run|second|side|step)": "per",
    "goes on|go on|went on": "continue, resume",
    "by itself|by themselves": "alone, automatically",
    "as a whole": "the whole ..., together",
    "hear|hears|heard": "receive",
    "made again|found again": "recreated, recomputed",
    "thrown away|throws away": "discarded",
    "put into|puts into": "insert, inject",
    "words of": "the text, the wording",
    "is gone|are gone": "was removed",
    "inside of": "inside",
}
BRITISH = (
    r"\w*(?:behaviour|centre|colour|defence|favour|judgement|labell|licence|modell|neighbour)\w*"
    r"|analys(?:e|ed|ing)\b|\w*(?:initialis|normalis|optimis|randomis|summaris|synchronis)(?:e|ed|es|ing)\b"
)

# places where a word is a name or a stored key
ALLOWED = {
    ("CHANGELOG.md", "chance"): "names of version 0.1",
    ("CHANGELOG.md", "tell"): "names of version 0.1",
    ("src/dpaudit/cli/_demo_command.py", "trainings"): "a key of --json",
    ("src/dpaudit/report/_report.py", "trainings"): "a key of --json",
}
# public names, functions, HTML attributes and stored keys with British spelling
BRITISH_NAMES = {
    "aria_labelledby",
    "favoured",  # the finding favoured-example
    "favoured_example",
    "labelled",
    "mislabelled",
    "neighbours",
    "print_labelled",
    "randomised",  # in the seeds and files of cells
}


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def place(path: Path, position: int) -> str:
    """The file and the line of a position in its text."""
    return f"{path.relative_to(ROOT)}:{text_of(path).count(chr(10), 0, position) + 1}"


@cache
def occurrences() -> list[tuple[Path, re.Match[str]]]:
    patterns = "|".join(f"({words})" for words in AVOIDED).replace(" ", r"[\s\"'#]+")
    pattern = re.compile(rf"\b(?<![.-])(?:{patterns})(?![\w-])", re.IGNORECASE)
    return [(path, match) for path in FILES for match in pattern.finditer(text_of(path))]


def key_of(path: Path, match: re.Match[str]) -> tuple[str, str]:
    return str(path.relative_to(ROOT)), " ".join(match[0].lower().split())


def advice(match: re.Match[str]) -> str:
    return list(AVOIDED.values())[(match.lastindex or 1) - 1]


def test_words_of_another_idiom_do_not_occur() -> None:
    found = [
        f"{place(path, match.start())}: {match[0]!r}; better: {advice(match)}"
        for path, match in occurrences()
        if key_of(path, match) not in ALLOWED
    ]
    assert not found, "\n".join(found)


def test_every_exception_is_needed() -> None:
    assert {key_of(path, match) for path, match in occurrences()} >= set(ALLOWED)


def test_spelling_is_american() -> None:
    found = [
        f"{place(path, match.start())}: {match[0]!r}"
        for path in FILES
        for match in re.finditer(rf"\b(?:{BRITISH})", text_of(path), re.IGNORECASE)
        if match[0].lower() not in BRITISH_NAMES
    ]
    assert not found, "\n".join(found)


def test_docstrings_of_functions_are_imperative() -> None:
    """Ruff's D401 detects verbs in another form, but not noun phrases."""
    articles = {"A", "All", "An", "Each", "How", "Its", "One", "The", "What", "Whether", "Which"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path in SOURCES
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.FunctionDef)
        and not any("property" in ast.unparse(one) for one in node.decorator_list)
        and (text := ast.get_docstring(node))
        and text.split()[0] in articles
    ]
    assert not found, "\n".join(found)
