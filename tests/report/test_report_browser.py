"""The page in a real browser: drawn, hovered, read with the keyboard, in both themes and on a telephone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, browser, missing

from dpaudit.report import Report

REASON = missing()
REQUIRED = os.environ.get("DPAUDIT_TEST_BROWSER") == "required"
pytestmark = pytest.mark.skipif(REASON is not None and not REQUIRED, reason=str(REASON))

PLOTS = "[...document.querySelectorAll('svg.plot')]"
TIP = "const tip = document.getElementById('tip'); return tip.hidden ? null : tip.textContent"


@pytest.fixture(scope="session")
def opened(report: Report, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("page")
    report.write(folder / "report.html")
    with browser(folder / "profile") as found:
        found.open(folder / "report.html")
        yield found


@pytest.fixture
def page(opened: Browser) -> Iterator[Browser]:
    """On a large light screen; in the end the page may not have complained about anything."""
    opened.resize(1100, 900)
    opened.prefer("light")
    opened.run("delete document.documentElement.dataset.theme; document.activeElement.blur(); scrollTo(0, 0)")
    opened.settle()
    yield opened
    assert opened.console() == []


def test_every_picture_is_drawn_and_has_a_size(page: Browser) -> None:
    drawn = page.run(
        f"return {PLOTS}.map(plot => [plot.clientWidth, plot.clientHeight,"
        " [...plot.querySelectorAll('path, rect.area')].filter(one => one.getBBox().width > 1).length])"
    )
    assert len(drawn) >= 9
    assert all(width > 300 and height > 150 and marks >= 1 for width, height, marks in drawn)


def test_pointing_at_any_picture_tells_its_numbers(page: Browser) -> None:
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
    for number in range(page.run(f"return {PLOTS}.length")):
        box: dict[str, float] = page.run(
            f"const plot = {PLOTS}[{number}]; plot.scrollIntoView({{block: 'center'}});"
            "return plot.querySelectorAll('[data-tip]')[5].getBoundingClientRect().toJSON()"
        )
        page.settle()
        page.point(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        told = page.run(TIP)
        assert told is not None
        assert any(digit in told for digit in "0123456789")
        inside: Any = page.run("return document.getElementById('tip').getBoundingClientRect().toJSON()")
        assert inside["left"] >= 0
        assert inside["right"] <= 1100
    page.run("document.querySelectorAll('details').forEach(one => { one.open = false })")
    page.point(2, 2)
    assert page.run(TIP) is None


def test_the_keyboard_reaches_the_same_numbers(page: Browser) -> None:
    page.run(f"{PLOTS}[0].focus()")
    page.settle()
    assert page.run(TIP) is None
    page.press("ArrowRight")
    first = page.run(TIP)
    page.press("ArrowRight")
    assert page.run(TIP) not in (first, None)
    page.press("ArrowLeft")
    assert page.run(TIP) == first
    page.press("End")
    assert page.run(TIP) == page.run(
        f"return [...{PLOTS}[0].querySelectorAll('[data-tip]')].at(-1).dataset.tip"
    )
    page.press("Escape")
    assert page.run(TIP) is None
    page.press("Tab")  # the numbers of the same picture come next
    assert page.run("return document.activeElement.tagName") == "SUMMARY"


def lightness(colour: str) -> float:
    """Of "rgb(r, g, b)", by WCAG."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((lightness(one), lightness(other)))
    return (high + 0.05) / (low + 0.05)


