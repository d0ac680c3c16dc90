"""Ranks and stages as DeepSpeed numbers them, and a pipeline that becomes shorter."""

from __future__ import annotations

import copy
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.utils import groups

from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.host.world import Groups, World, holders_of_groups
from dynpipe_ds.placement import Placement


def renumber(pipeline: Pipeline, world: World, placement: Placement) -> None:
    """Join the survivors' world, and renew all that knows of ranks, stages or groups; collective over the survivors."""
    module = pipeline.engine.module
    old = Groups(module)
    world.regroup()
    topology = _shorter(module._topo, placement.num_stages)
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
    engine.mp_world_size = grid.get_model_parallel_world_size()
    engine.checkpoint_mp_rank = grid.get_model_parallel_rank()
    if hasattr(engine.optimizer, "model_parallel_world_size"):
        engine.optimizer.model_parallel_world_size = engine.mp_world_size


def _shorter(topology: ProcessTopology, num_stages: int) -> ProcessTopology:
    """The same axes with fewer stages; survivors that keep the order of their ranks keep their other coordinates."""
    dims = [num_stages if axis == "pipe" else topology.get_dim(axis) for axis in topology.get_axis_names()]
    shorter = copy.copy(topology)
    ProcessTopology.__init__(shorter, axes=topology.get_axis_names(), dims=dims)
    return shorter
