"""Are losses, weights and optimizer state the same bits on one stage, on two, and on two between which layers move?

Deterministic kernels are on (``torch.use_deterministic_algorithms``, ``CUBLAS_WORKSPACE_CONFIG``), dropout as well:
``seed_layers`` makes it independent of the cut.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.job import Job
from benchmarks.gpu.models import PRECISIONS, SMALL, Size, batches, engine, join
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import forget_peak, peak_bytes
from benchmarks.record import table

ONE, TWO, MOVING = "one stage", "two stages", "two stages, layers move"
NUM_PROCESSES = {ONE: 1, TWO: 2, MOVING: 2}
SIZE = Size(depth=6, hidden=1024, heads=16, seq_len=512, micro_batch=2, num_micro_batches=4, dropout=0.1)
BY_HAND = {"rebalance_every": "never"}
_NUM_BATCHES = 6
_MOVE_BEFORE = {2: -2, 4: 3}
"""Batch, and by how many layers the cut then differs from the first one."""


def measure(job: Job) -> dict[str, Any]:
    """Losses, and digests of what there is at the end, by layer."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before the first product; it may make products slower
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    join(job)
    found: dict[str, Any] = {}
    for precision in PRECISIONS:
        size = SMALL._replace(dropout=0.1, depth=6) if job.small else SIZE
        found[precision] = _of(job, size, precision)
        job.keep(found)
    return found


def _of(job: Job, size: Size, precision: str) -> dict[str, Any]:
    forget_peak(torch.device(job.device))
    made = engine(size, num_stages=job.size, precision=precision, section=BY_HAND, seed_layers=True)
    data, first, losses, partitions = batches(size), made.partition, [], []
    for number in range(_NUM_BATCHES):
        if job.options["cut"] == MOVING and number in _MOVE_BEFORE:
            made.repartition((first[0], first[1] + _MOVE_BEFORE[number], first[2]))
        partitions.append(list(made.partition))
        losses.append(float(made.train_batch(data)).hex())
    mine = {layer: _digests(made, module) for layer, module in made.local_layers().items()}
    everyone: list[Any] = [None] * job.size
    dist.all_gather_object(everyone, (mine, peak_bytes(torch.device(job.device))))
    layers = {str(layer): digests for theirs, _ in everyone for layer, digests in theirs.items()}
    made.destroy()
    return {
        "size": str(size), "losses": losses, "layers": layers, "partitions": partitions,
        "peak_bytes": [peak for _, peak in everyone],
    }


def _digests(made: Any, layer: nn.Module) -> dict[str, str]:
    """Of a layer's weights and buffers, and of its optimizer state."""
    state = {
        f"{name}.{key}": value
        for name, parameter in layer.named_parameters() for key, value in _state(made, parameter).items()
    }
    return {"weights": _digest(dict(layer.state_dict())), "state": _digest(state)}


def _state(made: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the optimizer knows of a parameter: master weight and moments where DeepSpeed wraps it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if isinstance(made.optimizer, torch.optim.Optimizer):
        return {key: value for key, value in made.optimizer.state[parameter].items() if isinstance(value, Tensor)}
    moments = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")}
    return {"master": safe_get_full_fp32_param(parameter), **moments}


def _digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What two runs of one precision differ in; empty if they are the same bits."""
    batch = next((i for i, (a, b) in enumerate(zip(one["losses"], other["losses"], strict=True)) if a != b), None)
    found = [] if batch is None else [
        f"the loss of batch {batch}: {float.fromhex(one['losses'][batch])!r} and "
        f"{float.fromhex(other['losses'][batch])!r}"
    ]  # fmt: skip
    if set(one["layers"]) != set(other["layers"]):
        return [*found, "the layers that there are"]
    for kind in ("weights", "state"):
        layers = [layer for layer in one["layers"] if one["layers"][layer][kind] != other["layers"][layer][kind]]
        if layers:
            what = "the weights" if kind == "weights" else "the optimizer state"
            found.append(f"{what} of {len(layers)} of {len(one['layers'])} layers ({', '.join(layers)})")
    return found


def is_wrong(parts: dict[str, Outcome]) -> bool:
    """Whether some bits that were compared differ."""
    one = parts[ONE].values
    others = [parts[name].values for name in (TWO, MOVING) if name in parts]
    return any(differences(one[kind], other[kind]) for other in others for kind in one if kind in other)


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    rows, size = [], ""
    for precision in PRECISIONS:
        one = parts[ONE].values.get(precision)
        for name in (TWO, MOVING):
            other = parts[name].values.get(precision) if name in parts else None
            if one is None or other is None:
                rows.append([precision, name, "not measured", "", ""])
                continue
            size, found = one["size"], differences(one, other)
            cuts = " then ".join(dict.fromkeys(str(cut) for cut in other["partitions"]))
            peaks = " + ".join(f"{peak / 1e6:.0f}" for peak in other["peak_bytes"])
            rows.append([
                precision, name, "**the same bits**" if not found else f"different: {'; '.join(found)}", cuts,
                f"{one['peak_bytes'][0] / 1e6:.0f} / {peaks}",
            ])
    what = "losses, weights and optimizer state against one stage"
    head = ("precision", "run", what, "cuts", "peak memory, MB: one stage / here")
    return f"GPT of {size}; {_NUM_BATCHES} batches.\n\n{table(head, rows)}"
