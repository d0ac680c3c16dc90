"""Moving layers changes no bit: losses, weights, buffers, optimizer state, learning rates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.utils.cpp_extension import get_default_build_root

from tests.distributed.clients import compile_first
from tests.distributed.models import Run, run_and_digest
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "adam_w_mode": False}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6}}}
CLIP = {"gradient_clipping": 0.05}
ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
BF16 = {"bf16": {"enabled": True}}
BF16_FP32_SUMS = {**BF16, **ZERO, "data_types": {"grad_accum_dtype": "fp32"}}

# Scaled so that the first batches overflow and are skipped, and the scale then grows again.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}}

MOVES = {
    2: {1: (0, 1, 8), 3: (0, 7, 8), 4: (0, 3, 8), 6: (0, 5, 8)},
    3: {1: (0, 1, 2, 8), 3: (0, 6, 7, 8), 5: (0, 2, 5, 8), 6: (0, 1, 7, 8)},
    4: {1: (0, 1, 2, 3, 8), 3: (0, 5, 6, 7, 8), 5: (0, 2, 4, 6, 8)},
}


def compare(run: Run, moves: dict[int, tuple[int, ...]], replicas: int = 1) -> list[float]:
    """Train with and without moves; both must agree on everything."""
    ranks = run.num_stages * replicas
    static = run_ranks(run_and_digest, ranks, run)
    moved = run_ranks(run_and_digest, ranks, replace(run, moves=moves))
    assert static[0][0] == moved[0][0], "losses differ"
    for loss in static[0][0]:
        assert loss == loss, "a loss is not a number, so equality shows nothing"
    assert _merged(static, run.num_stages, replicas) == _merged(moved, run.num_stages, replicas)
    assert [r[2] for r in static] == [r[2] for r in moved], "learning rates differ"
    return list(static[0][0])


def _merged(results: list[Any], num_stages: int, replicas: int) -> list[dict[str, str]]:
    """Digests of all layers, for each replica; rank = stage * replicas + replica."""
    return [
        {layer: h for s in range(num_stages) for layer, h in results[s * replicas + d][1].items()}
        for d in range(replicas)
    ]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "adam": ADAM,
    "sgd": SGD,
    "fused_adamw": FUSED,
    "zero1": {**ADAMW, **ZERO},
    "zero1_sgd": {**SGD, **ZERO},
    "bf16": {**ADAMW, **BF16},
    "bf16_zero1": {**ADAMW, **BF16, **ZERO},
    "bf16_zero1_fp32_sums": {**ADAMW, **BF16_FP32_SUMS},
    "fp16_zero1": {**ADAMW, **ZERO, **FP16},
}


def _fused_adam_is_built() -> bool:
    return any(Path(get_default_build_root()).glob("*/fused_adam/*.so"))


@pytest.mark.parametrize(
    "optimizer", mostly(OPTIMIZERS, ["adamw", "sgd", "zero1", "bf16_zero1_fp32_sums", "fp16_zero1"])
)
def test_three_stages_with_clipping_and_schedule(optimizer: str) -> None:
    if optimizer == "fused_adamw" and not _fused_adam_is_built():
        pytest.skip("DeepSpeed's fused Adam takes minutes to compile on a CPU and was not built here before")
    run = Run(num_stages=3, config={**OPTIMIZERS[optimizer], **CLIP, **WARMUP})
    compare(run, MOVES[3])


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    mostly(
        product(["adamw", "zero1", "bf16_zero1_fp32_sums"], [2, 4]),
        [("zero1", 2), ("bf16_zero1_fp32_sums", 4)],
    ),
)
def test_two_and_four_stages(optimizer: str, stages: int) -> None:
    compare(Run(num_stages=stages, config={**OPTIMIZERS[optimizer], **CLIP}), MOVES[stages])


@pytest.mark.parametrize("optimizer", mostly(["adamw", "zero1", "bf16", "bf16_zero1_fp32_sums"], ["zero1", "bf16"]))
def test_two_stages_with_two_replicas(optimizer: str) -> None:
    run = Run(num_stages=2, config={**OPTIMIZERS[optimizer], **CLIP, **WARMUP})
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
        [("adamw_callable", "zero1"), ("adamw_object_scheduler", "bf16_zero1")],
    ),
)
def test_client_optimizers_under_zero(client: str, zero: str) -> None:
    config = {**CLIP, **(ZERO if zero == "zero1" else BF16_FP32_SUMS)}
    compare(Run(num_stages=3, config=config, client=client), MOVES[3])


@pytest.mark.parametrize("interval", mostly([1, 2], [2]))
def test_activation_checkpointing_with_dropout(interval: int) -> None:
    run = Run(num_stages=3, dropout=0.3, checkpoint_interval=interval, config=ADAMW)
    checkpointed = compare(run, MOVES[3])
    assert checkpointed == compare(replace(run, checkpoint_interval=0), MOVES[3])


def test_non_reentrant_checkpointing_with_dropout() -> None:
    config = {**ADAMW, "pipeline": {"use_reentrant": False, "activation_checkpoint_interval": 1}}
    compare(Run(num_stages=3, dropout=0.3, config=config), MOVES[3])


@pytest.mark.parametrize("optimizer", mostly(["adamw", "zero1", "bf16", "bf16_zero1_fp32_sums"], ["adamw", "zero1"]))
def test_tied_layers_apart_together_and_apart_again(optimizer: str) -> None:
    run = Run(num_stages=3, tied=True, config={**OPTIMIZERS[optimizer], **CLIP})
    compare(run, MOVES[3])


@pytest.mark.parametrize("optimizer", mostly(["adamw", "bf16_zero1_fp32_sums"], ["bf16_zero1_fp32_sums"]))
def test_tied_layers_on_two_stages_and_two_replicas(optimizer: str) -> None:
    run = Run(num_stages=2, tied=True, config={**OPTIMIZERS[optimizer], **CLIP})
    compare(run, MOVES[2], replicas=2)


def test_function_layers_move_too() -> None:
    run = Run(num_stages=3, functions=True, num_blocks=4, config=ADAMW)
    compare(run, MOVES[3])
