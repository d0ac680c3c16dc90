"""The same number of layers on every stage: DeepSpeed's rule."""

from __future__ import annotations

from dynpipe_ds.partition.partitioner import partitioner
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.partition.repair import fill_empty_stages


@partitioner(memory_caps=False, speeds=False)
def uniform(problem: Problem) -> list[int]:
    """Partition into stages of equally many layers; the first ones take the rest.

    The rule of ``deepspeed.runtime.utils.partition_uniform``. Costs and speeds are for the plan's figures
    only, and memory is checked afterwards. A cut that is pinned moves to the nearest allowed one, and a
    stage that this leaves empty is filled by the least shift of the cuts.
    """
    num_layers, num_stages = problem.starts[-1], problem.num_stages
    size, rest = divmod(num_layers, num_stages)
    cuts = problem.snap([stage * size + min(stage, rest) for stage in range(num_stages + 1)])
    return cuts if problem.allow_empty else fill_empty_stages(cuts, problem.num_groups)
