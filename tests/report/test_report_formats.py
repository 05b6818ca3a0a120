"""The page, Markdown and JSON of the same report."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from damage import forged
from markdown_it import MarkdownIt

from dpaudit.errors import InputError
from dpaudit.report import Format, Report, schema
from dpaudit.report._report import read_own_run

Copy = Callable[..., Path]
EVIL = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&lt;`|*_[a](javascript:alert(3))"
FORBIDDEN = re.compile(r"\b(safe|secure|private|pass(?:ed|es)?)\b", re.IGNORECASE)


class Page(HTMLParser):
    """The elements of a page, its words outside style and script, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data + " "

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_is_whole_and_loads_nothing(report: Report) -> None:
    text = report.to_text()
    page = Page(text)
    assert page.open == []
    assert len(text) < 2_000_000
    assert {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "image", "use"} == set()
    assert [one for one in page.named("script") if "src" in one] == []
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    assert "@import" not in text


def test_the_page_allows_only_its_own_style_and_script(report: Report) -> None:
    text = report.to_text()
    policy = next(one["content"] for one in Page(text).named("meta") if "http-equiv" in one)
    assert policy is not None
    assert "default-src 'none'" in policy
    for tag in ("style", "script"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found[0].encode()).digest()).decode()
        assert len(found) == 1
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not any("style" in attributes for _, attributes in Page(text).tags)


def test_the_page_can_be_read_by_a_machine_that_reads_aloud(report: Report) -> None:
    page = Page(report.to_text())
    assert page.named("html")[0]["lang"] == "en"
    for landmark in ("header", "main", "footer", "nav", "title", "h1"):
        assert len(page.named(landmark)) == 1
    plots = [one for one in page.named("svg") if one.get("class") == "plot"]
    assert len(plots) == len(page.named("figure")) >= 9
    assert all(one["aria-label"] and one["tabindex"] == "0" for one in plots)
    # every picture has its numbers as a table, folded
    folded = [one for one in page.named("details") if one.get("class") != "fold"]
    assert len(folded) == len(plots)
    names = [one["id"] for _, one in page.tags if "id" in one]
    assert len(names) == len(set(names))


