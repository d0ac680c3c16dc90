"""Optimizers and gradients of the rarer kinds: the same bits for every cut, or refused at start."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.clients import compile_first
from tests.distributed.configs import ADAMW, BF16, CLIP, ZERO
from tests.distributed.models import Head, Run, base_config, data, digest, loss_fn, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_frozen import freeze
from tests.distributed.ways import CUTS, MOVES_OF_TWO, assert_same_bits, at_cuts, train_each, train_ways
from tests.matrix import mostly

ON_HOST = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
CPU_ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}}
TORCH = {"zero_force_ds_cpu_optimizer": False}


# -- kernels that compute the last elements of a tensor in another way -----------------------------

ODD = Run(2, num_batches=4, width=13)
LANES = {
    "fused_adamw_zero1": replace(ODD, client="torch_fused_adamw", config={**ZERO, **CLIP}),
    "fused_adamw_bf16": replace(ODD, client="torch_fused_adamw", config={**BF16, **CLIP}),
    "fused_adamw": replace(ODD, client="torch_fused_adamw", config=CLIP),
    "fused_sgd_zero1": replace(ODD, client="torch_fused_sgd", config={**ZERO, **CLIP}),
    "cpu_adam_zero1": replace(ODD, client="cpu_adam", config={**ZERO, **CLIP}),
    "cpu_adam_bf16": replace(ODD, client="cpu_adam", config={**BF16, **CLIP}),
    "cpu_adam_on_host": replace(ODD, config={**CPU_ADAM, **ON_HOST, **CLIP}),
    "adamw_zero1": replace(ODD, config={**ADAMW, **ZERO, **CLIP}),
    "adamw_bf16": replace(ODD, config={**ADAMW, **BF16, **CLIP}),
}


@pytest.mark.parametrize(("kind", "replicas"), mostly(product(LANES, [1, 2]), [("fused_adamw_zero1", 2)]))
def test_parameters_of_odd_size(kind: str, replicas: int) -> None:
    if kind.startswith("cpu_adam"):
        compile_first("cpu_adam")
    assert_same_bits(*train_ways(*at_cuts(LANES[kind]), replicas=replicas))


# -- the optimizer on the host ---------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "replicas"), mostly(product(["fp32", "bf16"], [1, 2]), [("fp32", 2)]))
def test_on_the_host_as_on_the_device(precision: str, replicas: int) -> None:
    config = {**ADAMW, **CLIP, **(BF16 if precision == "bf16" else {})}
    run = Run(2, num_batches=4, config={**config, **ON_HOST, **TORCH})
    on_device = replace(run, config={**config, **ZERO})
    assert_same_bits(*train_ways(*at_cuts(run), on_device, replicas=replicas))


def freeze_and_save(rank: int, run: Run, folder: Path) -> tuple[list[float], list[float], dict[str, str]]:
    """Freeze, move, save, unfreeze and go on: losses before and after, and what it came to."""
    engine = make_engine(run)
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    before = []
    for batch in range(4):
        freeze(engine, (0, 2, 5, 1)[batch])
        if batch in run.moves:
            engine.repartition(run.moves[batch])
        before.append(float(engine.train_batch(batches)))
    engine.save_checkpoint(str(folder))
    return before, [float(engine.train_batch(batches)) for _ in range(2)], digest(engine)


def resume(rank: int, run: Run, folder: Path) -> tuple[list[float], dict[str, str]]:
    engine = make_engine(run)
    freeze(engine, 1)
    engine.load_checkpoint(str(folder))
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    for _ in range(4 * run.micro_batches):
        next(batches)
    return [float(engine.train_batch(batches)) for _ in range(2)], digest(engine)


def freeze_and_resume(rank: int, run: Run, folder: Path) -> tuple[Any, Any, Any]:
    """Without moves, with moves, and from the first one's checkpoint at another cut."""
    static = freeze_and_save(rank, run, folder / "static")
    moved = freeze_and_save(rank, replace(run, moves=MOVES_OF_TWO), folder / "moved")
    return static, moved, resume(rank, replace(run, first=CUTS[2]), folder / "static")


