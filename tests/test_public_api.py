"""The public names: recorded, so that none changes by accident; documented, each argument of each."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import json
import re
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("transformers", reason="the extra 'hf' has public names of its own")

ROOT = Path(__file__).parents[1]


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs" / "api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = _load()
REMEDY = "if that is meant: python docs/api.py, and a line in CHANGELOG.md"


def test_no_public_name_or_signature_has_changed() -> None:
    recorded = json.loads(api.RECORD.read_text(encoding="utf-8"))
    lines = [[f"{name}: {what}" for name, what in found.items()] for found in (recorded, api.record())]
    changed = [line for line in difflib.unified_diff(*lines, "recorded", "now", n=0, lineterm="") if line[0] in "+-"]
    assert not changed, "\n".join([*changed, REMEDY])


def test_the_pages_are_up_to_date() -> None:
    pages = api.pages()
    assert {path.stem for path in api.PAGES.glob("*.md")} == set(api.TOPICS)
    for path, text in pages.items():
        assert text == path.read_text(encoding="utf-8"), f"{path.name}: {REMEDY}"


def test_no_page_is_long_and_every_name_is_linked() -> None:
    """One page for all was 3,900 lines."""
    index = api.INDEX.read_text(encoding="utf-8")
    assert all(f"[`{name.rpartition('.')[2]}`](api/" in index for name, _ in api.names())
    longest = max(len(path.read_text(encoding="utf-8").splitlines()) for path in api.PAGES.glob("*.md"))
    assert longest < 1500


def public() -> dict[str, Any]:
    """Everything that has a docstring, by name."""
    found = {}
    for name, value in api.names():
        if inspect.isclass(value) or inspect.isfunction(value):
            found[name] = value
        if inspect.isclass(value):
            found |= {f"{name}.{member}": inner for member, inner in api.members(value)}
    return found


def problems(name: str, value: Any) -> list[str]:
    """What the docstring of a public name lacks."""
    documented = value if inspect.isclass(value) else api.function_of(value)
    text = inspect.cleandoc(documented.__doc__ or "")
    if not text:
        return [f"{name}: has no docstring"]
    if inspect.isclass(value) and (issubclass(value, Enum) or Protocol in value.__bases__):
        return []
    try:
        signature = inspect.signature(documented)
    except ValueError:  # an exception without a constructor of its own
        return []
    arguments = [argument for argument in signature.parameters if argument not in ("self", "cls")]
    told = {entry.lstrip("*") for entries in re.findall(r"^    ([*\w., ]+):", text, re.MULTILINE)
            for entry in entries.split(", ")}  # fmt: skip
    lacking = [f"{name}: says nothing of {argument}" for argument in arguments if argument not in told]
    returns = api.annotation(signature.return_annotation) not in ("None", "NoReturn") and not inspect.isclass(value)
    if returns and arguments and "Returns:" not in text and "Return" not in text.split("\n")[0]:
        lacking.append(f"{name}: does not say what is returned")
    return lacking


def test_every_public_name_is_documented() -> None:
    lacking = [problem for name, value in public().items() for problem in problems(name, value)]
    assert len(public()) > 60 and not lacking, "\n".join(lacking)
