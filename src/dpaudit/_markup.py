"""HTML whose text cannot become markup: what is not made here is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

__all__ = ["EMPTY", "Child", "Html", "element", "joined"]

_VOID = frozenset({"br", "col", "hr", "meta", "link"})


class Html(str):
    """Markup that is already what it should be. Only :func:`element` and constants of ours make it."""

    __slots__ = ()


Child: TypeAlias = str | Html | None

EMPTY = Html()


def element(tag: str, /, *children: Child, **attributes: str | float | bool | None) -> Html:
    """One element. Text and attributes are escaped; ``None`` is left out; ``class_`` is ``class``.

    >>> element("p", "1 < 2", element("b", "so"), class_="note", data_of='"it"')
    '<p class="note" data-of="&quot;it&quot;">1 &lt; 2<b>so</b></p>'
    """
    opened = f"<{tag}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(opened if tag in _VOID else f"{opened}{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Html:
    """Several, one after the other."""
    return Html("".join(_text(child) for child in children if child is not None))


def _text(child: str) -> str:
    return child if isinstance(child, Html) else escape(child)


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(value if isinstance(value, str) else f"{value:.6g}")}"'
