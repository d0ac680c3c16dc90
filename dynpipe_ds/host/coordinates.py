"""Which rank is which stage and replica, in pipelines of several lengths."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import ProcessTopology

from dynpipe_ds.placement import present_stage

Member = tuple[int, int] | int


def resized(topology: ProcessTopology, sizes: Mapping[str, int]) -> ProcessTopology:
    """The same axes of other lengths; ranks keep their order along them.

    Args:
        topology: as it is.
        sizes: length by axis; others stay.
    """
    axes = topology.get_axis_names()
    other = copy.copy(topology)
    ProcessTopology.__init__(other, axes=axes, dims=[sizes.get(axis, topology.get_dim(axis)) for axis in axes])
    return other


def longer(topology: ProcessTopology, num_stages: int) -> list[Member]:
    """Who has which rank when stages are put in: before the last one, so that who reads data goes on reading it.

    Args:
        topology: as it is.
        num_stages: more than now.

    Returns:
        By rank in the longer pipeline: a present rank, or for a new one (its stage, its replica).
    """
    before = topology.get_dim("pipe")
    other = resized(topology, {"pipe": num_stages})
    members: list[Member] = []
    for rank in range(other.world_size()):
        where = other.get_coord(rank)._asdict()
        stage = present_stage(where["pipe"], before, num_stages)
        here: Member = where["pipe"], where["data"]
        members.append(here if stage is None else topology.get_rank(**{**where, "pipe": stage}))
    return members


def alone(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``PipelineModule`` for a process that is alone, whatever number of ranks they were meant for.

    Args:
        args: as given.
        kwargs: as given.

    Returns:
        All of them, by name.
    """
    given = inspect.signature(PipelineModule.__init__).bind(None, *args, **kwargs).arguments
    del given["self"]
    topology = given.get("topology")
    if topology is not None:
        given["topology"] = resized(topology, dict.fromkeys(topology.get_axis_names(), 1))
    return {**given, "num_stages": None if topology is not None else 1}
