"""Links: every file and every heading that a page names exists, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs import pages
from tests.docs.pages import DOCS, ROOT


def wrong(page: str, target: str) -> str | None:
    """What is wrong with a link, if anything; the web is not asked."""
    url = urlsplit(target)
    if url.scheme:
        return None if url.scheme in ("http", "https") and url.netloc else f"{target}: is no address"
    path = (ROOT / page).parent / unquote(url.path) if url.path else ROOT / page
    if not path.exists():
        return f"{target}: there is no such file"
    if ROOT not in (path.resolve(), *path.resolve().parents):
        return f"{target}: lies outside the repository"
    if url.fragment and path.suffix == ".md" and url.fragment not in pages.anchors(relative(path)):
        return f"{target}: {relative(path)} has no heading #{url.fragment}"
    return None


def relative(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT))


@pytest.mark.parametrize("page", pages.pages())
def test_links(page: str) -> None:
    problems = [problem for target in pages.links(page) if (problem := wrong(page, target))]
    assert not problems, "\n".join(problems)


def test_the_check_finds_what_is_broken() -> None:
    assert wrong("docs/index.md", "nowhere.md") == "nowhere.md: there is no such file"
    assert "no heading #nothing" in str(wrong("docs/index.md", "configuration.md#nothing"))
    assert "is no address" in str(wrong("docs/index.md", "htp://example.org"))
    assert "outside" in str(wrong("docs/index.md", "../../.."))
    assert wrong("docs/index.md", "configuration.md#repack") is None
    assert "repack" in pages.anchors("docs/configuration.md")


def test_every_page_is_in_the_navigation() -> None:
    """In the table of contents of the index, and in its text, which is what a reader of the repository sees."""
    toctrees = [block.code for block in pages.blocks("docs/index.md") if block.language == "{toctree}"]
    lines = [line for tree in toctrees for line in tree.splitlines() if line and not line.startswith(":")]
    listed = [line.split("<")[-1].rstrip(">") for line in lines]
    linked = [target for target in pages.links("docs/index.md") if re.fullmatch(r"[\w]+\.md", target)]
    there = sorted(path.stem for path in DOCS.glob("*.md") if path.name != "index.md")
    assert sorted(listed) == there
    assert sorted({target.removesuffix(".md") for target in linked}) == there
