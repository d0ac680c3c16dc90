"""Every text in the code that a message may be made of."""

from __future__ import annotations

import ast
import re
from bisect import bisect
from functools import lru_cache

from tests.docs.pages import ROOT

VALUE = "…"


@lru_cache
def templates() -> tuple[str, ...]:
    """The texts of both packages, with ``…`` where a value goes; docstrings are not among them."""
    found = set[str]()
    for package in ("dynpipe_ds", "scenarios"):
        for path in sorted((ROOT / package).rglob("*.py")):
            found |= _texts(ast.parse(path.read_text(encoding="utf-8")))
    return tuple(sorted(found))


def _texts(tree: ast.Module) -> set[str]:
    found = set[str]()

    def visit(node: ast.AST) -> None:
        text = _text(node)
        if text is not None:
            found.add(text)
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            children.remove(node.body[0])
        for child in children:
            visit(child)

    visit(tree)
    return found


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else VALUE for v in node.values)  # type: ignore[misc]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else (left or VALUE) + (right or VALUE)
    return None


def is_said(message: str, texts: int = 3) -> bool:
    """Whether the code can say this: its words stand in one text, in this order, or in several one after the other.

    Args:
        message: as documented, ``…`` for values.
        texts: of how many texts it may be put together.
    """
    if _is_in_one(message):
        return True
    if texts == 1:
        return False
    breaks = [i for i, letter in enumerate(message) if letter == " "]
    longest = bisect(breaks, False, key=lambda i: not _is_in_one(message[:i]) and _has_words(message[:i]))
    return any(is_said(message[i:], texts - 1) for i in breaks[max(0, longest - 3):longest] if _is_in_one(message[:i]))


def _has_words(message: str) -> bool:
    return len(re.findall(r"[a-z_]{2,}", message, re.IGNORECASE)) > 1


@lru_cache
def _is_in_one(message: str) -> bool:
    pieces = [piece.strip() for piece in message.split(VALUE)]
    return _has_words(message) and any(_holds(text, pieces) for text in templates())


def _holds(text: str, pieces: list[str]) -> bool:
    at = 0
    for piece in pieces:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True


@lru_cache
def error_classes() -> tuple[str, ...]:
    """Names of the error classes that both packages define."""
    names = set[str]()
    for package in ("dynpipe_ds", "scenarios"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.bases:
                    names.add(node.name)
    return tuple(sorted(names))


