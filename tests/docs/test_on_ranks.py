"""Blocks of the pages that train, run on two ranks as they stand."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from dynpipe_ds import DynamicPipelineModule
from dynpipe_ds.partition import registry
from tests.distributed.configs import BY_HAND, CLIP, TORCH_ADAMW
from tests.distributed.ranks import run_ranks
from tests.docs import pages
from tests.scenarios.exactness import Job, Trained, train

BEFORE, MOVING = (block.code for block in pages.blocks("docs/change_one_import.md", "python"))
CHECKPOINT = pages.blocks("docs/checkpoints.md", "python")[0].code
HOLDING = pages.blocks("docs/configuration.md", "python")[0].code
FREEZING = pages.blocks("docs/freezing.md", "python")[0].code
TIMELINE = pages.blocks("docs/schedules.md", "python")[0].code
FROM_PROFILE = pages.blocks("docs/cli.md", "python")[1].code
TABLE = pages.blocks("docs/layers.md", "python")[0].code
PARTITIONER, SCENARIO = (block.code for block in pages.blocks("docs/extending.md", "python")[:2])


def after(page: str = "docs/change_one_import.md") -> str:
    """The page's script with the page's change."""
    (diff,) = pages.blocks(page, "diff")
    pairs = re.findall(r"^-(.*)\n((?:\+.*\n)+)", diff.code, re.MULTILINE)
    assert len(pairs) == 2
    script = pages.blocks(page, "python")[0].code
    for old, new in pairs:
        assert script.count(old + "\n") == 1
        script = script.replace(old + "\n", new.replace("+", "", 1).replace("\n+", "\n"))
    return script


@dataclass
class Seen:
    """What one rank saw."""

    before: list[float]
    after: list[float]
    partition: tuple[int, ...]
    continued: tuple[list[float], list[float]]
    readme: tuple[list[float], list[float]]
    frozen: dict[int, bool]
    own: tuple[int, ...]
    scenario: tuple[Trained, Trained]
    trace: str


def run_pages(rank: int, folder: str) -> Seen:
    """Run the blocks one after the other, in a folder with the files that they name."""
    os.chdir(folder)
    plain, space = run(BEFORE), run(after())
    engine, batches = space["engine"], space["batches"]
    before, equal = list(plain["losses"]), list(space["losses"])
    exec(MOVING, space)
    partition = engine.partition
    for of, losses in ((plain, before), (space, equal)):
        losses += [float(of["engine"].train_batch(of["data"])) for _ in range(3)]

    exec(CHECKPOINT, space | {"position": 12})
    once = [float(engine.train_batch(batches())) for _ in range(2)]
    exec(CHECKPOINT.splitlines()[1], dict(space))
    again = [float(engine.train_batch(batches())) for _ in range(2)]

    if rank == 0:
        engine.profile.save("profile.json")
    torch.distributed.barrier()
    layers, loss_fn, module_class = space["layers"], space["nn"].functional.mse_loss, space["PipelineModule"]
    start = {"DynamicPipelineModule": module_class, "layers": layers, "loss_fn": loss_fn}
    exec(FROM_PROFILE, start)
    assert len(start["module"].parts) == 3

    unchanged, readme = run(pages.blocks("README.md", "python")[0].code), run(after("README.md"))
    first = (list(unchanged["losses"]), list(readme["losses"]))
    readme["data_iter"] = readme["data"]
    exec(FREEZING.replace("batch >= 100", "batch >= 1"), readme | {"num_batches": 2})
    exec(TIMELINE, readme)
    trace = Path("batch.json").read_text(encoding="utf-8") if rank == 0 else ""
    local = readme["engine"].local_layers()
    frozen = {i: not any(p.requires_grad for p in layer.parameters()) for i, layer in local.items()}

    exec(HOLDING, readme)
    assert readme["engine"].partition == (0, 5, 17)

    importlib.import_module("spare_first")
    own = module_class(
        layers, num_stages=2, loss_fn=loss_fn, partition_method="spare_first:parameters", pin=[8]
    ).boundaries
    job = Job("dropping:Dropping", {"keep": 0.1, "speed": 0.5}, num_batches=4)
    scenario = (train(job, moves=False), train(job, moves=True))
    return Seen(before, equal, partition, (once, again), first, frozen, own, scenario, trace)


def run(script: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "train.py", "exec"), space)
    return space


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    folder = tmp_path_factory.mktemp("pages")
    (folder / "spare_first.py").write_text(PARTITIONER, encoding="utf-8")
    (folder / "dropping.py").write_text(SCENARIO, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)  # ranks inherit it
        return run_ranks(run_pages, 2, str(folder))


def test_the_examples_are_short() -> None:
    """At most 30 lines each, blank ones not counted."""
    for block in pages.blocks("docs/extending.md", "python"):
        assert len([line for line in block.code.splitlines() if line.strip()]) <= 30


def test_change_one_import(seen: list[Seen]) -> None:
    """The losses of DeepSpeed's class, and of ours, the last three after a move."""
    for rank in seen:
        assert rank.before == rank.after == seen[0].before
        assert len(set(rank.before)) == 13
        assert rank.partition == (0, 5, 17)


