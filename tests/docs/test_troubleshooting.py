"""docs/troubleshooting.md and docs/clients.md: every message is one that the code says; every error class is there."""

from __future__ import annotations

import re

import pytest

from tests.docs import messages, pages

PAGE = "docs/troubleshooting.md"


def documented(page: str) -> list[str]:
    """First cells of the tables, where they are code; in clients.md it is the second cell."""
    rows = re.findall(r"^\|(.*)\|$", pages.read(page), re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    column, width = (0, 2) if page == PAGE else (1, 3)
    return [row[column].strip("`") for row in cells if len(row) == width and row[column].startswith("`")]


@pytest.mark.parametrize("page", [PAGE, "docs/clients.md"])
def test_every_message_is_in_the_code(page: str) -> None:
    found = documented(page)
    assert len(found) >= (45 if page == PAGE else 6)
    unknown = [message for message in found if not messages.is_said(message)]
    assert not unknown, "\n".join(unknown)


def test_other_texts_are_not_found() -> None:
    assert not messages.is_said("the pipeline is … clogged")
    assert not messages.is_said("…")
    assert messages.is_said("re-packing to … stages is not possible: …")
    assert not messages.is_said("re-packing to … planets is not possible: …")


def test_every_error_class_is_explained() -> None:
    known = messages.error_classes()
    assert {"RankLostError", "CheckpointError", "RepackError"} <= set(known)
    headings = [line for line in pages.read(PAGE).splitlines() if line.startswith("## ")]
    told = " ".join(headings) + " ".join(pages.spans(PAGE))
    assert not [name for name in known if name not in told]
