"""DeepSpeed's compiled Adams keep state outside the parameters' state; here it follows them all the same.

Without this, what a parameter's update is would depend on what else lives on its stage.
"""

from __future__ import annotations

import torch
from deepspeed.ops.adam import FusedAdam


def prime_native_adam(optimizer: torch.optim.Optimizer) -> None:
    """Make the bias correction the same wherever a parameter lives; called before every step.

    On a CPU the compiled part keeps ``beta ** step`` as a running product, recomputed by ``pow`` when the
    step jumps or the betas change; which of the two a parameter meets depends on what else its stage
    holds. One update of a dummy with other betas makes every step start from ``pow``.

    Args:
        optimizer: any optimizer; others than DeepSpeedCPUAdam and FusedAdam are left alone.
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
    the group.

    Args:
        optimizer: any optimizer; others than FusedAdam are left alone.
    """
    if not isinstance(optimizer, FusedAdam):
        return
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if optimizer.state.get(p)]
        num_steps = max([group.get("step", 0) + 1, *(state["step"] for state in states)])
        for counted in (group, *states):
            counted["step"] = num_steps
