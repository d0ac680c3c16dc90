"""Partitioners: pure functions from layer costs to stage boundaries.

An algorithm is ``f(problem) -> cuts``; one wrapper, ``partitioner``, makes the function that users
call of it: ``f(costs, num_stages, *, current, layer_bytes, memory, pinned, speeds, allow_empty)``, which
returns a :class:`Plan`. None knows of ranks, devices or configuration.

Letters: ``L`` layers, ``S`` stages, ``M`` micro-batches, ``K`` groups of layers that pinned cuts
hold together. The objective is the smallest *bottleneck*, the largest stage cost.

To read it: ``plan`` (the value; a :class:`Placement` and what it promises), ``prepare`` and ``problem``
(arguments, exact sums, groups), ``partitioner`` (the wrapper), then one file an algorithm: ``uniform``,
``balanced``, ``optimal`` (with ``reach`` and ``nearest``), ``diffusion``, ``simulated`` (by
:mod:`dynpipe_ds.simulation`); ``registry`` finds them by name.
"""

from dynpipe_ds.partition.balanced import balanced
from dynpipe_ds.partition.diffusion import diffusion
from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.partition.optimal import optimal
from dynpipe_ds.partition.plan import InfeasiblePartitionError, Plan
from dynpipe_ds.partition.prepare import plan_from_boundaries
from dynpipe_ds.partition.registry import (
    Partitioner,
    get_partitioner,
    partitioner_names,
    register_partitioner,
    run_partitioner,
    wants_profile,
)
from dynpipe_ds.partition.simulated import simulated
from dynpipe_ds.partition.uniform import uniform
from dynpipe_ds.placement import Placement, check_boundaries

__all__ = [
    "InfeasiblePartitionError",
    "Partitioner",
    "Placement",
    "Plan",
    "StageMemory",
    "balanced",
    "check_boundaries",
    "diffusion",
    "get_partitioner",
    "optimal",
    "partitioner_names",
    "plan_from_boundaries",
    "register_partitioner",
    "run_partitioner",
    "simulated",
    "uniform",
    "wants_profile",
]
