"""The tables of the JSON section's keys are those of the config model."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from dynpipe_ds.config import DynamicPipelineConfig
from tests.docs.pages import DOCS

spec: Any = importlib.util.spec_from_file_location("keys", DOCS / "keys.py")
keys: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(keys)


def test_up_to_date() -> None:
    """The pages, and the schema that editors read."""
    for file, before, after in keys.files():
        assert before == after, f"docs/{file.name} is out of date: python docs/keys.py"


def test_a_table_has_every_key_with_default_rule_and_meaning() -> None:
    rows = [line.strip("| ").split(" | ") for line in keys.table("dynamic_pipeline").splitlines()[2:]]
    assert [row[0].strip("`") for row in rows] == list(DynamicPipelineConfig.model_fields)
    assert all(len(row) == 4 and all(row) for row in rows)
    row = {row[0]: row for row in rows}["`min_gain`"]
    assert row[1:3] == ["`0.003`", "a number from 0 up to, but not including, 1"]
    assert row[3].startswith("Least predicted gain")


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="needs <!-- keys of repack: begin -->"):
        keys.insert("no markers", "repack")
