"""Pages in a real browser without a window: Chromium, driven by playwright; without them tests skip with the reason."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (320, 768, 1280)
"""Of a telephone, of a tablet, of a desk."""

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it drives a browser")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip(f"no browser here: none of {', '.join(_NAMES)} is on the PATH")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()


@contextmanager
def shown(opened: Any, file: Path, width: int, scheme: str = "light") -> Iterator[Any]:
    """A page as a reader has it: on a screen of so many pixels, dark or light. Nothing outside may be asked for."""
    context = opened.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    page = context.new_page()
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(file.resolve().as_uri())
    try:
        yield page
        assert [url for url in asked if not url.startswith("data:")] == [file.resolve().as_uri()]
        assert not wrong
    finally:
        context.close()


# What is wider than the screen, though nothing around it scrolls.
_WIDER = """() => [...document.body.querySelectorAll("*")].filter(one => {
  const scrolls = one.closest(".wide, .table-wrapper");
  return one.getBoundingClientRect().right > innerWidth + 1 && (!scrolls || scrolls === one);
}).map(one => one.outerHTML.slice(0, 80))"""
_HIDDEN = """() => [...document.querySelectorAll(".wide")].filter(one =>
  one.scrollWidth > one.clientWidth + 1 && !["auto", "scroll"].includes(getComputedStyle(one).overflowX)).length"""
# The least contrast of what is written on the page, as WCAG counts it; pictures are left out.
_CONTRAST = """() => {
  const light = text => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return Math.min(...[...document.querySelectorAll("h1,h2,h3,p,td,th,dt,dd,figcaption,svg text")].map(one => {
    const style = getComputedStyle(one);
    const ink = light(one instanceof SVGElement ? style.fill : style.color);
    return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
  }));
}"""


def check_layout(page: Any) -> None:
    """The page itself does not scroll sideways, and nothing that is too wide for it is cut off."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.evaluate(_WIDER)
    assert page.evaluate(_WIDER) == []
    assert page.evaluate(_HIDDEN) == 0


def least_contrast(page: Any) -> float:
    """Of letters against the page; 4.5 is readable."""
    return float(page.evaluate(_CONTRAST))
