"""Blocks of code: each Python block is run and its names are looked up, JSON is valid, commands exist."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import deepspeed
import numpy
import pytest
import torch
from deepspeed.pipe import PipelineModule

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule
from dynpipe_ds.config import SECTION, parse_config
from dynpipe_ds.measure import clock
from dynpipe_ds.partition import registry
from tests.cli.conftest import example_profile
from tests.docs import commands, names, pages
from tests.docs.pages import ROOT, Block

HERE, RANKS, WORKERS = "run in this process", "tests/docs/test_on_ranks.py", "tests/docs/test_on_workers.py"

# How each Python block of a page is checked, in order: in this process, or by the test that runs it.
CHECKED: dict[str, list[str]] = {
    "README.md": [RANKS],
    "docs/change_one_import.md": [RANKS, RANKS],
    "docs/checkpoints.md": [RANKS],
    "docs/cli.md": [HERE, RANKS, HERE],
    "docs/clients.md": [HERE],
    "docs/configuration.md": [RANKS],
    "docs/elastic.md": [WORKERS],
    "docs/experts.md": [HERE, HERE],
    "docs/extending.md": [RANKS, RANKS, "tests/release/test_docs.py"],
    "docs/finer_layers.md": [HERE],
    "docs/freezing.md": [RANKS],
    "docs/layers.md": [RANKS],
    "docs/huggingface.md": ["tests/hf/test_on_ranks.py", "tests/hf/test_adapters.py"],
    "docs/nodes.md": ["tests/slurm/test_nodes_on_slurm.py"],
    "docs/objections.md": [HERE],
    "docs/repacking.md": [WORKERS],
    "docs/scenarios.md": ["tests/scenarios/test_docs_example.py"],
    "docs/schedules.md": [RANKS],
    "docs/simulation.md": [HERE] * 6,
    "docs/survive.md": [WORKERS, WORKERS],
    "docs/trainers.md": ["tests/hf/test_trainers_page.py"] * 2,
    "docs/watch.md": ["tests/reporting/test_run_page.py"],
}

# Names that the text around a block explains.
GIVEN: dict[str, Any] = {
    "engine": DynamicPipelineEngine, "deepspeed": deepspeed, "numpy": numpy,
    "DynamicPipelineModule": DynamicPipelineModule, "PipelineModule": PipelineModule,
    **dict.fromkeys(("layers", "loss_fn", "data_iter", "position", "num_batches", "data", "batches"), names.UNKNOWN),
}
VALUES = {"numpy": numpy, "num_stages": 4, "num_micro_batches": 8, "forward_s": [1.0] * 4, "backward_s": [2.0] * 4}
PYTHON = [block for page in pages.pages() for block in pages.blocks(page, "python")]


def run_here(block: Block) -> dict[str, Any]:
    """Run a block; what it prints must be what the comment behind the ``print`` says."""
    printed, space = io.StringIO(), {**VALUES, "__name__": "page"}
    if "simulate(" in block.code and "import" not in block.code:
        exec("from dynpipe_ds.simulation import Workload, simulate", space)  # of the block before
    with contextlib.redirect_stdout(printed):
        exec(compile(block.code, str(block), "exec"), space)
    expected = re.findall(r"^print\(.*?\) +# (.+)$", block.code, re.MULTILINE)
    if expected:
        assert printed.getvalue().splitlines() == expected
    return space


def test_every_page_says_how_its_blocks_are_checked() -> None:
    found = {page: len(pages.blocks(page, "python")) for page in pages.pages()}
    assert {page: number for page, number in found.items() if number} == {
        page: len(ways) for page, ways in CHECKED.items()
    }
    for way in {way for ways in CHECKED.values() for way in ways}:
        assert way == HERE or (ROOT / way).exists()
    for page, ways in CHECKED.items():
        for way in set(ways) - {HERE, RANKS}:
            assert Path(page).name in (ROOT / way).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_names(block: Block) -> None:
    pytest.importorskip("transformers") if "transformers" in block.code else None
    assert not names.problems(block.code, GIVEN | dict.fromkeys(VALUES, names.UNKNOWN) | _before(block))


def _before(block: Block) -> dict[str, Any]:
    """What earlier blocks of the page have imported or bound."""
    earlier = "\n".join(other.code for other in PYTHON if other.page == block.page and other.line < block.line)
    space: dict[str, Any] = {}
    for line in re.findall(r"^(?:from|import) .*$", earlier, re.MULTILINE):
        exec(line, space)
    return space


@pytest.mark.parametrize(
    "block", [block for i, block in enumerate(PYTHON) if CHECKED[block.page][
        [b for b in PYTHON if b.page == block.page].index(block)] == HERE], ids=str,
)
def test_run_here(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))
    monkeypatch.setattr(clock, "_given", None)
    monkeypatch.chdir(tmp_path)
    example_profile((1.0,) * 14, (0, 4, 9, 14)).save("profile.json")
    space = run_here(block)
    if "use_clock" in space:  # docs/simulation.md: engines read it from now on, and ten seconds pass in one
        begun, machine = clock.current_clock(), clock.HostClock()
        assert begun.now_s() == pytest.approx(10 * machine.now_s(), rel=0.01)
    if "layers" in space:  # docs/cli.md: what a model function returns
        layers, (inputs, labels), loss_fn = space["layers"]()
        for layer in layers:
            inputs = (layer.build() if hasattr(layer, "build") else layer)(inputs)
        assert torch.isfinite(loss_fn(inputs, labels))


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("engine.repak(2)", "engine.repak does not exist"),
        ("engine.repartition(bounds=[0, 1])", "engine.repartition takes no bounds="),
        ("from dynpipe_ds import Nothing", "dynpipe_ds has no Nothing"),
        ("engin.repack(2)", "nothing is called 'engin'"),
    ],
)
def test_wrong_names_are_found(code: str, told: str) -> None:
    (line,) = names.problems(code, GIVEN)
    assert told in line


@pytest.mark.parametrize("block", [b for page in pages.pages() for b in pages.blocks(page, "json")], ids=str)
def test_json(block: Block) -> None:
    values = json.loads(block.code)
    if SECTION in values:
        assert parse_config(values).enabled


@pytest.mark.parametrize("page", [page for page in pages.pages() if commands.commands(page)])
def test_commands(page: str) -> None:
    wrong = [f"{command}: {told}" for command in commands.commands(page) if (told := commands.problem(command, page))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("make runn", "no target runn"),
        ("make run SCENARIOS=moe", "no variable SCENARIOS"),
        ("make run SCENARIO=mow", "scenario=mow"),
        ("python -m benchmarks.nothing", "no module"),
        ("dynpipe plan profile.json --stagez 2", "stagez"),
        ("deepspeed --no_local_rank --num_gpuss 2 train.py", "num_gpuss"),
        ("deepspeed --module scenarios.train scenario.frozzen=2", "frozzen"),
        ("run.batchez=3", "batchez"),
    ],
)
def test_wrong_commands_are_found(command: str, told: str) -> None:
    assert told in str(commands.problem(command, "README.md"))