def colours(page: Browser) -> list[str]:
    """The paper, and everything that is written on it."""
    return page.run(
        "const of = (place, key) => getComputedStyle(document.querySelector(place))[key];"
        "return [of('body', 'backgroundColor'), of('body', 'color'), of('dt', 'color'), of('a', 'color'),"
        " of('.dpaudit.violation .word', 'color'), of('.plot .tick', 'fill'), of('figcaption p', 'color')]"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_can_be_read(page: Browser, theme: str) -> None:
    page.prefer(theme)
    paper, *written = colours(page)
    assert (lightness(paper) < 0.1) == (theme == "dark")
    assert min(contrast(paper, colour) for colour in written) >= 4.5


def test_the_button_changes_the_theme_and_says_what_it_will_do(page: Browser) -> None:
    button = "document.getElementById('theme')"
    assert page.run(f"return {button}.textContent") == "Dark theme"
    page.run(f"{button}.click()")
    assert page.run(f"return [{button}.textContent, {button}.ariaPressed]") == ["Light theme", "true"]
    assert lightness(colours(page)[0]) < 0.1
    page.run(f"{button}.click()")
    assert lightness(colours(page)[0]) > 0.9


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_violation_is_red_and_can_be_read_on_its_band(page: Browser, theme: str) -> None:
    page.prefer(theme)
    band, *written = page.run(
        "const of = (place, key) => getComputedStyle(document.querySelector(place))[key];"
        "return [of('.dpaudit.violation', 'backgroundColor'), of('.dpaudit.violation .word', 'color'),"
        " of('.dpaudit.violation .headline', 'color'), of('td .violation', 'color')]"
    )
    paper, link = colours(page)[0], colours(page)[3]
    assert min(contrast(band, colour) for colour in written) >= 4.5
    assert contrast(paper, written[-1]) >= 4.5
    assert written[0] == written[-1] != link
    red, green, blue = (float(part) for part in written[0][4:-1].split(","))
    assert red > 1.4 * max(green, blue)


def test_a_verdict_in_the_table_has_its_sign_beside_the_colour(page: Browser) -> None:
    told = page.run("return [...document.querySelectorAll('td .violation')].map(one => one.textContent)")
    assert told == ["\N{BLACK UP-POINTING TRIANGLE} VIOLATION (privacy)"]


def test_a_wide_table_scrolls_in_its_box_to_its_last_column(page: Browser) -> None:
    page.resize(400, 740)
    inside, wide, right, shade = page.run(
        "const box = document.querySelector('.scroll'); box.scrollLeft = 9999;"
        "return [box.clientWidth, box.scrollWidth, box.querySelector('th:last-child')"
        ".getBoundingClientRect().right, getComputedStyle(box).backgroundAttachment]"
    )
    assert wide > inside
    assert right <= 400
    assert shade == "local, local, scroll, scroll"
    page.run("document.querySelector('.scroll').scrollLeft = 0")


def test_the_configuration_is_folded(page: Browser) -> None:
    folded = page.run(
        "return [...document.querySelectorAll('summary h3')].map(one =>"
        " [one.textContent, one.closest('details').open, one.checkVisibility()])"
    )
    titles = [title for title, _, _ in folded]
    assert titles.count("Configuration") == titles.count("Method") == titles.count("All methods") == 2
    assert all(is_visible and not is_open for _, is_open, is_visible in folded)


def test_a_violation_with_its_finding_is_on_the_first_screen(page: Browser) -> None:
    page.resize(1280, 800)
    classes, numbers, finding = page.run(
        "const box = document.querySelector('.dpaudit');"
        "const label = [...box.querySelectorAll('dt')].find(one => one.textContent === 'finding');"
        "const bottom = one => one.getBoundingClientRect().bottom;"
        "return [box.className, bottom(box.querySelector('.headline')), bottom(label)]"
    )
    assert classes == "dpaudit violation"
    assert max(numbers, finding) <= 800


@pytest.mark.parametrize("width", [320, 360, 700])
def test_a_narrow_screen_has_no_sideways_scroll(page: Browser, width: int) -> None:
    page.resize(width, 740)
    page.run("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert page.run("return document.documentElement.scrollWidth") <= width
    outside = page.run(
        "return [...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll, #tip') &&"
        f" one.getBoundingClientRect().right > {width} + 1).map(one => one.outerHTML.slice(0, 120))"
    )
    assert outside == []
    page.run("document.querySelectorAll('details').forEach(one => { one.open = false })")


def test_the_page_can_be_printed(page: Browser) -> None:
    page.prefer("dark")
    assert page.pdf().startswith(b"%PDF-")
    page.devtools("Emulation.setEmulatedMedia", media="print")
    assert lightness(colours(page)[0]) > 0.9  # paper is white
    assert page.run("return document.querySelector('.fold .settings').offsetHeight") > 0  # unfolded
    page.devtools("Emulation.setEmulatedMedia", media="")
