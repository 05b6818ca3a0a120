"""The parts of every plot of a report, as SVG: axes, marks, a legend, and a table of the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dpaudit._html import Html, element, joined


@dataclass(frozen=True)
class AxisScale:
    """A mapping of numbers from ``low`` to ``high`` to coordinates from ``start`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    counts: bool = False
    """Whether the numbers are integers."""
    log: bool = False
    """Whether the scale is logarithmic, with ticks at powers of ten."""
    most: int = 5
    """One less than the largest number of ticks."""

    def __call__(self, value: float) -> float:
        """Return the coordinate of a number; a distant or infinite number is drawn just outside."""
        low, high, at = (
            math.log(max(quantity, 1e-300)) if self.log else quantity
            for quantity in (self.low, self.high, value)
        )
        share = min(max((at - low) / (high - low), -1.0), 2.0)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round numbers within the range."""
        if self.log:
            ends = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            return [10.0**power for power in range(ends[0], ends[1] + 1)]
        first = math.ceil(self.low / self._step - 1e-9)
        last = math.floor(self.high / self._step + 1e-9)
        return [round(i * self._step, 12) for i in range(first, last + 1)]

    def label(self, value: float) -> str:
        """Format a number with enough digits to distinguish ticks."""
        if self.log:
            return f"{value:g}"
        digits = max(0, -math.floor(math.log10(self._step) + 1e-9))
        return f"{value:,.{digits}f}" if digits <= 6 else f"{value:.3g}"

    @property
    def _step(self) -> float:
        """The distance of ticks, rounded up to 1, 2 or 5 times a power of ten."""
        step = (self.high - self.low) / self.most
        power = 10.0 ** math.floor(math.log10(step))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))
        return max(step, 1.0) if self.counts else step


def number(value: float | None) -> str:
    """Format with four digits, which is more than the precision of any of these numbers."""
    if value is None:
        return "\N{EN DASH}"
    return "infinite" if math.isinf(value) else f"{value:.4g}"


WIDTH = 440  # about half of a page, so that labels are as large as text
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 20, 10, 46


@dataclass(frozen=True)
class Canvas:
    """A picture of a given height with two axes. All marks are plain shapes with a class."""

    x: AxisScale
    y: AxisScale
    height: float

    @classmethod
    def of(
        cls,
        x: tuple[float, float],
        y: tuple[float, float],
        height: float = 280,
        *,
        counts: bool = False,
        log: bool = False,
    ) -> Canvas:
        """Create axes over these ranges; ``counts`` states that x is an integer, ``log`` is for both axes."""
        across = AxisScale(*x, _LEFT, WIDTH - _RIGHT, counts, log)
        up = AxisScale(*y, height - _BOTTOM, _TOP, log=log)
        return cls(across, up, height)

    def axes(self, x_label: str, y_label: str | None = None) -> Html:
        """Draw grid lines at round numbers, and the labels of both axes, or of the x axis alone."""
        middle = (self.x.start + self.x.end) / 2
        x_name = element("text", x_label, class_="axis middle", x=middle, y=self.height - 8)
        rows = [] if y_label is None else self._rows(y_label)
        return joined([*self._columns(), x_name, *rows])

    def _columns(self) -> Iterable[Html]:
        bottom = self.y.start
        for tick in self.x.ticks():
            at = self.x(tick)
            yield element("line", class_="grid", x1=at, x2=at, y1=self.y.end, y2=bottom)
            yield element("text", self.x.label(tick), class_="tick middle", x=at, y=bottom + 16)

    def _rows(self, label: str) -> Iterable[Html]:
        left, middle = self.x.start, (self.y.start + self.y.end) / 2
        for tick in self.y.ticks():
            at = self.y(tick)
            yield element("line", class_="grid", x1=left, x2=self.x.end, y1=at, y2=at)
            yield element("text", self.y.label(tick), class_="tick end", x=left - 7, y=at + 4)
        turned = f"rotate(-90 12 {middle:g})"
        yield element("text", label, class_="axis middle", x=12, y=middle, transform=turned)

    def line(self, xs: Iterable[float], ys: Iterable[float], class_: str) -> Html:
        """Draw a line through these points."""
        return element("path", class_=class_, d=_path(self._points(xs, ys)))

    def area(self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], class_: str) -> Html:
        """Fill the area between two lines."""
        there, back = self._points(xs, high), self._points(xs, low)
        return element("path", class_=class_, d=_path([*there, *reversed(back)]) + "Z")

    def horizontal(self, value: float, class_: str) -> Html:
        """Draw a horizontal line."""
        at = self.y(value)
        return element("line", class_=class_, x1=self.x.start, x2=self.x.end, y1=at, y2=at)

    def vertical(self, value: float, class_: str) -> Html:
        """Draw a vertical line."""
        at = self.x(value)
        return element("line", class_=class_, x1=at, x2=at, y1=self.y.start, y2=self.y.end)

    def box(self, x: tuple[float, float], y: tuple[float, float], class_: str) -> Html:
        """Draw a rectangle, large enough to be visible."""
        left, right, top, bottom = self.x(x[0]), self.x(x[1]), self.y(y[1]), self.y(y[0])
        width, height = max(right - left, 1), max(bottom - top, 1)
        return element("rect", class_=class_, x=left, y=top, width=width, height=height)

    def strips(self, xs: Sequence[float], tips: Sequence[str]) -> Html:
        """Add one hover target around each x, with its tip."""
        middles = [(self.x(left) + self.x(right)) / 2 for left, right in pairwise(xs)]
        edges = [self.x.start, *middles, self.x.end]
        return joined(
            element(
                "rect", class_="hit", x=edges[i], y=self.y.end, width=max(edges[i + 1] - edges[i], 0.5),
                height=self.y.start - self.y.end, data_tip=tip,
            )
            for i, tip in enumerate(tips)
        )  # fmt: skip

    def inside(self, *marks: Html) -> Html:
        """Clip marks at the axes."""
        left, top = self.x.start, self.y.end
        wide, high = self.x.end - left, self.y.start - top
        box = f"{left:g} {top:g} {wide:g} {high:g}"
        return element("svg", *marks, x=left, y=top, width=wide, height=high, viewBox=box)

    def svg(self, *marks: Html, label: str) -> Html:
        """Return the picture. Once it has the focus, the arrow keys step through its points."""
        return element(
            "svg",
            *marks,
            class_="plot",
            viewBox=f"0 0 {WIDTH} {self.height:g}",
            role="group",
            aria_label=f"{label}. Use the arrow keys to read its points.",
            tabindex="0",
        )

    def _points(self, xs: Iterable[float], ys: Iterable[float]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in zip(xs, ys, strict=True)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Return the ``d`` of a path, to a tenth of a pixel."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


@dataclass(frozen=True)
class Numbers:
    """The numbers of a plot, as a table; its first ``words`` columns are no numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    @property
    def tips(self) -> list[str]:
        """Each row as the text that is shown beside its mark."""
        return ["\n".join(map("{}: {}".format, self.header, row)) for row in self.rows]


def figure(
    title: str, text: str, picture: Html, numbers: Numbers, *, keys: Sequence[tuple[str, str]], wide: bool
) -> Html:
    """Return a picture with title, text, legend and numbers; a wide one has its text beside it."""
    name = f"{title[0].lower()}{title[1:]}"
    rows = table(numbers.header, numbers.rows, words=numbers.words, label=f"{title}, as a table")
    shown = element("details", element("summary", f"Data: {name}"), rows)
    caption = element("figcaption", element("h3", title), element("p", text))
    return element("figure", caption, key(*keys), picture, shown, class_="wide" if wide else None)


def key(*entries: tuple[str, str]) -> Html:
    """Return a legend of marks, each given by its class and meaning."""
    return element("ul", *(element("li", _swatch(mark), words) for mark, words in entries), class_="key")


def _swatch(mark: str) -> Html:
    shape = {
        "area": element("rect", class_=mark, x=1, y=2, width=20, height=10),
        "line": element("line", class_=mark, x1=1, x2=21, y1=7, y2=7),
        "dot": element("circle", class_=mark, cx=11, cy=7, r=4),
    }[mark.split(maxsplit=1)[0]]
    return element("svg", shape, viewBox="0 0 22 14", width=22, height=14, aria_hidden="true")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, label: str) -> Html:
    """Return a table; its first ``words`` columns are aligned left, numbers right."""
    classes = [None if column < words else "number" for column in range(len(header))]
    heads = [
        element("th", name, scope="col", class_=class_name)
        for name, class_name in zip(header, classes, strict=True)
    ]
    body = [
        element(
            "tr",
            *(element("td", cell, class_=class_name) for cell, class_name in zip(row, classes, strict=True)),
        )
        for row in rows
    ]
    content = element("table", element("thead", element("tr", *heads)), element("tbody", joined(body)))
    # wide tables scroll within the page
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)
