"""The example of docs/scenarios.md works as it is printed."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scenarios.scenario import build_scenario
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly
from tests.scenarios.exactness import Job, assert_continued, assert_same_bits, go_on, train_and_save
from tests.scenarios.fakes import FakeEngine, run

DOCUMENT = Path(__file__).parents[2] / "docs" / "scenarios.md"
NAME = "layer_dropping:LayerDropping"


@pytest.fixture(autouse=True)
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The only Python block of the page, saved under the name that the page gives it."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "layer_dropping.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)  # ranks inherit it
    importlib.invalidate_caches()
    yield code


@pytest.mark.parametrize(
    ("stages", "ranks", "optimizer"), 
    mostly([(2, 2, "fp32_adamw"), (3, 3, "fp32_adamw"), (2, 4, "zero1_adamw")], [(2, 2, "fp32_adamw")]),
)
def test_same_bits_whatever_the_partition(stages: int, ranks: int, optimizer: str) -> None:
    """Losses, skips, weights; blocks are skipped more and more, the last ones most."""
    job = Job(NAME, {"keep": 0.1, "speed": 0.5}, stages=stages, optimizer=optimizer, num_batches=10)
    reports = assert_same_bits(job, ranks).reports
    skipped = torch.tensor([report["skipped by layer"] for report in reports])
    assert skipped[0].sum() == 0 and skipped[:, [0, -1]].sum() == 0
    assert skipped[-1, 4] > skipped[-1, 1]
    assert (skipped[9] - skipped[5]).sum() > skipped[4].sum()
    assert reports[-1]["skipped"] != reports[0]["skipped"] == "0%"


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """The counts are kept, and the random numbers are the same ones."""
    jobs = {"layer_dropping": Job(NAME, {"keep": 0.1, "speed": 0.5}, optimizer="zero1_adamw")}
    whole = run_ranks(train_and_save, 2, jobs, str(tmp_path))
    parts = run_ranks(go_on, 2, jobs, str(tmp_path))
    assert_continued("layer_dropping", whole, parts, changing="skipped by layer")


def test_a_skipped_block_costs_nothing() -> None:
    """No operation, forward or backward; evaluation skips none."""
    module = importlib.import_module("layer_dropping")
    scenario = build_scenario(NAME, {})
    engine = FakeEngine(scenario)
    run(engine, scenario, range(2))
    block: Any = engine.layers[2]
    assert isinstance(block, module.SkippableBlock) and 0 < block.skip_rate < 0.5
    block.skip_rate = 1.0
    x = torch.randn(2, 12, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        assert block(x) is x
    assert counter.get_total_flops() == 0
    with FlopCounterMode(display=False) as counter:
        assert block.eval()(x) is not x
    assert counter.get_total_flops() > 0


def test_the_example_is_short_and_refuses_nonsense(example: str) -> None:
    """About 30 statements, and the message has value and rule."""
    assert len([line for line in example.splitlines() if line.strip()]) < 50
    with pytest.raises(ValueError, match="keep=0 must be above 0"):
        build_scenario(NAME, {"keep": 0})
    with pytest.raises(ValueError, match="does not take these settings"):
        build_scenario(NAME, {"kept": 0.5})
