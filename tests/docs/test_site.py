"""The site that ``make docs`` builds: no warnings, a search index, copy buttons, and no page that scrolls sideways."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import WIDTHS, browser
from tests.docs.pages import DOCS

for name in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
    pytest.importorskip(name, reason="the extra 'docs' is not installed")

PAGES = ("index", "configuration", "cli", "comparison", "troubleshooting", "api", "api/training")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    options = ("-q", "-W", "--keep-going", "-b", "html")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_what_it_has(site: Path) -> None:
    assert (site / "search.html").is_file()
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("boundari", "api/training"))
    assert "copybutton.js" in (site / "cli.html").read_text(encoding="utf-8")


def test_in_a_browser(site: Path) -> None:
    """Wide tables scroll by themselves on a telephone, and the search finds pages."""
    with browser() as opened:
        for width in WIDTHS:
            context = opened.new_context(viewport={"width": width, "height": 800}, offline=True)
            page = context.new_page()
            for name in PAGES:
                page.goto((site / f"{name}.html").as_uri())
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, width)
            page.goto((site / "configuration.html").as_uri())
            table = page.locator(".table-wrapper").first
            assert table.evaluate("one => one.scrollWidth > one.clientWidth") == (width < 768)
            assert page.locator("div.highlight-json button.copybtn").count() >= 1
            page.goto((site / "cli.html").as_uri())
            assert page.locator("div.highlight-bash button.copybtn").count() >= 3
            assert page.locator("div.highlight-text button.copybtn").count() == 0, "nobody copies what is printed"
            context.close()
        page = opened.new_page()
        page.goto((site / "search.html").as_uri() + "?q=hostfile")
        page.wait_for_selector("ul.search a", timeout=60_000)
        assert page.locator("ul.search a", has_text="nodes").count() >= 1
