"""DeepSpeed configs, partitions and moves that the multi-process tests share; configs are merged with ``**``."""

from __future__ import annotations

from typing import Any

BY_HAND = {"enabled": True, "rebalance_every": "never", "cross_memory": False}
"""The section ``dynamic_pipeline`` of an engine whose layers move only when the test says so; in messages, which is
how they move between machines."""

CROSS_MEMORY = {"dynamic_pipeline": {**BY_HAND, "cross_memory": True}}
"""For an engine whose layers move between processes of one machine, as they do by default."""

# -- optimizers -----------------------------------------------------------------------------------

TORCH_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
"""What a ``Run`` trains with unless told otherwise."""

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}}
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True, "adam_w_mode": False}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}}
FUSED = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6}}}
CLIP = {"gradient_clipping": 0.05}
UNCLIPPED = {"gradient_clipping": 0.0}
"""DeepSpeed clips at 1.0 by default, in fp32 by the norm of the first stage alone (docs/exactness.md)."""

# -- precisions -----------------------------------------------------------------------------------

ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
BF16 = {"bf16": {"enabled": True}}
BF16_FP32_SUMS: dict[str, Any] = {**BF16, **ZERO, "data_types": {"grad_accum_dtype": "fp32"}}

# Scaled so that the first batch overflows and is skipped, and a later one when the scale has grown again.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 3, "hysteresis": 1}}

# One of each way in which weights and gradients are kept.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "zero1": {**ADAMW, **ZERO},
    "bf16_zero1_fp32_sums": {**ADAMW, **BF16_FP32_SUMS},
}
CLIPPED: dict[str, dict[str, Any]] = {
    "adamw": {**ADAMW, **CLIP}, "zero1": {**ADAMW, **ZERO, **CLIP}, "bf16": {**ADAMW, **BF16_FP32_SUMS, **CLIP},
}

# -- partitions of eight layers, by number of stages -----------------------------------------------

EVEN = {2: (0, 4, 8), 3: (0, 3, 6, 8)}
UNEVEN = {2: (0, 1, 8), 3: (0, 1, 2, 8), 4: (0, 1, 2, 3, 8)}
"""Of which a balancer makes something better."""

MOVES = {
    2: {1: (0, 1, 8), 3: (0, 7, 8), 4: (0, 3, 8), 6: (0, 5, 8)},
    3: {1: (0, 1, 2, 8), 3: (0, 6, 7, 8), 5: (0, 2, 5, 8), 6: (0, 1, 7, 8)},
    4: {1: (0, 1, 2, 3, 8), 3: (0, 5, 6, 7, 8), 5: (0, 2, 4, 6, 8)},
}
"""Batch -> boundaries before it."""
