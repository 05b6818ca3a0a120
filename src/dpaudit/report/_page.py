"""A report as one self-contained HTML page, and the blocks of text that every format shows.

A content security policy prevents the page from loading anything. Its sections: a comparison of all runs,
then each run with its verdict, the grounds for it, its plots and its settings.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import resources

import dpaudit
from dpaudit import _validate
from dpaudit._html import Html, element, joined
from dpaudit.diagnostics import Diagnosis
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
from dpaudit.report._svg import number, table
from dpaudit.stats import PRIVACY, ApproximateDP, Kind, Verdict, errors_line
from dpaudit.stats import summary as result_summary


def verdict_mark(verdict: Verdict | None) -> tuple[str, str]:
    """Return a symbol and a word for a verdict: color alone is never enough."""
    marks = {
        None: ("\N{WHITE SQUARE}", "No claim"),
        Verdict.VIOLATION: ("\N{BLACK UP-POINTING TRIANGLE}", "Violation"),
        Verdict.NO_VIOLATION: ("\N{WHITE CIRCLE}", "No violation"),
        Verdict.UNDERPOWERED: ("\N{WHITE DIAMOND}", "Underpowered"),
    }
    return marks[verdict]


def smallest_leak(run: Run) -> str:
    """Return the epsilon of the smallest detectable leak."""
    return "none" if run.power is None or math.isinf(run.power.epsilon) else number(run.power.epsilon)


COMPARISON_HEADER = (
    "run",
    "verdict",
    "claimed epsilon",
    "lower bound on epsilon",
    "confidence",
    "smallest detectable leak",
)


def comparison_row(run: Run) -> list[str]:
    """Return the row of a run in the table of several runs."""
    return [
        run.name,
        verdict_mark(run.verdict)[1],
        number(run.claim.epsilon),
        number(run.bound.epsilon),
        _validate.percent(run.bound.confidence),
        smallest_leak(run),
    ]


def headline(run: Run) -> str:
    """Return the verdict as a sentence with its numbers."""
    claimed, least, sureness = number(run.claim.epsilon), number(run.bound.epsilon), _sureness(run)
    if run.verdict is None:
        return f"There is no claim: epsilon is at least {least}, {sureness}."
    if run.verdict is Verdict.UNDERPOWERED:
        return f"The claim of epsilon {claimed} could not be tested: twice of it could have gone undetected."
    if run.verdict is Verdict.NO_VIOLATION:
        return f"The claim of epsilon {claimed} is not refuted: epsilon is at least {least}, {sureness}."
    if run.refuted is not None and PRIVACY not in run.refuted:
        return (
            "The tests refute that this is the claimed mechanism, so its epsilon does not describe this run: "
            f"{claimed} is claimed, and epsilon is at least {least}, {sureness}."
        )
    if isinstance(run.bound.tradeoff, ApproximateDP):  # the one curve that assumes no mechanism at any delta
        return f"The claim of epsilon {claimed} is refuted: epsilon is at least {least}, {sureness}."
    # only the claimed curve is refuted: another kind of mechanism might leak as much within its epsilon
    return (
        f"The claim is refuted {sureness}: a mechanism of the claimed kind that leaks this much has an "
        f"epsilon of at least {least}, but {claimed} is claimed."
    )


def _sureness(run: Run) -> str:
    """Return the certainty of the bound, with the meaning of a kind that gives no confidence."""
    level, kind = _validate.percent(run.bound.confidence), run.bound.kind
    return {
        Kind.CONFIDENCE: f"with {level} confidence",
        Kind.CREDIBLE: f"with {level} credibility ({kind.meaning})",
        Kind.HEURISTIC: f"by a heuristic ({kind.meaning})",
    }[kind]


def summary(run: Run) -> list[tuple[str, str]]:
    """Return the claim, bound, kind, method, power, estimates and noise tests as labels and sentences."""
    lines = result_summary(
        run.claim.summary,
        run.bound,
        run.power,
        parts=run.claim.parts,
        attack_power=run.attack_power,
        p_value=run.p_value if run.verdict is Verdict.VIOLATION else None,
    )
    tests = "not run"
    if run.diagnosis is not None:
        names = ", ".join(finding.name for finding in run.diagnosis.findings)
        tests = f"flagged by {names}" if names else "no findings"
    kind = f"{run.bound.kind}: {run.bound.kind.meaning}"
    estimates = [] if run.estimate is None else run.estimate.lines(brief=False)
    after_bound = [label for label, _ in lines].index("bound") + 1
    lines.insert(after_bound, ("kind", kind))
    return [*lines, *estimates, ("noise tests", tests), *_errors(run)]


def _errors(run: Run) -> list[tuple[str, str]]:
    """Return how bound and tests share the error rate, if they do."""
    if run.refuted is None or run.diagnosis is None:
        return []
    return [("errors", errors_line(run.bound, run.diagnosis))]


def diagnosis_sentences(run: Run, diagnosis: Diagnosis) -> tuple[str, str]:
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


def lists(run: Run) -> list[tuple[str, Sequence[str]]]:
    """Return what stands below the summary: labels, each with sentences, of which there may be none."""
    return [
        ("possible causes", run.likely_causes),
        ("assumes", run.assumptions),
        ("not covered", run.not_covered),
        ("notes", run.notes),
    ]


def sections(run: Run) -> list[tuple[str, Mapping[str, str]]]:
    """Return labeled lines about the training run, its configuration and its origin, as far as known."""
    seal = {} if run.seal is None else {"seal": f"{run.seal} (digest of manifest.json)"}
    origin = {**run.provenance, **seal}
    titled = (("Training", run.facts), ("Configuration", run.settings), ("Provenance", origin))
    return [(title, lines) for title, lines in titled if lines]


def page(runs: Sequence[Run], *, title: str, notice: str | None = None) -> str:
    """Return one self-contained page; ``notice`` is text that precedes everything else."""
    style, script = _asset("style.css"), _asset("script.js")
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
    body = element("body", _header(title, notice), _main(runs), _footer(), tip, element("script", script))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _asset(name: str) -> Html:
    # part of the package and the same for every page: not escaped
    return Html((resources.files("dpaudit.report") / "assets" / name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    """Allow only this style and this script: markup injected by a file can neither run nor load anything."""
    digests = [hashlib.sha256(text.encode()).digest() for text in (style, script)]
    hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
    return (
        f"default-src 'none'; style-src {hashes[0]}; script-src {hashes[1]}; base-uri 'none'; "
        "form-action 'none'"
    )


def _header(title: str, notice: str | None) -> Html:
    lead = None if notice is None else element("p", notice, class_="lead")
    theme = element("button", "Dark", id="theme", type="button", aria_pressed="false", hidden=True)
    bar = element("div", element("p", "dpaudit report", class_="brand"), theme, class_="bar")
    return element("header", bar, element("h1", title), lead)


def _main(runs: Sequence[Run]) -> Html:
    compared = _comparison(runs) if len(runs) > 1 else None
    sections = [_run_section(run, index, alone=len(runs) == 1) for index, run in enumerate(runs)]
    return element("main", compared, joined(sections))


def _footer() -> Html:
    text = (
        f"Generated by dpaudit {dpaudit.__version__}. A lower bound measures the leak that was observed, not "
        "the whole leak: no audit can prove that a claim holds."
    )
    return element("footer", element("p", text))


def _comparison(runs: Sequence[Run]) -> Html:
    """Return a table of all runs, and a plot of their bounds."""
    links = [element("li", element("a", run.name, href=f"#run-{i}")) for i, run in enumerate(runs)]
    plot = comparison_plot(runs)
    return element(
        "section",
        element("h2", "All runs", id="all"),
        element("nav", element("ul", *links), aria_label="Runs"),
        table(COMPARISON_HEADER, [_row(run) for run in runs], words=2, label="All runs, as a table"),
        None if plot is None else element("div", plot, class_="figures"),
        aria_labelledby="all",
    )


def _row(run: Run) -> list[str]:
    name, _, *numbers = comparison_row(run)
    mark, word = verdict_mark(run.verdict)
    text = f"{mark} {word}"
    verdict = element("span", text, class_="violation") if run.verdict is Verdict.VIOLATION else text
    return [name, verdict, *numbers]


def _run_section(run: Run, index: int, *, alone: bool) -> Html:
    """Return the verdict, grounds, plots, diagnostics and settings of a run; a single run has no heading."""
    name = f"run-{index}"
    heading = None if alone else element("h2", run.name, id=name)
    return element(
        "section",
        heading,
        _verdict_section(run),
        _numbers(run),
        _grounds(run),
        _plots(run),
        None if run.diagnosis is None else _diagnosis(run, run.diagnosis),
        _settings(run),
        class_="run",
        aria_labelledby=None if alone else name,
        aria_label=run.name if alone else None,
    )


def _verdict_section(run: Run) -> Html:
    mark, word = verdict_mark(run.verdict)
    label = element("p", element("span", mark, aria_hidden="true"), f" {word}", class_="word")
    kind = word.lower().replace(" ", "-")
    return element(
        "div",
        label,
        element("p", headline(run), class_="headline"),
        element("p", run.sentence),
        class_=f"verdict {kind}",
    )


def _numbers(run: Run) -> Html:
    entries = [
        ("claimed", f"epsilon {number(run.claim.epsilon)}", f"at delta = {run.claim.delta:g}"),
        ("lower bound", f"epsilon {number(run.bound.epsilon)}", f"{run.bound.kind} bound"),
        ("confidence", _validate.percent(run.bound.confidence), "for the bound"),
    ]
    if run.power is not None:
        leak = smallest_leak(run)
        seen = leak if leak == "none" else f"epsilon {leak}"
        below = f"with {_validate.percent(run.power.probability)} probability"
        by = ", by an ideal attack" if run.power.is_ideal else ""
        entries.append(("smallest detectable leak", seen, below + by))
    tiles = [
        element("div", element("dt", label), element("dd", element("strong", value), element("small", below)))
        for label, value, below in entries
    ]
    return element("dl", *tiles, class_="numbers")


def _grounds(run: Run) -> Html:
    """Return the grounds for the verdict, in full sentences."""
    entries: list[tuple[str, Html]] = [(label, element("p", text)) for label, text in summary(run)]
    entries += [(label, _list(texts)) for label, texts in lists(run) if texts]
    items = [item for label, text in entries for item in (element("dt", label), element("dd", text))]
    return element("dl", *items, class_="grounds")


def _list(texts: Sequence[str]) -> Html:
    return element("ul", *(element("li", text) for text in texts))


def _plots(run: Run) -> Html:
    """Draw two plots per row; an odd last one has its text beside it."""
    functions = list(_plot_functions(run))
    odd = len(functions) if len(functions) % 2 else None
    drawn = [draw(wide=count == odd) for count, draw in enumerate(functions, start=1)]
    return element("div", *drawn, methods_plot(run) if run.methods else None, class_="figures")


def _plot_functions(run: Run) -> Iterator[Callable[..., Html]]:
    """Yield a function for each plot that the data of this run allow."""
    figures = run.figures
    if figures.scores is not None:
        yield partial(scores_plot, figures.scores)
    if figures.course is not None:
        yield partial(trajectory_plot, run, figures.course)
    if figures.plane is not None:
        yield partial(tradeoff_plot, figures.plane)
    if run.estimate is not None and run.estimate.roc is not None:
        yield partial(roc_plot, run.estimate.roc)


def _diagnosis(run: Run, diagnosis: Diagnosis) -> Html:
    flagged = {finding.name for finding in diagnosis.findings}
    rows = [
        (check.name, f"{check.p_value:.2g}", "finding" if check.name in flagged else "")
        for check in diagnosis.checks
    ]
    elements = [element("h3", "Diagnostics"), element("p", " ".join(diagnosis_sentences(run, diagnosis)))]
    if diagnosis.findings:
        elements.append(_list([f"{finding.name}: {finding.sentence}" for finding in diagnosis.findings]))
    elements += [element("p", f"Note: {note}") for note in diagnosis.notes]
    tests = table(("test", "p-value", ""), rows, label="All tests")
    elements.append(element("details", element("summary", "Data: all tests"), tests))
    return element("div", *elements, class_="part")


def _settings(run: Run) -> Html | None:
    """Return facts about the training run; its configuration and provenance are long, hence collapsed."""
    elements: list[Html] = []
    for title, lines in sections(run):
        heading = element("h3", title)
        if title == "Training":
            elements += [heading, _lines(lines)]
        else:
            elements.append(element("details", element("summary", heading), _lines(lines)))
    return element("div", joined(elements), class_="part") if elements else None


def _lines(lines: Mapping[str, str]) -> Html:
    pairs = [element("div", element("dt", label), element("dd", text)) for label, text in lines.items()]
    return element("dl", *pairs, class_="settings")
