"""Compiled optimizers whose update of a parameter would depend on what else lives on its stage.

DeepSpeed's keep state outside the parameters' state; here it follows them all the same. On CPUs most compute the last
elements of a tensor otherwise than those before; here no element of a flat buffer is among the last.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

LANES = 16
"""Floats in the widest vector register of a CPU."""

_ALIGNMENT = "nccl_start_alignment_factor"  # DeepSpeed rounds every replica's share of a flat buffer up to it


def is_compiled_for_cpu(optimizer: Any) -> bool:
    """Whether it is DeepSpeedCPUAdam, or FusedAdam on a CPU."""
    if isinstance(optimizer, FusedAdam):
        return bool(optimizer._dummy_overflow_buf.device.type == "cpu")
    return getattr(optimizer, "ds_opt_adam", None) is not None


def prime_native_adam(optimizer: torch.optim.Optimizer) -> None:
    """Make the bias correction the same wherever a parameter lives; called before every step.

    On a CPU the compiled part keeps ``beta ** step`` as a running product, recomputed by ``pow`` when the
    step jumps or the betas change; which of the two a parameter meets depends on what else its stage
    holds. One update of a dummy with other betas makes every step start from ``pow``.
    Optimizers of other kinds are left alone.
    """
    native = getattr(optimizer, "ds_opt_adam", None)
    if native is not None:
        dummy = [torch.zeros(1) for _ in range(4)]
        native.adam_update(optimizer.opt_id, 1, 0.0, 0.0, 0.0, 1.0, 0.0, True, *dummy)  # type: ignore[attr-defined]
    elif isinstance(optimizer, FusedAdam) and optimizer._dummy_overflow_buf.device.type == "cpu":
        dummies = [[torch.zeros(1)] for _ in range(4)]
        optimizer.multi_tensor_adam(
            1, optimizer._dummy_overflow_buf, dummies, 0.0, 0.0, 0.0, 1.0, 1, optimizer.adam_w_mode, 1, 0.0
        )


def count_fused_step(optimizer: torch.optim.Optimizer) -> None:
    """Give all parameters of a group the same number of steps; called after every step.

    FusedAdam reads and advances the number that its *last* parameter with a gradient keeps. Another
    parameter may be the last one after a move. All stages count alike, also those without a parameter of
    the group. Optimizers of other kinds are left alone.
    """
    if not isinstance(optimizer, FusedAdam):
        return
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if optimizer.state.get(p)]
        num_steps = max([group.get("step", 0) + 1, *(state["step"] for state in states)])
        for counted in (group, *states):
            counted["step"] = num_steps


def has_lanes(optimizer: torch.optim.Optimizer, *, on_host: bool) -> bool:
    """Whether elements that fill no vector register are computed by other instructions, which round otherwise.

    Measured: torch's fused Adam, AdamW and SGD differ there in the last bits, DeepSpeed's CPU Adam, too; torch's other
    implementations do not.
    """
    is_native = isinstance(optimizer, FusedAdam) or any(name.startswith("ds_opt_") for name in vars(optimizer))
    return on_host and (is_native or any(group.get("fused") for group in optimizer.param_groups))


@contextlib.contextmanager
def whole_lanes(optimizer: torch.optim.Optimizer, *, on_host: bool) -> Iterator[None]:
    """Let DeepSpeed's wrappers that are built within end every replica's flat buffers with whole vector registers.

    Nothing changes unless the basic optimizer :func:`has_lanes`.
    """
    if not has_lanes(optimizer, on_host=on_host):
        yield
        return

    def keep(wrapper: Any, _deepspeeds: int) -> None:
        vars(wrapper)[_ALIGNMENT] = LANES

    wider = property(lambda wrapper: vars(wrapper)[_ALIGNMENT], keep)
    try:
        for wrapper in (DeepSpeedZeroOptimizer, BF16_Optimizer):
            setattr(wrapper, _ALIGNMENT, wider)
        yield
    finally:
        for wrapper in (DeepSpeedZeroOptimizer, BF16_Optimizer):
            delattr(wrapper, _ALIGNMENT)
