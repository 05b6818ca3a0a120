"""A report as one self-contained HTML page, and the blocks of text that every format shows.

A content security policy prevents the page from loading anything. Its sections: a table of all runs,
violations first, with what they have in common; then each run: the verdict with findings and causes, the
bound over time, and what was not tested. Everything else is folded.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_CEILING

import dpaudit
from dpaudit._html import Html, asset, definitions, element, joined
from dpaudit._validate import rounded, rounded_down
from dpaudit.diagnostics import Diagnosis, finding_kinds
from dpaudit.diagnostics._diagnosis import findings_sentence
from dpaudit.report._plots import (
    comparison_plot,
    methods_plot,
    roc_plot,
    scores_plot,
    tradeoff_plot,
    trajectory_plot,
)
from dpaudit.report._run import Run
from dpaudit.report._svg import table
from dpaudit.stats import Verdict, claimed_figure

COMPARISON_HEADER = (
    "run",
    "verdict",
    "claimed epsilon",
    "lower bound",
    "detectable epsilon",
)
# facts that a page shows apart from the method
_SHOWN_ELSEWHERE = "finding", "possible cause", "to check", "assumes", "not covered", "note"


def comparison_row(run: Run) -> list[str]:
    """Return the row of a run in the table of several runs."""
    leak = run.power
    return [
        run.name,
        f"{run.block.mark} {run.block.title}",
        claimed_figure(run.claim.epsilon, run.claim.parts),
        rounded_down(run.bound.epsilon),
        "none" if leak is None or math.isinf(leak.epsilon) else rounded(leak.epsilon, ROUND_CEILING),
    ]


def facts(run: Run) -> list[tuple[str, str]]:
    """Return all facts of a result as labels and sentences, and the meaning of the kind of its bound."""
    rows = [("kind", f"{run.bound.kind}: {run.bound.kind.meaning}"), *run.details]
    # long numbers, such as that of expected=0.4876240079365079, are shortened
    return [(label, re.sub(r"\d+\.\d{5,}", lambda n: f"{float(n[0]):.4g}", text)) for label, text in rows]


def _diagnosis_sentences(run: Run, diagnosis: Diagnosis) -> tuple[str, str]:
    """Return the number of findings, and how they relate to the verdict."""
    meaning = "These tests have their own error rate, and the verdict does not rest on them."
    if run.refuted is not None:
        meaning = "Bound and tests share one error rate, and the verdict rests on both."
    if diagnosis.findings:
        meaning += (
            " A finding means that the accounting does not describe this training run; it does not bound "
            "epsilon."
        )
    return findings_sentence(diagnosis), meaning


def sections(run: Run) -> list[tuple[str, Mapping[str, str]]]:
    """Return labeled lines about the training run, its configuration and its origin, as far as known."""
    seal = {} if run.seal is None else {"seal": f"{run.seal} (digest of manifest.json)"}
    origin = {**run.provenance, **seal}
    titled = (("Training", run.facts), ("Configuration", run.settings), ("Provenance", origin))
    return [(title, lines) for title, lines in titled if lines]


def page(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Return one self-contained page; ``notice`` is text that precedes everything else."""
    style, script = asset("banner.css", "style.css"), asset("script.js")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"dpaudit {dpaudit.__version__}"),
        element("title", title),
        element("style", style),
    )
    tip = element("div", id="tip", role="status", aria_live="polite", hidden=True)
    sections = (_header(runs, title, notice), _main(runs), _footer(), tip, element("script", script))
    body = element("body", *sections)
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _policy(style: str, script: str) -> str:
    """Allow only this style and this script: markup injected by a file can neither run nor load anything."""
    digests = [hashlib.sha256(text.encode()).digest() for text in (style, script)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; "
        "form-action 'none'"
    )


def _header(runs: Sequence[Run], title: str, notice: str | None) -> Html:
    lead = None if notice is None else element("p", notice, class_="lead")
    theme = element("button", "Dark", id="theme", type="button", aria_pressed="false", hidden=True)
    bar = element("div", element("p", "dpaudit report", class_="brand"), theme, class_="bar")
    return element("header", bar, element("h1", title), _origin(runs[0]) if len(runs) == 1 else None, lead)


def _origin(run: Run) -> Html | None:
    """Return date, version, commit and seal of a run, in one line."""
    origin = run.provenance
    date = next((origin[key] for key in ("finished", "started", "time") if key in origin), None)
    commit = next((text for key, text in origin.items() if key.endswith("commit")), None)
    entries = {
        "": None if date is None else date[:16].replace("T", " ") + " UTC",
        "dpaudit ": origin.get("dpaudit", origin.get("packages.dpaudit")),
        "commit ": None if commit is None else commit[:10],
        "seal ": "none" if run.seal is None else run.seal[:16],
    }
    words = [f"{label}{text}" for label, text in entries.items() if text is not None]
    return element("p", " \N{MIDDLE DOT} ".join(words), class_="origin") if words else None


def _main(runs: Sequence[Run]) -> Html:
    """Return all runs, violations first."""
    ranks = (Verdict.VIOLATION, Verdict.UNDERPOWERED, None, Verdict.NO_VIOLATION)
    ordered = sorted(runs, key=lambda run: ranks.index(run.verdict))
    if len(runs) == 1:
        return element("main", _run_section(runs[0], "run-0", alone=True, shared=frozenset()))
    common = ({*run.assumptions, *run.not_covered} for run in runs)
    shared = frozenset(set.intersection(*common))
    sections = [
        _run_section(run, f"run-{index}", alone=False, shared=shared) for index, run in enumerate(ordered)
    ]
    plot = comparison_plot(ordered)
    over_time = None if plot is None else element("section", element("div", plot, class_="figures"))
    return element("main", _overview(ordered, shared), joined(sections), over_time)


