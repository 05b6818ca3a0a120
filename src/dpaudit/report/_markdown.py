"""A report as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import dpaudit
from dpaudit.report._run import (
    COMPARISON_HEADER,
    Run,
    comparison_row,
    diagnosis_sentences,
    headline,
    summary,
)
from dpaudit.report._svg import number

# what Markdown or HTML in it would take for markup, in words of anybody
_MARKUP = re.compile(r"([\\`*_{}\[\]<#|~!&])")
# what GitHub and others make a link of
_LINK = re.compile(r"(?i)(?<=\bwww)(?=\.)|(?=://)")
# what begins a quotation, a list or a line, at the beginning of a text
_BLOCK = re.compile(r"^(?:(?=[>+=-])|\d+(?=[.)](?:\s|$)))")


def markdown(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Without pictures: verdicts, what they rest on, all bounds, settings."""
    parts = [f"# {_plain(title)}"]
    if notice is not None:
        parts.append(_plain(notice))
    if len(runs) > 1:
        parts.append(_table(COMPARISON_HEADER, [comparison_row(run) for run in runs]))
    for run in runs:
        parts += _section(run)
    parts.append(f"Made by dpaudit {dpaudit.__version__}.")
    return "\n\n".join(parts) + "\n"


def _section(run: Run) -> Iterator[str]:
    yield f"## {_plain(run.name)}"
    yield f"**{_plain(headline(run))}**"
    word = "" if run.verdict is None else f"{run.verdict.name}. "
    yield f"{word}{_plain(run.sentence)}"
    yield _table(("", ""), summary(run))
    lists = (
        ("Assumes", run.bound.assumptions),
        ("Not covered", run.not_covered),
        ("Notes", run.notes),
        ("Diagnostics", () if run.diagnosis is None else _diagnosis(run)),
    )
    for label, texts in lists:
        if texts:
            yield f"{label}:\n\n" + "\n".join(f"- {_plain(text)}" for text in texts)
    if run.methods:
        yield "### All methods"
        yield _methods(run)
    for label, lines in (
        ("The training", run.facts),
        ("Configuration", run.settings),
        ("Versions", run.versions),
    ):
        if lines:
            yield f"### {label}"
            yield _lines(lines)


def _diagnosis(run: Run) -> Sequence[str]:
    assert run.diagnosis is not None
    tests = run.diagnosis
    found = [f"{one.name}: {one.sentence}" for one in tests.findings]
    return [*diagnosis_sentences(tests), *found, *tests.likely_causes(), *tests.notes]


def _methods(run: Run) -> str:
    header = ("method", "threshold rule", "kind", "epsilon", "for the claim")
    rows = [
        (one.name, one.bound.rule, str(one.bound.kind), number(one.epsilon), number(one.claim_epsilon))
        for one in run.methods
    ]
    return _table(header, rows)


def _lines(lines: Mapping[str, str]) -> str:
    return _table(("", ""), list(lines.items()))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header)]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(text + ["| " + " | ".join(map(_inline, row)) + " |" for row in rows])


def _plain(text: str) -> str:
    """The words, on one line and never as markup, also where they begin a line."""
    return _BLOCK.sub(r"\g<0>\\", _inline(text))


def _inline(text: str) -> str:
    """The words inside of a line. A site may still make links of mail addresses and of names after an @."""
    return _LINK.sub(r"\\", _MARKUP.sub(r"\\\1", " ".join(text.split())))
