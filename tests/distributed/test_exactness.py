"""Moving layers changes no bit: losses, weights, buffers, optimizer state, learning rates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.distributed.clients import compile_first
from tests.distributed.configs import (
    ADAM,
    ADAMW,
    BF16,
    BF16_FP32_SUMS,
    CLIP,
    CROSS_MEMORY,
    FP16,
    FUSED,
    MOVES,
    OPTIMIZERS,
    SGD,
    WARMUP,
    ZERO,
)
from tests.distributed.models import Run
from tests.distributed.ways import assert_same_bits, compare, train_ways
from tests.matrix import mostly

ALL_OPTIMIZERS: dict[str, dict[str, Any]] = {
    **OPTIMIZERS,
    "adam": ADAM,
    "sgd": SGD,
    "fused_adam": FUSED,
    "zero1_sgd": {**SGD, **ZERO},
    "bf16": {**ADAMW, **BF16},
    "bf16_zero1": {**ADAMW, **BF16, **ZERO},
    "fp16_zero1": {**ADAMW, **ZERO, **FP16},
}


@pytest.mark.parametrize(
    "optimizer", mostly(ALL_OPTIMIZERS, ["adamw", "bf16_zero1_fp32_sums", "fp16_zero1"])
)
def test_three_stages_with_clipping_and_schedule(optimizer: str) -> None:
    compile_first(optimizer)
    run = Run(num_stages=3, config={**ALL_OPTIMIZERS[optimizer], **CLIP, **WARMUP})
    compare(run, MOVES[3])


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    mostly(
        product(["adamw", "zero1", "bf16_zero1_fp32_sums"], [2, 4]),
        [("zero1", 2), ("bf16_zero1_fp32_sums", 4)],
    ),
)
def test_two_and_four_stages(optimizer: str, stages: int) -> None:
    compare(Run(num_stages=stages, config={**ALL_OPTIMIZERS[optimizer], **CLIP}), MOVES[stages])


@pytest.mark.parametrize("optimizer", mostly(ALL_OPTIMIZERS, ["adamw", "zero1", "bf16"]))
def test_layers_that_are_read_from_other_ranks(optimizer: str) -> None:
    compile_first(optimizer)
    compare(Run(num_stages=3, config={**ALL_OPTIMIZERS[optimizer], **CLIP, **CROSS_MEMORY}), MOVES[3])


def test_layers_that_are_read_from_other_ranks_on_two_replicas() -> None:
    compare(Run(num_stages=2, config={**ADAMW, **CLIP, **CROSS_MEMORY}), MOVES[2], replicas=2)


@pytest.mark.parametrize("optimizer", mostly(["adamw", "zero1", "bf16", "bf16_zero1_fp32_sums"], ["bf16"]))
def test_two_stages_with_two_replicas(optimizer: str) -> None:
    run = Run(num_stages=2, config={**ALL_OPTIMIZERS[optimizer], **CLIP, **WARMUP})
    compare(run, MOVES[2], replicas=2)


@pytest.mark.parametrize(
    "client",
    mostly(
        ["adamw_object", "adamw_object_scheduler", "adamw_callable", "adamw_no_empty_groups", "cpu_adam"],
        ["adamw_object_scheduler", "adamw_no_empty_groups"],  # DeepSpeed compiles the last one for a minute
    ),
)
def test_client_optimizers_with_two_groups(client: str) -> None:
    compile_first(client)
    compare(Run(num_stages=3, config=CLIP, client=client), MOVES[3])


@pytest.mark.parametrize(
    ("client", "zero"),
    mostly(
        product(["adamw_object_scheduler", "adamw_callable"], ["zero1", "bf16_zero1"]),
        [("adamw_callable", "zero1")],
    ),
)
def test_client_optimizers_under_zero(client: str, zero: str) -> None:
    config = {**CLIP, **(ZERO if zero == "zero1" else BF16_FP32_SUMS)}
    compare(Run(num_stages=3, config=config, client=client), MOVES[3])


@pytest.mark.parametrize("interval", mostly([1, 2], [2]))
def test_activation_checkpointing_with_dropout(interval: int) -> None:
    runs = [Run(num_stages=3, dropout=0.3, checkpoint_interval=every, config=ADAMW) for every in (interval, 0)]
    checkpointed, moved, plain, plain_moved = train_ways(*(
        way for run in runs for way in (run, replace(run, moves=MOVES[3]))
    ))
    assert_same_bits(checkpointed, moved)
    assert_same_bits(plain, plain_moved)
    assert checkpointed.losses == plain.losses, "buffers differ, which count forward passes"


def test_non_reentrant_checkpointing_with_dropout() -> None:
    config = {**ADAMW, "pipeline": {"use_reentrant": False, "activation_checkpoint_interval": 1}}
    compare(Run(num_stages=3, dropout=0.3, config=config), MOVES[3])


@pytest.mark.parametrize("optimizer", mostly(["adamw", "zero1", "bf16", "bf16_zero1_fp32_sums"], ["adamw"]))
def test_tied_layers_apart_together_and_apart_again(optimizer: str) -> None:
    run = Run(num_stages=3, tied=True, config={**ALL_OPTIMIZERS[optimizer], **CLIP})
    compare(run, MOVES[3])


@pytest.mark.parametrize("optimizer", mostly(["adamw", "bf16_zero1_fp32_sums"], ["bf16_zero1_fp32_sums"]))
def test_tied_layers_on_two_stages_and_two_replicas(optimizer: str) -> None:
    run = Run(num_stages=2, tied=True, config={**ALL_OPTIMIZERS[optimizer], **CLIP})
    compare(run, MOVES[2], replicas=2)


def test_function_layers_move_too() -> None:
    run = Run(num_stages=3, functions=True, num_blocks=4, config=ADAMW)
    compare(run, MOVES[3])