def test_every_bar_of_a_method_is_inside_the_area_of_its_own_tip(report: Report) -> None:
    name = 'aria-label="Lower bounds of all methods[.][^"]*"'
    pictures = re.findall(rf"{name}[^>]*>(.*?)</svg>", report.to_text(), re.DOTALL)
    assert len(pictures) == len(report.runs)
    for picture in pictures:
        rects = Page(picture).named("rect")
        bars, tips = rects[: len(rects) // 2], rects[len(rects) // 2 :]
        assert [one["class"] for one in tips] == ["hit"] * len(bars)
        for bar, tip in zip(bars, tips, strict=True):
            top = float(bar["y"] or 0) - float(tip["y"] or 0)
            assert 0 <= top <= float(tip["height"] or 0) - float(bar["height"] or 0)


def test_verdict_claim_bound_power_and_estimate_are_in_every_format(report: Report) -> None:
    for chosen in Format:
        text = report.to_text(chosen)
        words = Page(text).words if chosen is Format.HTML else text
        for run in report.runs:
            assert run.bound.statement in words
            assert run.claim.summary in words.replace("\\_", "_")
            assert run.sentence in words
            assert run.estimate.statement in words.replace("\\", "")
            assert all(one in words for one in run.bound.assumptions)


@pytest.mark.parametrize("chosen", [Format.HTML, Format.MARKDOWN])
def test_no_report_says_that_a_training_is_as_it_should_be(report: Report, chosen: Format) -> None:
    text = report.to_text(chosen)
    words = Page(text).words if chosen is Format.HTML else text
    assert FORBIDDEN.findall(words) == []


def test_no_seed_and_no_single_score_is_in_a_report(report: Report, runs: dict[str, Path]) -> None:
    resolved = json.loads((runs["correct"] / "config.json").read_text())["resolved"]
    for chosen in Format:
        text = report.to_text(chosen)
        assert str(resolved["seed"]) not in text
        assert not any(str(seed) in text for seed in resolved["seeds"].values())


DERIVED = "inference", "threshold_rule", "statement", "dpaudit"  # other words are refused


def evil(values: Any) -> Any:
    """The same with hostile words for every text but those that have to be one of few."""
    if isinstance(values, dict):
        kept = ("kind", "verdict", "mode", "tradeoff", "source", "canary", "counts", *DERIVED)
        changed = {key: one if key in kept else evil(one) for key, one in values.items()}
        return {**changed, EVIL: EVIL}
    if isinstance(values, list):
        return [evil(one) for one in values]
    return EVIL if isinstance(values, str) and values != "inf" else values


def test_hostile_words_stay_words(copied: Copy) -> None:
    folder = copied()
    for name in ("result.json", "config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(evil(values)))
    folder = forged(folder.rename(folder.parent / EVIL.replace("/", "\N{DIVISION SLASH}")))
    run = read_own_run(folder, name=folder.name)
    found = Report(runs=(run, run), title=EVIL, notice=EVIL)
    text = found.to_text()
    page = Page(text)
    assert page.open == []
    assert len(page.named("script")) == 1
    assert page.named("img") == []
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert all((one["href"] or "").startswith(("#run-", "#all")) for one in page.named("a"))
    assert EVIL in page.words
    marked = found.to_text(Format.MARKDOWN)
    assert not re.search(r"(?<!\\)<", marked)
    assert "[a](" not in marked


BLOCKS = ["> quote", "- item", "+ item", "1. one", "12) twelve", "---", "=== x", "-5 is less", "1.", "2.5 x"]
LINKS = ["http://a.example/b", "see HTTPS://a.example", "www.a.example", "ftp://a.example"]


def test_words_of_a_run_begin_no_block_and_no_link_in_markdown(copied: Copy) -> None:
    def change(values: dict[str, Any]) -> None:
        values["notes"] = [*BLOCKS, *LINKS]
        values["bound"]["assumptions"] = BLOCKS

    run = read_own_run(copied(change), name="own")
    text = Report(runs=(run,), title="1. one", notice="> quote").to_text(Format.MARKDOWN)
    tokens = MarkdownIt().enable("table").parse(text)
    kinds = {token.type for token in tokens}
    lists = {"bullet_list_open", "ordered_list_open"}
    assert kinds & {*lists, "blockquote_open", "hr", "code_block"} == set()
    shown = [token.content for token in tokens if token.type == "inline"]
    words = ["".join(one.content for one in token.children or ()) for token in tokens if token.children]
    assert set(words) >= {*BLOCKS, *LINKS, "1. one", "> quote"}
    assert not any(re.search(r"(?i)(?<!\\)://|\bwww\.", content) for content in shown)


def test_a_number_in_a_table_is_not_escaped(copied: Copy) -> None:
    folder = copied()
    config = json.loads((folder / "config.json").read_text())
    config["config"]["training"]["shift"] = -0.5
    (folder / "config.json").write_text(json.dumps(config))
    run = read_own_run(forged(folder), name="own")
    assert "| -0.5 |" in Report(runs=(run,), title="t").to_text(Format.MARKDOWN)


def test_words_cannot_move_the_cursor_of_a_terminal(copied: Copy) -> None:
    def change(values: dict[str, Any]) -> None:
        values["bound"]["label"] = "\x1b[2J"
        values["bound"]["assumptions"] = ["\x1b[2J\u202eepsilon \ud800"]

    found = read_own_run(copied(change), name="a\x1bb")
    assert found.bound.assumptions == ("\ufffd[2J\ufffdepsilon \ufffd",)
    assert found.bound.statement.isprintable()
    assert found.name == "a\ufffdb"
    Report(runs=(found,), title="t").to_text().encode()


def test_json_is_as_the_published_schema_says(report: Report, runs: dict[str, Path]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    validator = jsonschema.Draft202012Validator(schema())
    for one in (report, Report.read([runs["paper"]])):
        validator.validate(json.loads(one.to_text(Format.JSON)))
    wrong = report.to_dict()
    del wrong["runs"][0]["bound"]["kind"]
    assert not validator.is_valid(wrong)


def test_a_report_is_written_whole_and_by_the_name_of_its_file(report: Report, tmp_path: Path) -> None:
    for name, begin in (("r.html", "<!DOCTYPE html>"), ("r.md", "# "), ("new/r.json", "{")):
        report.write(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(begin)
    with pytest.raises(InputError, match=r"must end in \.html, \.md or \.json, got 'r.pdf'"):
        report.write(tmp_path / "r.pdf")
    with pytest.raises(InputError, match="no run to report"):
        Report(runs=(), title="none")


def test_one_run_without_a_tuple_is_one_sentence(report: Report) -> None:
    with pytest.raises(InputError, match=r"a tuple of Run, as in runs=\(run,\), got Run\.$"):
        Report(runs=report.runs[0], title="One")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a tuple of Run, .* got str\.$"):
        Report(runs="run", title="A path")  # type: ignore[arg-type]
