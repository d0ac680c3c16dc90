"""The pages of the scenarios: command, paper, every setting, what was measured, pictures."""

from __future__ import annotations

import re

import pytest
import yaml

from scenarios.settings import config_folder
from tests.docs import commands, pages

PAGES = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str) -> None:
    page = f"docs/{name}.md"
    text = pages.read(page)
    assert re.search(r" \d{4}\)", text), "a paper, with its year"
    assert "## Measured\n" in text
    assert [command for command in commands.commands(page) if re.search(rf"(?i:scenario)={name}( |$)", command)]
    pictures = [target for target in pages.links(page) if target.endswith(".png")]
    assert {f"layers_{name}.png", f"timeline_{name}.png"} <= {target.rsplit("/", 1)[1] for target in pictures}


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_is_explained(name: str) -> None:
    page = f"docs/{name}.md"
    told = {word for span in pages.spans(page) for word in re.findall(r"\w+", span)}
    files = [config_folder() / "scenario" / f"{scenario}.yaml" for scenario in commands.scenarios_of(page)]
    for file in files:
        settings = set(yaml.safe_load(file.read_text(encoding="utf-8"))) - {"name", "defaults"}
        assert settings <= told, f"{file.name}: {sorted(settings - told)} not on {page}"
