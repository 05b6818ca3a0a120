"""HTML with escaped text, for reports and for results in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

_VOID = frozenset({"br", "col", "hr", "meta", "link"})


class Html(str):
    """Markup that needs no escaping. Only :func:`element` and constants of this package create it."""

    __slots__ = ()


Child: TypeAlias = str | Html | None

EMPTY = Html()


def element(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """Return one element. Text and attributes are escaped; ``None`` is omitted; ``class_`` is ``class``.

    >>> element("p", "1 < 2", element("b", "so"), class_="note", data_of='"it"')
    '<p class="note" data-of="&quot;it&quot;">1 &lt; 2<b>so</b></p>'
    """
    opened = f"<{tag}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(opened if tag in _VOID else f"{opened}{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Html:
    """Return the concatenated children, with text escaped."""
    texts = [child if isinstance(child, Html) else escape(child) for child in children if child is not None]
    return Html("".join(texts))


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value if isinstance(value, str) else f"{value:.6g}")}"'


def labelled(heading: str, text: str, rows: Sequence[tuple[str, str]]) -> Html:
    """Return a sentence and labeled lines, formatted for a notebook."""
    lines = [
        element("tr", element("th", label, scope="row", align="left"), element("td", words, align="left"))
        for label, words in rows
    ]
    body = element("table", element("tbody", *lines)) if lines else None
    return element("div", element("p", element("strong", heading), " ", text), body)


def result_html(
    verdict: str, sentence: str, rows: Sequence[tuple[str, str]], lists: Sequence[tuple[str, Sequence[str]]]
) -> Html:
    """Return the verdict, lines, and lists whose label is on their first line only."""
    more = [(label if index == 0 else "", text) for label, texts in lists for index, text in enumerate(texts)]
    return labelled(f"{verdict}.", sentence, [*rows, *more])