@pytest.mark.parametrize(("optimizer", "replicas"), mostly(product(["torch", "cpu_adam"], [1, 2]), []))
def test_frozen_saved_and_loaded_on_the_host(optimizer: str, replicas: int, tmp_path: Path) -> None:
    kind = {**ADAMW, **TORCH} if optimizer == "torch" else CPU_ADAM
    compile_first(optimizer)
    run = Run(2, first=CUTS[0], config={**kind, **ON_HOST, **CLIP})
    ranks = 2 * replicas
    static, moved, resumed = zip(*run_ranks(freeze_and_resume, ranks, run, tmp_path), strict=True)
    for replica in range(replicas):
        one, other, again = ((ways[replica], ways[replicas + replica]) for ways in (static, moved, resumed))
        assert one[0][:2] == other[0][:2]
        assert again[0][0] == one[0][1]
        everything = [{k: v for stage in way for k, v in stage[-1].items()} for way in (one, other, again)]
        assert everything[0] == everything[1] == everything[2]


# -- what a flat buffer can't hold -----------------------------------------------------------------


def start(rank: int, run: Run) -> None:
    make_engine(run)


@pytest.mark.parametrize(("client", "message"), [
    ("adafactor", "Adafactor updates an element by the rest of its tensor"),
    ("adagrad", "DeepSpeed replaces Adagrad by one of its own making"),
])
def test_refused_optimizers(client: str, message: str) -> None:
    def start_refused() -> None:
        run_ranks(start, 2, Run(2, client=client, config=ZERO))

    with pytest.raises(AssertionError, match=message) as error:
        start_refused()
    assert str(error.value).count("ZeRO-1 and bf16 keep gradients and weights in flat buffers") >= 2


# -- sparse gradients ------------------------------------------------------------------------------


class SparseEmbed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 16, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.table(tokens)
        return hidden


def train_sparse(cut: tuple[int, ...], moves: dict[int, tuple[int, ...]], config: dict[str, Any]) -> Any:
    run = Run(2, num_batches=5, moves=moves, config=config)
    torch.manual_seed(7)
    layers = [LayerSpec(SparseEmbed), *(LayerSpec(nn.Linear, 16, 16) for _ in range(3)), LayerSpec(Head)]
    module = DynamicPipelineModule(
        layers, num_stages=2, loss_fn=loss_fn, seed_layers=True, partition_method=list(cut)
    )
    engine, *_ = deepspeed.initialize(model=module, config=base_config(run, 1))
    losses = train(engine, run)
    assert engine.get_global_grad_norm() > CLIP["gradient_clipping"]
    return losses, digest(engine)


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
SPARSE_WAYS = [((0, 2, 5), {}), ((0, 4, 5), {}), ((0, 2, 5), {1: (0, 1, 5), 3: (0, 3, 5)})]  # cut, moves


def sparse_ways(_rank: int, config: dict[str, Any]) -> list[Any]:
    return [train_sparse(cut, moves, config) for cut, moves in SPARSE_WAYS]


@pytest.mark.parametrize("replicas", mostly([1, 2, 3], [2]))
def test_sparse_gradients_with_clipping(replicas: int) -> None:
    by_rank = run_ranks(sparse_ways, 2 * replicas, {**SGD, **CLIP})
    found = [(first[0], first[1] | last[1]) for first, last in zip(by_rank[0], by_rank[replicas], strict=True)]
    assert found[0] == found[1] == found[2]
    assert len(found[0][1]) == 5


def test_a_changed_order_in_the_shares_is_refused() -> None:
    """Before it was, losses differed after a move."""
    config = {**ADAMW, "zero_optimization": {"stage": 1, "round_robin_gradients": True}}
    with pytest.raises(AssertionError, match='"round_robin_gradients" changes the order of parameters in them'):
        run_ranks(train_each, 4, [Run(2, num_batches=1, config=config)])


def test_sparse_gradients_are_refused_in_flat_buffers() -> None:
    with pytest.raises(AssertionError, match=r"layer 0\.table \(Embedding\) makes sparse gradients"):
        run_ranks(sparse_ways, 2, {**SGD, **ZERO})
