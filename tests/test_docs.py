"""The documentation builds, and a page loads nothing from elsewhere."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

import dpaudit
import dpaudit.stats

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"""<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list(site.rglob("*.html"))
    assert site / "index.html" in pages
    assert [match for page in pages for match in LOADED.findall(page.read_text())] == []


def test_every_public_name_is_in_the_api_reference() -> None:
    documented = re.findall(r"^::: dpaudit\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(set(dpaudit.__all__) - {"__version__"})


def documented_functions() -> Iterator[tuple[str, Any]]:
    """The functions on the API page, and what users call beside them."""
    names = re.findall(r"^::: (dpaudit\.\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    names += [f"dpaudit.experiments.{name}" for name in ("example", "load_config", "parse_config", "run")]
    names += ["dpaudit.report.read_run", "dpaudit.training.accuracy", "dpaudit.training.initialize"]
    names += [f"dpaudit.training.data.{name}" for name in ("cifar10", "hold_out", "random_images")]
    for name in names:
        home, _, own_name = name.rpartition(".")
        if "tensorflow" not in home and inspect.isfunction(value := _named(home, own_name)):
            yield name, value


def _named(home: str, name: str) -> Any:
    return getattr(importlib.import_module(home), name)


@pytest.mark.slow  # imports torch and JAX
def test_the_docstring_of_a_function_has_all_its_parts() -> None:
    functions = dict(documented_functions())
    assert len(functions) >= 33
    for name, function in functions.items():
        text, source = inspect.getdoc(function) or "", inspect.getsource(inspect.unwrap(function))
        if "see :func:" in text:  # the same arguments
            continue
        for parameter in inspect.signature(function).parameters:
            is_shared = "options: :class:" in text and parameter not in source.partition(") ->")[0]
            assert is_shared or f"    {parameter}: " in text, f"{name}: {parameter}"
        assert "Returns:" in text, name
        assert ">>> " in text or "Example:" in text, name
        assert "Raises:" in text or "raise InputError" not in source, name


def assumptions() -> Iterator[str]:
    """Constants of the statistics that are clauses: they begin with a small letter and have several words."""
    for module in pkgutil.walk_packages(dpaudit.stats.__path__, "dpaudit.stats."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, str) and value[:1].islower() and value.count(" ") > 3:
                yield value


def test_every_printed_assumption_is_explained() -> None:
    text = (ROOT / "docs" / "verdicts.md").read_text()
    table = text[text.index("## What the assumptions mean") : text.index("## Threat models")]
    explained = " ".join(re.findall(r"^\|(.*?)\|", table, re.MULTILINE))
    found = set(assumptions())
    assert len(found) >= 12
    assert [text for text in sorted(found) if text not in explained] == []
    whole = dpaudit.JointExact().assumption(dpaudit.ErrorCounts.perfect(9, 8), is_fixed=True)
    for words in ("all observations are independent", "and, on each side, identically distributed"):
        assert words in whole
        assert words in explained


PATH_OF_AN_ENGINEER = (
    "README.md",
    "docs/quickstart.md",
    "docs/opacus.md",
    "docs/test-in-ci.md",
    "docs/read-a-result.md",
)


# pages that a script writes, and those of them that have nothing but its data
WRITTEN_PAGES = {"findings.md", "soundness.md", "detection.md"}
DATA_PAGES = {"findings.md"}


def pages_of(nav: object) -> list[str]:
    """The pages below an entry of the navigation."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else cast("list[object]", nav)
    return [page for entry in entries for page in pages_of(entry)]


def test_the_pages_can_be_read() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    pages = pages_of(nav)
    assert len(nav) == 5
    assert len(pages) == len(set(pages)) <= 32
    texts = [prose(f"docs/{page}", is_written=page in WRITTEN_PAGES) for page in set(pages) - DATA_PAGES]
    assert sum(len(text.split()) for text in texts) <= 34_000


def prose(page: str, *, is_written: bool = False) -> str:
    """The text of a page without code, comments, markup, the targets of links and what scripts write."""
    text = re.sub(r"<!-- written by.*?<!-- end -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    if is_written:
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>]+>|\]\([^)]*\)|!!! \w+", " ", text, flags=re.DOTALL)
    return re.sub(r"[\[\]*#>|]", " ", text)


def sentences(page: str) -> list[list[str]]:
    """The words of each sentence; headings, table rows and items of lists end one, too."""
    text = re.sub(r"^ *```.*?^ *```$", "\n\n", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(#|\||---|\s*!!!).*$", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"<!--.*?-->|<[^>]+>|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    pieces = re.split(r"\n\s*\n|\n\s*(?:[-*>]|\d+\.) |(?<=[.?!:])[*\")]*\s", text)
    return [words for piece in pieces if (words := re.findall(r"[^\W_][^\s]*", piece))]


def test_the_path_of_an_engineer_is_short() -> None:
    num_words = {page: len(prose(page).split()) for page in PATH_OF_AN_ENGINEER}
    assert num_words["README.md"] <= 500
    assert sum(num_words.values()) <= 4200


@pytest.mark.parametrize("page", PATH_OF_AN_ENGINEER)
def test_sentences_on_the_path_are_short(page: str) -> None:
    lengths = [len(words) for words in sentences(page)]
    assert len(lengths) >= 20
    assert [" ".join(words) for words in sentences(page) if len(words) > 35] == []
    assert sum(lengths) / len(lengths) <= 18
