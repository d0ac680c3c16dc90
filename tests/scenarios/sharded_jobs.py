"""Train experts that replicas share out under several placements, and plain ones; compare the bits."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds.owning import is_owned
from scenarios.moe.balancing import VARYING
from scenarios.moe.placing import Lanes
from tests.distributed.splitting import Way, order_for_of
from tests.scenarios.exactness import Job, build, resize

SHARDED: dict[str, dict[str, Any]] = {
    "moe": {"every": 1, "num_experts": 12, "expert_weights": "sharded", "plan_every": 1},
    "moe_continual": {"expert_weights": "sharded", "plan_every": 1},
}
PLAIN: dict[str, dict[str, Any]] = {
    "moe": {"every": 1, "num_experts": 12, "expert_parallel": False}, "moe_continual": {},
}  # fmt: skip
"""Settings by scenario."""

Placement = str | None
"""A name; ``"random"``: another one for each layer and batch; ``None``: replicated experts, not shared at all."""


@dataclass(frozen=True)
class Seen:
    """What all ranks saw of a run: losses, the lasting part of reports, and hashes of whole layers.

    A rank that joined has losses and reports from the batch ``first`` on.
    """

    losses: list[float]
    reports: list[Any]
    layers: dict[int, str]
    first: int = 0


def anywhere(_layer: int, rows: Sequence[Sequence[int]]) -> Lanes:
    """Any placement, the same for the same rows."""
    draw, num_ranks, num_experts = random.Random(str(rows)), len(rows), len(rows[0])
    return Lanes(tuple(tuple(draw.randrange(num_ranks) for _ in range(num_experts)) for _ in range(num_ranks)))


def within_copies(lanes: Lanes, rows: Sequence[Sequence[int]]) -> Lanes:
    """Any placement that needs no other copies."""
    draw = random.Random(str(rows))
    owner = [[draw.choice(lanes.holders(expert)) for expert in range(lanes.num_experts)] for _ in rows]
    return Lanes(tuple(map(tuple, owner)))


def build_placed(job: Job, placement: Placement, way: Way = None) -> Any:
    """Build a run, a ``Contender``, on this rank of a started process group."""
    if placement is None:
        settings: dict[str, Any] = {**PLAIN[job.scenario], **job.settings}
    else:
        name = "lanes" if placement == "random" else placement
        settings = {**SHARDED[job.scenario], "placement": name, **job.settings}
    run = build(replace(job, settings=settings))
    if placement == "random":
        run.scenario._balancing._plan = anywhere
        run.scenario._balancing._reroute = within_copies
    run.engine.dynamic.pipeline.order_for = order_for_of(way)
    return run


def train_placed(
    _rank: int, job: Job, placements: Sequence[Placement], moves: bool = True, way: Way = None
) -> list[Seen]:
    """Train with each placement."""
    return [train_run(build_placed(job, placement, way), job, moves) for placement in placements]


def train_run(run: Any, job: Job, moves: bool) -> Seen:
    """Train what was built to its end."""
    engine, first = run.engine, run.engine.global_steps
    boundaries = job.moves(engine.partition[-1]) if moves and job.stages > 1 else {}
    for batch in range(first, job.num_batches):
        if batch in boundaries:
            engine.repartition(boundaries[batch])
        resize(engine, job.resizes.get(batch, engine.num_stages))
        list(run.train_window([batch], timed=True))
    seen = replace(seen_of(run), first=first)
    if job.joins:
        engine.destroy()  # who still waits hears that it is over
    return seen


def seen_of(run: Any) -> Seen:
    reports = [{k: v for k, v in report.items() if k not in VARYING} for report in run.measured.reports]
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, whole_layers(run.engine))
    layers: dict[int, str] = {}
    for found in everybody:
        for layer, value in found.items():
            assert layers.setdefault(layer, value) == value, f"replicas differ in layer {layer}"
    return Seen(run.measured.losses, reports, layers)


def whole_layers(engine: Any) -> dict[int, str]:
    """A hash of each layer's weights, buffers and optimizer state, with the rows of all replicas; by layer."""
    group, found = engine.mpu.get_data_parallel_group(), {}
    for layer, module in sorted(engine.local_layers().items()):
        h = hashlib.sha256()
        for name, buffer in sorted(module.named_buffers()):
            h.update(name.encode() + _bytes(buffer))
        for name, parameter in sorted(module.named_parameters()):
            state = {"weight": parameter.detach(), **engine.stage_optimizer.export([parameter])[0]}
            for key, value in sorted(state.items()):
                value = value if isinstance(value, Tensor) else torch.tensor(float(value or 0))
                if is_owned(parameter) and value.numel() == parameter.numel():
                    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(parts, value.contiguous(), group=group)
                    value = torch.cat(parts)
                h.update(f"{name}.{key}".encode() + _bytes(value))
        found[layer] = h.hexdigest()
    return found


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
