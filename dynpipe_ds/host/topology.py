"""Ranks and stages as DeepSpeed numbers them, and a pipeline that becomes shorter or longer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, TypeVar

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import groups

from dynpipe_ds.host.coordinates import resized
from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.host.world import Groups, NobodyMetError, World, holders_of_groups
from dynpipe_ds.placement import Placement

T = TypeVar("T")


def renumber(
    pipeline: Pipeline, world: World, placement: Placement, *, sizes: Mapping[str, int] | None = None,
    otherwise: World | None = None, old: Groups | None = None,
) -> bool:
    """Begin another world, and renew all that knows of ranks, stages or groups; collective over its members.

    Args:
        pipeline: DeepSpeed's engine.
        world: of which this rank is a member.
        placement: of layers on its stages, which fits the layers that this rank has.
        sizes: how long the topology's other axes are there, if they differ from now.
        old: the groups that are replaced, if an earlier try has destroyed them.
        otherwise: a world of the present ranks, for the case that this one does not come about.

    Returns:
        Whether the world came about; if not, all is as before.

    Raises:
        NobodyMetError: on all members who came, if not all came and there is no other world.
    """
    module = pipeline.engine.module
    old, came = old or Groups(module), True
    try:
        world.regroup()
    except NobodyMetError:
        if otherwise is None:
            raise
        otherwise.regroup()
        came, placement = False, module.placement
    topology = resized(module._topo, {**(sizes or {}), "pipe": placement.num_stages})
    module.world_group = dist.new_group(ranks=range(dist.get_world_size()))
    with redirect_stdout(StringIO()):  # it prints its topology
        # In place: engine, optimizer, DeepSpeed's groups and the user hold the same object.
        module._grid.__init__(topology=topology, process_group=module.world_group)
    groups.mpu = module._grid
    if old.world_clone is not None:
        groups._clone_world_group()
    _renumber_module(module, topology, placement)
    _renumber_engine(pipeline.engine)
    pipeline.connect()
    pipeline.name_parameters()
    old.hand_over(Groups(module), holders_of_groups(pipeline))
    return came


def in_rank_order(pipeline: Pipeline, rows: Sequence[Sequence[T]], num_replicas: int) -> list[T]:
    """Members of a pipeline of another size by the ranks that they will have.

    Args:
        pipeline: as it is.
        rows: members of each stage, by their places in it.
        num_replicas: of each stage.
    """
    topology = resized(pipeline.topology, {"pipe": len(rows), "data": num_replicas})
    ranks = [topology.get_axis_list(axis="pipe", idx=stage) for stage in range(len(rows))]
    placed: dict[int, T] = {}
    for row, of_stage in zip(rows, ranks, strict=True):
        placed |= zip(of_stage, row, strict=True)
    return [placed[rank] for rank in sorted(placed)]


def _renumber_module(module: Any, topology: ProcessTopology, placement: Placement) -> None:
    layers, grid = module.local_layers(), module._grid
    module._topo = topology
    module.global_rank, module.world_size = grid.global_rank, grid.world_size
    module.num_stages, module.stage_id = grid.pipe_parallel_size, grid.get_stage_id()
    module.tied_comms = {}  # DeepSpeed's own, with old groups; ours go by stage
    module.install(placement, layers)


def _renumber_engine(engine: Any) -> None:
    grid = engine.module._grid
    engine.global_rank, engine.world_size = grid.global_rank, grid.world_size
    engine.num_stages, engine.stage_id = grid.pipe_parallel_size, grid.get_stage_id()
    engine.prev_stage, engine.next_stage = engine.stage_id - 1, engine.stage_id + 1
    engine.is_pipe_parallel = grid.pipe_parallel_size > 1
    engine.is_data_parallel, engine.dp_world_size = grid.data_parallel_size > 1, grid.data_parallel_size
    engine.seq_dp_world_size = groups._get_sequence_data_parallel_world_size()
    engine.mp_world_size = grid.get_model_parallel_world_size()
    engine.checkpoint_mp_rank = grid.get_model_parallel_rank()
    if hasattr(engine.optimizer, "model_parallel_world_size"):
        engine.optimizer.model_parallel_world_size = engine.mp_world_size