def _footer() -> Html:
    text = (
        f"Generated by dpaudit {dpaudit.__version__}. A lower bound measures the leak that was observed, not "
        "the whole leak: no audit can prove that a claim holds."
    )
    return element("footer", element("p", text))


def _overview(runs: Sequence[Run], shared: frozenset[str]) -> Html:
    """Return a table of all runs, and what all of them assume and leave untested."""
    rows = [_row(run, f"#run-{index}") for index, run in enumerate(runs)]
    first = runs[0]
    return element(
        "section",
        element("h2", "All runs", id="all"),
        element(
            "nav", table(COMPARISON_HEADER, rows, words=2, label="All runs, as a table"), aria_label="Runs"
        ),
        _folded_list("Not tested in any run", [text for text in first.not_covered if text in shared]),
        _folded_list("What all runs assume", [text for text in first.assumptions if text in shared]),
        class_="overview",
        aria_labelledby="all",
    )


def _row(run: Run, address: str) -> list[str]:
    name, verdict, *others = comparison_row(run)
    is_violation = run.verdict is Verdict.VIOLATION
    shown = element("span", verdict, class_="violation") if is_violation else verdict
    return [element("a", name, href=address), shown, *others]


def _run_section(run: Run, name: str, *, alone: bool, shared: frozenset[str]) -> Html:
    """Return the verdict, the bound over time and the coverage; the rest is folded.

    A single run has no heading. What is ``shared`` by all runs is not repeated.
    """
    course = run.figures.course
    over_time = None if course is None else element(
        "div", trajectory_plot(run, course, wide=True), class_="figures"
    )  # fmt: skip
    return element(
        "section",
        *(() if alone else (element("h2", run.name, id=name), _origin(run))),
        run.block.html(),
        over_time,
        _coverage(run, shared),
        element("div", *_folded_parts(run, shared), class_="part"),
        class_="run",
        aria_labelledby=None if alone else name,
        aria_label=run.name if alone else None,
    )


def _coverage(run: Run, shared: frozenset[str]) -> Html:
    """Return what the verdict means, what the audit did not test, and its notes."""
    untested = [text for text in run.not_covered if text not in shared]
    elements = [element("h3", "Meaning and coverage"), element("p", run.sentence)]
    if untested:
        elements += [element("p", "Not tested:"), _list(untested)]
    if len(untested) < len(run.not_covered):
        link = element("a", "not tested in any run", href="#all")
        elements.append(element("p", "See also what was ", link, "."))
    if run.notes:
        elements += [element("p", "Notes:"), _list(run.notes)]
    return element("div", *elements, class_="coverage")


def _folded_parts(run: Run, shared: frozenset[str]) -> Iterator[Html | None]:
    """Yield the folded parts of a run."""
    if rows := list(_findings(run)):
        yield _folded("Findings", definitions(rows, "grounds"))
    yield _folded_list("Assumptions", [text for text in run.assumptions if text not in shared])
    method = [(label, text) for label, text in facts(run) if label not in _SHOWN_ELSEWHERE]
    yield _folded("Method", definitions(method, "grounds"))
    if run.diagnosis is not None:
        yield _folded("Tests", *_diagnosis(run, run.diagnosis))
    if figures := list(_plots(run)):
        yield _folded("Scores and error rates", element("div", *figures, class_="figures"))
    if run.methods:
        yield _folded("All methods", element("div", methods_plot(run), class_="figures"))
    for title, lines in sections(run):
        yield _folded(title, _lines(lines))


def _findings(run: Run) -> Iterator[tuple[str, str]]:
    """Yield all findings with what they test and why it matters, what is to check, and possible causes."""
    diagnosis = run.diagnosis or Diagnosis.of((), confidence=run.bound.confidence)
    for finding in (*diagnosis.findings, *diagnosis.to_check):
        yield finding.name, finding.sentence
        if (kind := finding_kinds().get(finding.name)) is not None:
            yield finding.name, f"Tests {kind.tests}. {kind.matters} See {kind.name} on the page Findings."
            yield from [(finding.name, kind.verdict)] if kind.verdict else []
    for cause in run.likely_causes:
        yield "possible cause", cause


def _folded(title: str, *children: Html) -> Html:
    return element("details", element("summary", element("h3", title)), *children, class_="fold")


def _folded_list(title: str, texts: Sequence[str]) -> Html | None:
    return _folded(f"{title} ({len(texts)})", _list(texts)) if texts else None


def _list(texts: Sequence[str]) -> Html:
    return element("ul", *(element("li", text) for text in texts))


def _plots(run: Run) -> Iterator[Html]:
    """Yield the plots that the data of this run allow."""
    figures = run.figures
    if figures.scores is not None:
        yield scores_plot(figures.scores)
    if figures.plane is not None:
        yield tradeoff_plot(figures.plane)
    if run.estimate is not None and run.estimate.roc is not None:
        yield roc_plot(run.estimate.roc)


def _diagnosis(run: Run, diagnosis: Diagnosis) -> Iterator[Html]:
    flagged = {finding.name for finding in diagnosis.findings}
    rows = [
        (check.name, f"{check.p_value:.2g}", "finding" if check.name in flagged else "")
        for check in diagnosis.checks
    ]
    yield element("p", " ".join(_diagnosis_sentences(run, diagnosis)))
    if diagnosis.notes:
        yield _list(diagnosis.notes)
    yield table(("test", "p-value", ""), rows, label="All tests")


def _lines(lines: Mapping[str, str]) -> Html:
    pairs = [element("div", element("dt", label), element("dd", text)) for label, text in lines.items()]
    return element("dl", *pairs, class_="settings")
