"""Compiled layers move: they are compiled again where they arrive, with the bits of those that stay."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

from dynpipe_ds import DynamicPipelineModule
from dynpipe_ds.journal import read_journal
from tests.distributed.compiled import (
    BACKEND,
    BY_ENGINE,
    KINDS,
    CompiledSpec,
    Holding,
    recompile_limit,
    squash,
    train_watched,
    usual_layers,
)
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, BY_HAND, CLIP, MOVES, UNCLIPPED, ZERO
from tests.distributed.models import Block, Embed, Head, Run, base_config, data, loss_fn
from tests.distributed.ranks import run_ranks
from tests.distributed.test_shapes import Case, make, train
from tests.matrix import mostly


def static_and_moved(_rank: int, case: Case) -> Any:
    return train_watched(case, {}), train_watched(case, case.moves)


def compare(case: Case) -> list[tuple[Any, Any]]:
    """Train both ways; equal bits, and what was compiled is compiled wherever it is."""
    by_rank = run_ranks(static_and_moved, case.num_stages, case)
    (static, parts, _), (moved, _, _) = by_rank[0]
    assert static.losses == moved.losses and all(loss == loss for loss in static.losses)
    whole = [{k: v for rank in by_rank for k, v in rank[way][0].digest.items()} for way in (0, 1)]
    assert whole[0] == whole[1] and len(whole[0]) >= case.num_stages
    known = {i: n for rank in by_rank for i, n in rank[0][1][-1].items()}
    for batch in range(case.num_batches):
        assert {i: n for rank in by_rank for i, n in rank[1][1][batch].items()} == known, f"batch {batch}"
    return by_rank


@pytest.mark.exhaustive
def test_every_way_to_compile() -> None:
    by_rank = compare(KINDS)
    parts = {i: n for rank in by_rank for i, n in rank[0][1][0].items()}
    assert all(parts[i] == 1 for i in range(1, 7)), f"a layer is not compiled, so equality shows nothing: {parts}"
    for _, (_, _, graphs) in by_rank:  # all have been there by batch 2
        assert graphs[3] == graphs[2] == graphs[4] > 0, "a layer that comes back is compiled again"


def test_the_engine_compiles() -> None:
    by_rank = compare(BY_ENGINE)
    counts = {i: n for rank in by_rank for i, n in rank[1][1][-1].items()}
    assert all(counts[i] == 1 for i in (0, 2, 4, 5, 6)), "the head runs as a compiled function, not as a module"
    losses = run_ranks(train_deepspeeds, 2, BY_ENGINE)[0]
    assert losses == by_rank[0][1][0].losses, "DeepSpeed's class, compiled, has other losses"


def train_deepspeeds(_rank: int, case: Case) -> list[float]:
    torch.manual_seed(7)
    module = PipelineModule(
        case.layers(), num_stages=2, loss_fn=loss_fn, seed_layers=True, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=module, config=base_config(Run(num_stages=2, config=case.config), 1))
    engine.compile(backend=BACKEND)
    batches = data(0, 4)
    return [float(engine.train_batch(batches)) for _ in range(case.num_batches)]


CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": {**ADAMW, **CLIP}, "zero1": {**ADAMW, **ZERO, **CLIP}, "bf16": {**ADAMW, **BF16_FP32_SUMS, **CLIP},
    "planned": {**ADAMW, "dynamic_pipeline": {**BY_HAND, "schedule": "planned"}},
}  # fmt: skip
CHECKPOINTED = {"activation_checkpoint_interval": 2}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("case", "config", "arguments"), [*product((KINDS, BY_ENGINE), CONFIGS, ({},)), (KINDS, "adamw", CHECKPOINTED)]
)
def test_three_stages(case: Case, config: str, arguments: dict[str, Any]) -> None:
    compare(replace(
        case, num_stages=3, first=(0, 3, 6, 8), moves=MOVES[3], config=CONFIGS[config], arguments=arguments,
        num_batches=7,
    ))  # fmt: skip


# -- code that rounds otherwise ----------------------------------------------------------------


def with_inductor(engine: Any, batch: int) -> None:
    if batch == 0:
        engine.compile(backend="inductor", compile_kwargs={"dynamic": False})


@pytest.mark.exhaustive  # a C++ compiler runs
def test_inductor() -> None:
    case = replace(BY_ENGINE, before_batch=with_inductor, moves={1: (0, 7, 8), 2: (0, 1, 8)}, num_batches=4)
    by_rank = compare(case)
    losses = run_ranks(train_plainly, 2, replace(case, before_batch=None, moves={}))[0]
    assert losses != by_rank[0][0][0].losses, "compiled code rounds as torch does, so equality shows nothing"


def train_plainly(_rank: int, case: Case) -> list[float]:
    return train(case, {}).losses


# -- checkpoints -------------------------------------------------------------------------------


def wrapped_layers() -> list[Any]:
    return [LayerSpec(Embed), *(CompiledSpec(Block, 16 + 8 * i) for i in range(6)), LayerSpec(Head)]


def plain_layers() -> list[Any]:
    return [LayerSpec(Embed), *(LayerSpec(Block, 16 + 8 * i) for i in range(6)), LayerSpec(Head)]


def save_and_load(_rank: int, folder: str, config: dict[str, Any]) -> Any:
    found = []
    for saved, loaded in ((wrapped_layers, plain_layers), (plain_layers, wrapped_layers)):
        engines = [make(Case(layers, 2, (0, 4, 8), {}, config=config)) for layers in (saved, loaded)]
        for engine in engines:
            engine.repartition((0, 3, 8))
        batches = data(0, 4)
        first = float(engines[0].train_batch(batches))
        engines[0].save_checkpoint(f"{folder}/{saved.__name__}")
        engines[0].repartition((0, 5, 8))
        engines[1].load_checkpoint(f"{folder}/{saved.__name__}")
        engines[1].repartition((0, 1, 8))
        ways = []
        for engine in engines:
            batches = data(0, 4)
            [next(batches) for _ in range(4)]
            ways.append(([float(engine.train_batch(batches)) for _ in range(2)], digest_of(engine)))
        found.append((first, ways))
    return found


def digest_of(engine: Any) -> dict[str, Any]:
    """Weights and optimizer state of this rank's layers, by names without ``_orig_mod``."""
    found: dict[str, Any] = {}
    for i, layer in engine.local_layers().items():
        for name, tensor in layer.named_parameters():
            key = f"{i}.{name.replace('_orig_mod.', '')}"
            found[key] = tensor.detach().clone()
            for kind, value in engine.stage_optimizer.export([tensor])[0].items():
                found[f"{key} {kind}"] = torch.as_tensor(value).clone()
    return found


