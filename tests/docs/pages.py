"""The Markdown pages, read: headings with their anchors, links, blocks of code."""

from __future__ import annotations

import re
import subprocess
import textwrap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^ *\2 *$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^(#{1,6})\s+(.+?)\s*#*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: path from the repository's root.
        line: of the page, where its code begins, counted from 1.
        language: what follows the fence; empty if nothing does.
        code: without the indentation that all lines share.
    """

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@lru_cache
def pages() -> tuple[str, ...]:
    """Every Markdown page that git knows or would add, by path from the root."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        capture_output=True, text=True, check=False,
    ).stdout.split()
    if not found:  # not a checkout
        found = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *DOCS.glob("*.md"))]
    return tuple(sorted(page for page in found if (ROOT / page).exists()))


@lru_cache
def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, *languages: str) -> list[Block]:
    """Its blocks of code, of these languages or of all."""
    text = read(page)
    return [
        Block(page, text.count("\n", 0, match.start(4)) + 1, match[3].strip(), textwrap.dedent(match[4]))
        for match in _FENCE.finditer(text)
        if not languages or match[3].strip() in languages
    ]


def prose(page: str) -> str:
    """The page without its blocks of code and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", read(page)), flags=re.DOTALL)


def spans(page: str) -> list[str]:
    """What stands between backticks within the text."""
    return [" ".join(match[2].split()) for match in _SPAN.finditer(prose(page))]


def links(page: str) -> list[str]:
    """Targets of its links and pictures."""
    return _LINK.findall(_SPAN.sub("`x`", prose(page)))


def anchors(page: str) -> set[str]:
    """What a link may name behind the ``#``: of each heading, as GitHub and the site's generator make it."""
    found: set[str] = set()
    for _, title in _HEADING.findall(prose(page)):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        unique, n = slug, 0
        while unique in found:
            n += 1
            unique = f"{slug}-{n}"
        found.add(unique)
    return found
