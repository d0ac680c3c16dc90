"""Host memory that copies of a model's state will take, and that there is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from torch import nn

from dynpipe_ds.host.optimizers.stage_optimizer import PlainOptimizer
from dynpipe_ds.owning import is_owned

if TYPE_CHECKING:
    from dynpipe_ds.stage import Stage

COPIES = 2
"""Kept of each worker: the newest that is surely complete, and one on its way."""

_MOMENTS = 2  # fp32 values an element that Adam keeps: more than most optimizers do
_FP32 = 4  # bytes
_LIMIT, _USED = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))


def free_bytes() -> int:
    """Host memory that this process could still take, in its control group as well."""
    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):
        free = min(free, int(_LIMIT.read_text()) - int(_USED.read_text()))
    return max(free, 0)


def state_bytes(stage: Stage) -> tuple[int, int]:
    """Bytes of a copy of this rank's state, after the first optimizer step.

    Args:
        stage: with its layers.

    Returns:
        Of all of it, and of what other replicas do not have alike. What an optimizer has not made yet is taken to be
        two fp32 values for each trained element.
    """
    everything = alone = 0
    spread = stage.optimizer is not None and stage.optimizer.shares_out
    for layer in stage.local_layers().values():
        weights = [(p.nbytes, _of_optimizer(stage, p)) for p in layer.parameters()]
        buffers = sum(b.nbytes for b in layer.buffers())
        held = buffers + sum(own + state for own, state in weights)
        everything += held
        shared = sum(own + (0 if spread else state) for own, state in weights)
        alone += held if stage.module.replica.count == 1 or stage.module.owned else held - shared
    return everything, alone


def _of_optimizer(stage: Stage, parameter: nn.Parameter) -> int:
    """What this rank will hold of the optimizer's state: as now, if it has moments already."""
    optimizer = stage.optimizer
    trained = parameter.numel() if parameter.requires_grad else 0
    if optimizer is not None and optimizer.shares_out and not is_owned(parameter):
        trained = -(-trained // stage.module.replica.count)
    master = 0 if isinstance(optimizer, PlainOptimizer) else _FP32 * trained
    return max(stage.state_bytes(parameter), master + _MOMENTS * _FP32 * trained)


def allowed_bytes(free: Sequence[int], nodes: Sequence[str], rank: int) -> int:
    """A rank's part of what is free on its node.

    Args:
        free: bytes, as every rank has found them.
        nodes: of every rank.
        rank: which one.
    """
    here = [bytes_ for bytes_, node in zip(free, nodes, strict=True) if node == nodes[rank]]
    return min(here) // Counter(nodes)[nodes[rank]]


def problem(needed: int, allowed: int, given: int | None) -> str:
    """What every rank may be told if copies do not fit; empty if they do.

    Args:
        needed: bytes.
        allowed: bytes of the node's free memory for this rank.
        given: the key ``max_bytes``.
    """
    limit = allowed if given is None else min(allowed, given)
    if needed <= limit:
        return ""
    which = "survive.max_bytes allows" if limit == given else "of its node's free memory there are for it"
    return (
        f"copies for survive need {needed} bytes of host memory ({COPIES} of this worker's state, {COPIES} of a "
        f"neighbour's), and {which} {limit}; use more nodes or replicas with ZeRO, raise what limits it, or set "
        "survive.enabled to false"
    )