@pytest.mark.parametrize("config", mostly([("adamw",), ("zero1",)], [("adamw",)]))
def test_a_checkpoint_of_compiled_layers_and_of_others(config: str, tmp_path: Path) -> None:
    by_rank = run_ranks(save_and_load, 2, str(tmp_path), CONFIGS[config])
    for way in range(2):
        ways = [rank[way][1] for rank in by_rank]
        assert ways[0][0][0] == ways[0][1][0], "losses differ"
        saved, loaded = ({k: v for rank in ways for k, v in rank[i][1].items()} for i in (0, 1))
        assert saved.keys() == loaded.keys() and len(saved) > 40
        assert all(torch.equal(saved[key], loaded[key]) for key in saved)


def load_deepspeeds(_rank: int, folder: str) -> Any:
    torch.manual_seed(7)
    module = PipelineModule(
        wrapped_layers(), num_stages=2, loss_fn=loss_fn, seed_layers=True, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=module, config=base_config(Run(num_stages=2, config=UNCLIPPED), 1))
    batches = data(0, 4)
    engine.train_batch(batches)
    engine.save_checkpoint(folder)
    ours = make(Case(plain_layers, 2, (0, 4, 8), {}, config=UNCLIPPED))
    ours.load_checkpoint(folder)
    ours.repartition((0, 2, 8))
    again = data(0, 4)
    [next(again) for _ in range(4)]
    return [float(engine.train_batch(batches)), float(ours.train_batch(again))]


@pytest.mark.exhaustive
def test_a_checkpoint_of_deepspeeds_class_with_compiled_layers(tmp_path: Path) -> None:
    for theirs, ours in run_ranks(load_deepspeeds, 2, str(tmp_path)):
        assert theirs == ours


# -- what compiling costs ----------------------------------------------------------------------


def profiled(_rank: int, journal: str) -> Any:
    """Layers of a kind that the other stage has not compiled yet arrive there."""
    case = Case(
        lambda: [LayerSpec(Embed), LayerSpec(Block), LayerSpec(Block), LayerSpec(Holding), LayerSpec(Head)], 2,
        (0, 2, 5), {},
        config={**ADAMW, "dynamic_pipeline": {**BY_HAND, "profile_every": 1, "journal": journal}},
    )  # fmt: skip
    engine, batches, seen = make(case), data(0, 4), []
    for batch in range(6):
        if batch == 4:
            engine.repartition((0, 4, 5))
        before = engine.overhead.compiling_s
        engine.train_batch(batches)
        newest = engine.dynamic.last_profile
        seen.append((engine.overhead.compiling_s - before, None if newest is None else newest.batch))
    return seen, engine.dynamic.balancer._costs.state_dict()[-1][1], engine.overhead.migrating_s


