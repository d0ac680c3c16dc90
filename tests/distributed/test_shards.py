"""Bytes that moves send under ZeRO-1 and bf16, over all ranks: what ranks need and lack, once; and the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds.migration import FlatLayout, least_bytes, migrate
from dynpipe_ds.ranks.cross_memory import cross_memory
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, BY_HAND, CLIP, FP16, MOVES, SGD, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import delayed
from tests.matrix import mostly

FREEZE = "freeze"
CONFIGS: dict[str, dict[str, Any]] = {
    "zero1": {**ADAMW, **ZERO},
    "zero1_sgd": {**SGD, **ZERO},
    "bf16": {**ADAMW, **BF16},
    "bf16_zero1": {**ADAMW, **BF16, **ZERO},
    "bf16_zero1_fp32_sums": {**ADAMW, **BF16_FP32_SUMS},
    "fp16_zero1": {**ADAMW, **ZERO, **FP16},
    "offloaded": {**ADAMW, "zero_force_ds_cpu_optimizer": False, "zero_optimization": {
        "stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "aligned": {**ADAMW, **BF16, "zero_optimization": {"stage": 1, "parameter_alignment": True}},
}


@dataclass
class Sent:
    """What one rank sends while something is watched.

    Attributes:
        tensor_bytes: of weights and state.
        told_bytes: of what describes layers.
        collectives: calls that all ranks wait for.
    """

    tensor_bytes: int = 0
    told_bytes: int = 0
    collectives: list[str] = field(default_factory=list)


COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor",
    "barrier", "all_to_all_single",
)


@contextmanager
def watched() -> Iterator[Sent]:
    """Count at the border to torch.distributed, whoever calls it."""
    sent, is_told = Sent(), False
    post = dist.batch_isend_irecv

    def count(operations: list[Any]) -> Any:
        num_bytes = sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
        if is_told:
            sent.told_bytes += num_bytes
        else:
            sent.tensor_bytes += num_bytes
        return post(operations)

    def telling(name: str) -> Any:
        original = getattr(migrate, name)

        def tell(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_told
            is_told = True
            try:
                return original(*args, **kwargs)
            finally:
                is_told = False

        return tell

    def noting(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.collectives.append(name)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "batch_isend_irecv", count))
        for name in ("exchange_bytes", "Letters"):
            stack.enter_context(patch.object(migrate, name, telling(name)))
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, noting(name)))
        yield sent


@dataclass(frozen=True)
class Held:
    """What one rank has of the model.

    Attributes:
        sizes: elements of trained parameters, in the order of the flat buffer.
        ranks: replicas of its stage.
        layer_bytes: weights and buffers of each layer.
        config: multiple and alignment of the buffers.
        num_kinds: of state that an element has, master weights included; moments begin with the first step.
    """

    sizes: dict[tuple[int, str], int]
    ranks: tuple[int, ...]
    layer_bytes: dict[int, int]
    config: tuple[int, int]
    num_kinds: int


def held(engine: Any) -> Held:
    layers = engine.local_layers()
    names = {p: (layer, name) for layer, module in layers.items() for name, p in module.named_parameters()}
    aligned = getattr(engine.optimizer, "parameter_alignment", False)
    optimizer = engine.optimizer.optimizer
    flat = optimizer.param_groups[0]["params"][0]
    moments = [v for v in optimizer.state.get(flat, {}).values() if isinstance(v, Tensor) and v.shape == flat.shape]
    return Held(
        {names[p]: p.numel() for p in engine.module.parameters() if p.requires_grad},
        tuple(dist.get_process_group_ranks(engine.grid.get_data_parallel_group())),
        {
            layer: sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
            for layer, module in layers.items()
        },
        (engine.optimizer.nccl_start_alignment_factor, 8 if aligned else 1), 1 + len(moments),
    )


def least(before: list[Held], after: list[Held]) -> int:
    """By the layouts of all ranks; those of replicas are alike."""

    def layouts(of: list[Held]) -> list[FlatLayout]:
        return [FlatLayout(h.sizes, h.ranks, *h.config) for h in {h.ranks: h for h in of}.values()]

    kinds = dict.fromkeys([str(kind) for kind in range(before[0].num_kinds)], 4)
    had = [{layer for layer in h.layer_bytes} for h in before]
    weights = sum(
        size for rank, h in enumerate(after) for layer, size in h.layer_bytes.items() if layer not in had[rank]
    )
    return least_bytes(layouts(before), layouts(after), kinds) + weights


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@dataclass
class Watched:
    """One change, the same on all ranks but for ``told_bytes``."""

    what: str
    sent_bytes: int
    least_bytes: int
    told_bytes: int
    num_collectives: int


def train(run: Run, freezes: dict[int, int], delay: int | None) -> tuple[Any, list[Watched]]:
    """Train, and watch every move and every change of what is frozen."""
    engine = make_engine(run)
    cross_memory(is_allowed=False)  # ranks meet for it once a world, not in every move
    if delay is not None:
        engine.dynamic.pipeline.order_for = delayed(delay)
    batches, losses, seen = data(engine.grid.get_data_parallel_id(), run.micro_batches), [], []

    def watch(what: str, change: Any, prepare: Any = lambda: None) -> None:
        before = gathered(held(engine))
        prepare()
        with watched() as sent:
            change()
        sums = gathered(sent)
        total = sum(s.tensor_bytes for s in sums)
        wanted = least(before, gathered(held(engine)))
        seen.append(Watched(what, total, wanted, sum(s.told_bytes for s in sums), len(sent.collectives)))

    def freeze(first: int) -> None:
        for layer, module in engine.local_layers().items():
            module.requires_grad_(layer >= first)

    for batch in range(run.num_batches):
        if batch in freezes:
            watch(FREEZE, engine.dynamic.notice_frozen_layers, partial(freeze, freezes[batch]))
        if batch in run.moves:
            watch("move", partial(engine.repartition, run.moves[batch]))
        losses.append(float(engine.train_batch(batches)))
    return (losses, digest(engine)), seen


def both_ways(_rank: int, run: Run, freezes: dict[int, int], delay: int | None) -> Any:
    static, _ = train(replace(run, moves={}), freezes, delay)
    return static, *train(run, freezes, delay)


def check(run: Run, replicas: int, *, freezes: dict[int, int] | None = None, delay: int | None = None) -> None:
    most = 2 if replicas == 1 else 3  # boundaries are compared; then votes
    results = run_ranks(both_ways, run.num_stages * replicas, run, freezes or {}, delay)
    for (losses, _), (moved_losses, _), seen in results:
        assert losses == moved_losses and all(loss == loss for loss in losses)
        assert len(seen) == len(run.moves) + len(freezes or {})
        for change in seen:
            assert change.least_bytes <= change.sent_bytes <= 1.05 * change.least_bytes, change
            assert change.what == FREEZE or change.num_collectives <= most, change
        assert not freezes or any(change.sent_bytes for change in seen if change.what == FREEZE), "shares shift, too"
    for replica in range(replicas):
        static, moved = (
            {k: v for of in results[replica::replicas] for k, v in of[way][1].items()} for way in (0, 1)
        )
        assert static == moved and len(static) == run.num_blocks + 2
    assert any(change.least_bytes for _, _, seen in results for change in seen)


@pytest.mark.parametrize(
    ("config", "stages", "replicas"),
    mostly(
        [
            *((config, 2, 2) for config in CONFIGS), *((config, 2, 3) for config in CONFIGS),
            ("zero1", 3, 2), ("bf16_zero1", 3, 2), ("zero1", 2, 4), ("bf16", 2, 4), ("bf16", 3, 3),
            ("zero1", 2, 1), ("bf16", 3, 1),
        ],
        [("bf16_zero1", 3, 2), ("zero1", 2, 3)],
    ),
)
def test_moves_send_the_least(config: str, stages: int, replicas: int) -> None:
    check(Run(stages, config={**CONFIGS[config], **CLIP}, moves=MOVES[stages]), replicas)


@pytest.mark.parametrize("config", mostly(["zero1", "bf16_zero1"], ["bf16_zero1"]))
def test_tied_layers(config: str) -> None:
    """The receiver registers them first, whatever their place is."""
    check(Run(2, tied=True, config={**CONFIGS[config], **CLIP}, moves=MOVES[2]), 2)


@pytest.mark.parametrize("config", mostly(["zero1", "bf16_zero1"], ["zero1"]))
def test_odd_widths_and_functions(config: str) -> None:
    run = Run(2, width=7, functions=True, num_blocks=4, config={**CONFIGS[config], **CLIP}, moves=MOVES[2])
    check(run, 2)


@pytest.mark.parametrize("config", mostly(["zero1", "bf16_zero1"], ["zero1"]))
def test_layers_that_are_frozen_and_thawed(config: str) -> None:
    run = Run(2, config={**CONFIGS[config], **CLIP}, moves=MOVES[2])
    check(run, 2, freezes={2: 2, 4: 3, 5: 1})


def test_under_orders_with_weight_gradients_that_wait() -> None:
    check(Run(2, config={**CONFIGS["bf16_zero1"], **CLIP, "dynamic_pipeline": BY_HAND}, moves=MOVES[2]), 2, delay=2)
