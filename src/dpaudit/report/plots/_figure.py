"""A picture with its title, what it says, its key, and its numbers as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpaudit._markup import Html, element, joined

__all__ = ["figure", "key", "table"]


def figure(title: str, text: str, picture: Html, numbers: Html, *, keys: Html, wide: bool = False) -> Html:
    """Everything that belongs to one picture; a wide one has its words beside it, where there is room."""
    caption = element("figcaption", element("h3", title), element("p", text))
    shown = element("details", element("summary", f"Numbers: {title[0].lower()}{title[1:]}"), numbers)
    return element("figure", caption, keys, picture, shown, class_="wide" if wide else None)


def key(*entries: tuple[str, str]) -> Html:
    """What each mark stands for: its class, and words."""
    return element("ul", *(element("li", _swatch(mark), words) for mark, words in entries), class_="key")


def _swatch(mark: str) -> Html:
    shape = {
        "area": element("rect", class_=mark, x=1, y=2, width=20, height=10),
        "line": element("line", class_=mark, x1=1, x2=21, y1=7, y2=7),
        "dot": element("circle", class_=mark, cx=11, cy=7, r=4),
    }[mark.split(maxsplit=1)[0]]
    return element("svg", shape, viewBox="0 0 22 14", width=22, height=14, aria_hidden="true")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, label: str) -> Html:
    """Numbers to the right, the first ``words`` columns to the left."""
    heads = [element("th", name, scope="col", class_=_side(i, words)) for i, name in enumerate(header)]
    body = [
        element("tr", *(element("td", cell, class_=_side(i, words)) for i, cell in enumerate(row)))
        for row in rows
    ]
    whole = element("table", element("thead", element("tr", *heads)), element("tbody", joined(body)))
    # wide tables scroll by themselves, so that the page does not
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=label)


def _side(column: int, words: int) -> str | None:
    return None if column < words else "number"
