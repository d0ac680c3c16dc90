"""The supported versions are said in several places, and everywhere alike."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import setuptools

from dynpipe_ds._versions import (
    DEEPSPEED_RANGE,
    LEAST_DEEPSPEED,
    LEAST_PYTHON,
    LEAST_TORCH,
    NEXT_SERIES,
    TESTED_DEEPSPEED,
    TESTED_SERIES,
    is_older,
)

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("0.19.2", "0.19.3", True), ("0.19.3", "0.19.3", False), ("0.19.10", "0.19.3", False), ("1.0", "0.19.3", False),
        ("2.4.0+cu121", "2.4", False), ("2.13.0+cpu", "2.4", False), ("2.3.1", "2.4", True), ("0.9", "0.19", True),
        ("2.4.0a0+gitd990dad", "2.4", False),
    ],
)  # fmt: skip
def test_versions_are_compared_as_numbers(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) is older


def test_setup_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(ROOT / "setup.py"))
    assert f"torch>={LEAST_TORCH}" in given["install_requires"] and DEEPSPEED_RANGE in given["install_requires"]
    assert given["python_requires"] == f">={LEAST_PYTHON}"
    assert DEEPSPEED_RANGE == f"deepspeed>={LEAST_DEEPSPEED},<{NEXT_SERIES}"
    assert LEAST_DEEPSPEED.startswith(f"{TESTED_SERIES}.") and is_older(TESTED_DEEPSPEED, NEXT_SERIES)


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_pages_say_the_same(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    said = f"Python {LEAST_PYTHON} or newer, torch {LEAST_TORCH} or newer, DeepSpeed {LEAST_DEEPSPEED} or newer"
    assert f"{said} of the series {TESTED_SERIES}" in text


def test_the_default_of_clipping_is_what_the_page_says() -> None:
    from deepspeed.runtime import constants

    text = " ".join((ROOT / "docs" / "exactness.md").read_text(encoding="utf-8").split())
    said = re.search(r"by default DeepSpeed clips at (\d\.\d)", text)
    assert said and float(said.group(1)) == constants.GRADIENT_CLIPPING_DEFAULT, deepspeed.__version__