def test_a_batch_that_compiles_tells_nothing_of_layers(tmp_path: Path) -> None:
    first, second = run_ranks(profiled, 2, str(tmp_path))
    compiled_s, batches = zip(*first[0], strict=True)
    assert batches == (None, 1, 2, 3, 3, 5) == tuple(batch for _, batch in second[0])
    assert compiled_s[4] > 0 and second[0][0][0] > 0, "nothing was compiled, so it shows nothing"
    assert all(seconds == 0 for i, seconds in enumerate(compiled_s) if i not in (0, 4))
    for _, cost_s, migrating_s in (first, second):  # what arriving costs is a cost of the move
        assert cost_s >= compiled_s[4] and cost_s > migrating_s
    journal = read_journal(tmp_path)
    assert [each.batch for each in journal.compiled] == [0, 4] and [move.batch for move in journal.moves] == [4]
    slowest_s = max(compiled_s[4], second[0][4][0])
    assert journal.compiled_after(journal.moves[0]) == pytest.approx(slowest_s, rel=1e-3)


def move_often(_rank: int) -> Any:
    engine, batches = make(KINDS), data(0, 4)
    graphs, objects = [], []
    for i in range(14):
        engine.repartition((0, 1, 8) if i % 2 else (0, 7, 8))
        engine.train_batch(batches)
        if i % 2:
            gc.collect()
            graphs.append(int(torch._dynamo.utils.counters["stats"]["unique_graphs"]))
            objects.append(sum("Optim" in type(o).__name__ for o in gc.get_objects()))
    return graphs, objects


@pytest.mark.exhaustive
def test_moves_leave_no_compiled_code_behind() -> None:
    for graphs, objects in run_ranks(move_often, 2):
        assert len(set(graphs[1:])) == 1 and len(set(objects[1:])) == 1, (graphs, objects)


def too_many_cases(_rank: int) -> list[str]:
    with recompile_limit(1), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = make(Case(plain_layers, 2, (0, 4, 8), {}))
        engine.compile(backend=BACKEND)
        batches = data(0, 4)
        for _ in range(2):
            engine.train_batch(batches)
    return [str(w.message) for w in caught if "recompile_limit" in str(w.message)]


def test_code_that_torch_gave_up_on_is_told() -> None:
    for told in run_ranks(too_many_cases, 2):
        assert len(told) == 1 and "raise torch._dynamo.config.recompile_limit" in told[0]


# -- what is refused ---------------------------------------------------------------------------


def failure_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing"


def unnamed_backend_layers() -> list[Any]:
    return [LayerSpec(Embed), LayerSpec(Holding, None), LayerSpec(Block), LayerSpec(Head)]


def refused(_rank: int) -> list[str]:
    usual = Case(usual_layers, 2, (0, 4, 8), {})
    found = [
        failure_of(lambda: make(replace(usual, config={**ADAMW, "compile": {"deepcompile": True}}))),
        failure_of(lambda: make(Case(unnamed_backend_layers, 2, (0, 2, 4), {}))),
    ]
    engine = make(usual)
    found += [
        failure_of(lambda: engine.compile(backend=BACKEND, compiled_autograd_enabled=True)),
        failure_of(lambda: engine.compile(backend=lambda graph, _: graph)),
    ]
    assert not engine.is_compiled
    module = DynamicPipelineModule(usual_layers(), num_stages=2, loss_fn=loss_fn)
    whole = torch.compile(module, backend=BACKEND)
    found.append(failure_of(
        lambda: deepspeed.initialize(model=whole, config=base_config(Run(num_stages=2), 1))
    ))  # fmt: skip
    return found


def test_what_cant_be_is_refused_by_name() -> None:
    for deepcompile, at_start, autograd, backend, whole in run_ranks(refused, 2):
        assert deepcompile.startswith('ValueError: "compile": {"deepcompile": true} can\'t be used')
        assert "layer 1 (Holding)" in at_start and "torch.compile" in at_start and "no name outside" in at_start
        assert autograd.startswith("ValueError: compiled_autograd_enabled=True")
        assert backend.startswith("ValueError: what engine.compile() compiles") and "no name outside" in backend
        assert whole.startswith("ValueError: torch.compile(DynamicPipelineModule) is no pipeline")
        assert "call engine.compile()" in whole


def warned(_rank: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make(Case(inductor_layers, 2, (0, 2, 4), {}, config={**ADAMW, **UNCLIPPED}))
        engine = make(Case(usual_layers, 2, (0, 4, 8), {}, config={**ADAMW, **UNCLIPPED}))
        engine.compile(backend="inductor", compile_kwargs={"mode": "max-autotune", "dynamic": False})
    return [str(w.message) for w in caught if "losses of this run may differ" in str(w.message)]


def inductor_layers() -> list[Any]:
    return [LayerSpec(Embed), squash, LayerSpec(Holding, "inductor"), LayerSpec(Head)]


def test_code_whose_rounding_depends_on_the_cut_is_told_at_start() -> None:
    first, second = run_ranks(warned, 2)
    assert second == [] and len(first) == 2
    assert "layer 2.block is compiled with dynamic=None" in first[0] and "pass dynamic=False" in first[0]
    assert "chooses code by how long it takes" in first[1]


