"""How a result shows itself in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from dpaudit._markup import Html, element

__all__ = ["labelled", "result_html"]


def labelled(heading: str, text: str, rows: Sequence[tuple[str, str]]) -> Html:
    """A sentence and lines with a label each; its looks are those of the notebook."""
    lines = [
        element("tr", element("th", label, scope="row", align="left"), element("td", words, align="left"))
        for label, words in rows
    ]
    body = element("table", element("tbody", *lines)) if lines else None
    return element("div", element("p", element("strong", heading), " ", text), body)


def result_html(
    verdict: str, sentence: str, rows: Sequence[tuple[str, str]], lists: Sequence[tuple[str, Sequence[str]]]
) -> Html:
    """Verdict, lines, and lists whose label stands at their first line only."""
    more = [(label if place == 0 else "", text) for label, texts in lists for place, text in enumerate(texts)]
    return labelled(f"{verdict}.", sentence, [*rows, *more])