def test_readme(seen: list[Seen]) -> None:
    """The losses of its script before and after the change."""
    for rank in seen:
        unchanged, changed = rank.readme
        assert unchanged == changed == seen[0].readme[0]
        assert len(set(changed)) == 10


def test_checkpoint(seen: list[Seen]) -> None:
    for rank in seen:
        once, again = rank.continued
        assert once == again


def test_freezing_loop(seen: list[Seen]) -> None:
    """The first six layers are frozen, whichever stage they are on, and no other that has parameters."""
    frozen = {index: state for rank in seen for index, state in rank.frozen.items()}
    assert [frozen[i] for i in range(0, 17, 2)] == [True] * 3 + [False] * 6


def test_timeline(seen: list[Seen]) -> None:
    """The first rank has written what both did."""
    events = json.loads(seen[0].trace)["traceEvents"]
    assert {event["tid"] for event in events if event.get("cat") == "forward"} == {0, 1}


def test_own_partitioner(seen: list[Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the first stage less than the even share, and keeps the pinned cut."""
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))
    space: dict[str, Any] = {}
    exec(PARTITIONER, space)
    plan = space["spare_first"]([1.0] * 20, 2, pinned=[9])
    assert plan.boundaries in ((0, 8, 20), (0, 10, 20))
    assert space["spare_first"]([1.0] * 20, 2).boundaries == (0, 9, 20)
    assert seen[0].own == seen[1].own == (0, 7, 17)


def test_own_scenario(seen: list[Seen]) -> None:
    """The same bits whatever the partition."""
    for rank in seen:
        static, moved = rank.scenario
        assert static.losses == moved.losses == seen[0].scenario[0].losses
    layers = [{item for rank in seen for item in rank.scenario[i].layers.items()} for i in (0, 1)]
    assert layers[0] == layers[1]


def train_table(_rank: int) -> tuple[list[float], list[float], bool]:
    """Losses of the page's layer, static and moved; whether this replica's rows are its own."""
    module = sys.modules["table"] = ModuleType("table")
    exec(TABLE, vars(module))
    losses: list[list[float]] = []
    for moves in (False, True):
        torch.manual_seed(3)
        layers = [LayerSpec(nn.Linear, 8, 8), LayerSpec(module.Table, 12, 8), *[LayerSpec(nn.Linear, 8, 8)] * 2]
        model = DynamicPipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=model, config={
            **TORCH_ADAMW, **CLIP, "dynamic_pipeline": BY_HAND, "steps_per_print": 10**9,
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
        })  # fmt: skip
        numbers = torch.Generator().manual_seed(engine.grid.get_data_parallel_id())
        batches = iter(lambda: (torch.randn(4, 8, generator=numbers), torch.randn(4, 8, generator=numbers)), None)
        losses.append([])
        for batch in range(4):
            if moves and batch == 2:
                engine.repartition((0, 1, 4))
            losses[-1].append(float(engine.train_batch(batches)))
    rows = [layer.rows for layer in engine.local_layers().values() if hasattr(layer, "rows")]
    group = engine.grid.get_data_parallel_group()
    mine = torch.cat([torch.zeros(1), *(r.detach().flatten() for r in rows)])
    both = [torch.empty_like(mine), torch.empty_like(mine)]
    torch.distributed.all_gather(both, mine, group=group)
    return losses[0], losses[1], bool(rows) and not torch.equal(*both)


def test_a_layer_whose_rows_replicas_own() -> None:
    seen = run_ranks(train_table, 4)
    for static, moved, _ in seen:
        assert static == moved == seen[0][0]
    assert [own for *_, own in seen] == [False, False, True, True], "it is on the second stage at the end"
