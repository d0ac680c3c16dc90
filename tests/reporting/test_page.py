"""A page by itself: well formed, alone, with words that can't be mistaken for tags."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dynpipe_ds.reporting import Page
from dynpipe_ds.reporting.themed import INK, SERIES, dress, new_figure, svg
from tests.browser import WIDTHS, browser, check_layout, least_contrast, shown


class Parsed(HTMLParser):
    """Checks that tags close in order; collects ids and what is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.loaded += [value for name, value in attrs if name.endswith(("src", "href")) and value]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in ("meta", "img"):
            self.open.pop()


def page() -> Page:
    made = Page("A <title>", "One sentence & more.")
    made.note("<b>first</b>")
    made.facts({"loss": "1.5", "a very long value": "x" * 60})
    made.heading("Tables")
    made.table(
        [["what", *(f"column {i}" for i in range(8))], ["a", *["1,234.5"] * 8], ["  b", *["<1"] * 8]],
        bars=(1, [1.0, None]), best=1, words=(2,),
    )  # fmt: skip
    made.text("A paragraph.", small=True)
    for width in (4.2, 10.0):
        figure = new_figure(width, 2.5)
        axes = figure.subplots()
        axes.plot([0, 1], [2, 3], color=SERIES[0], label="a < b")
        dress(axes, x="batch", y="s")
        if width > 5:
            made.picture(figure, "Wide", described='a "line"', caption="below")
        else:
            made.charts([(figure, "Narrow", "a line", ""), (figure, "Again", "a line", "the same")])
    made.settings({"path": "/a" * 80})
    return made


def test_it_is_well_formed_and_loads_nothing() -> None:
    text = page().render()
    parsed = Parsed(text)
    assert not parsed.open and len(parsed.ids) == len(set(parsed.ids)) >= 6
    assert all(link.startswith(("#", "data:")) for link in parsed.loaded) and "@import" not in text
    for link in (link for link in parsed.loaded if link.startswith("#")):
        assert link[1:] in parsed.ids, "within the page, and the picture's own"
    assert "A &lt;title&gt;" in text and "&lt;b&gt;first" in text and "<b>" not in text
    assert text.count('class="best"') == 1 and 'class="indented"' in text and 'style="width:100.0%"' in text


def test_pictures_have_the_colours_of_the_page() -> None:
    """By name, with both values in the page's style; none that is black or white for good."""
    figure = new_figure(4, 3)
    axes = figure.subplots()
    axes.plot([0, 1], [2, 3], color=SERIES[1])
    axes.text(0, 2, "ink by default")
    dress(axes, x="batch", y="s")
    text = svg(figure, 'a "line"')
    assert text.startswith('<svg role="img" aria-label="a &quot;line&quot;" viewBox="')
    bare = re.sub(r"var\(--c\d+,#\w+\)", "", text)
    assert not re.findall(r"(?:fill|stroke): ?#\w+", bare), "a colour that would not follow the page's"
    style = page().render()
    assert style.count(f"--c0:{INK}") == 1 and "prefers-color-scheme:dark" in style
    assert "ink by default</text>" in text, "letters are letters"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(tmp_path: Path, scheme: str) -> None:
    file = page().save(tmp_path / "new" / "page.html")
    with browser() as opened:
        for width in WIDTHS:
            with shown(opened, file, width, scheme) as seen:
                check_layout(seen)
                assert least_contrast(seen) >= 4.5, scheme
                table = seen.locator(".wide").first
                scrolls = table.evaluate("one => one.scrollWidth > one.clientWidth")
                assert scrolls == (width < 1280), "a table of nine columns"
                columns = seen.locator(".charts").evaluate("one => getComputedStyle(one).gridTemplateColumns")
                assert len(columns.split()) == {320: 1, 768: 2, 1280: 3}[width]


def test_a_browser_finds_what_is_too_wide(tmp_path: Path) -> None:
    """The check can fail: a table that nothing around it scrolls."""
    file = tmp_path / "wide.html"
    file.write_text(f"<!doctype html><body><table><tr>{'<td>wide</td>' * 99}</tr></table></body>")
    with browser() as opened, shown(opened, file, 320) as seen, pytest.raises(AssertionError):
        check_layout(seen)
