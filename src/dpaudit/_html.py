"""HTML with escaped text, for reports and for results in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import TypeAlias

_VOID = frozenset({"br", "col", "hr", "meta", "link"})


class Html(str):
    """Markup that needs no escaping. Only :func:`element` and constants of this package create it."""

    __slots__ = ()


Child: TypeAlias = str | Html | None


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


def definitions(rows: Sequence[tuple[str, str]], class_: str) -> Html:
    """Return labeled sentences; a label that repeats is shown once."""
    items: list[Html] = []
    for index, (label, text) in enumerate(rows):
        if index == 0 or rows[index - 1][0] != label:
            items.append(element("dt", label))
        items.append(element("dd", text))
    return element("dl", *items, class_=class_)


def banner(
    title: str, numbers: str, rows: Sequence[tuple[str, str]], closing: str = "", *, tone: str = "neutral"
) -> Html:
    """Return a verdict, which ``report/assets/banner.css`` styles; its ``tone`` is a class."""
    return element(
        "div",
        element("p", title, class_="word"),
        element("p", numbers, class_="headline") if numbers else None,
        definitions(rows, "facts"),
        element("p", closing, class_="meaning") if closing else None,
        class_=f"dpaudit {tone}",
    )


def alone(content: Html) -> Html:
    """Return a banner with its style, for a notebook."""
    return element("div", element("style", asset("banner.css")), content, class_="dpaudit-alone")


def asset(*names: str) -> Html:
    """Return joined files of the package, which are the same for every page and hence not escaped."""
    folder = resources.files("dpaudit") / "report" / "assets"
    return Html("".join((folder / name).read_text(encoding="utf-8") for name in names))
