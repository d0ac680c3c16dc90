"""The same number of layers on every stage: DeepSpeed's rule."""

from __future__ import annotations

from collections.abc import Sequence

from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.partition.plan import Plan
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.partition.problem import Problem
from dynpipe_ds.partition.repair import fill_empty_stages


def uniform(
    costs: Sequence[float],
    num_stages: int,
    *,
    current: Sequence[int] | None = None,
    layer_bytes: Sequence[int] | None = None,
    memory: StageMemory | None = None,
    pinned: Sequence[int] = (),
    speeds: Sequence[float] | None = None,
    allow_empty: bool = False,
) -> Plan:
    """Partition into stages of equally many layers; the first ones take the rest.

    The rule of ``deepspeed.runtime.utils.partition_uniform``. Costs and speeds do not change the
    boundaries. A cut that is pinned moves to the nearest allowed one, and a stage that this
    leaves empty is filled by the least shift of the cuts.

    Args:
        costs: Cost of every layer, in any unit; for the plan's figures only.
        num_stages: ``S``.
        current: Boundaries now in use.
        layer_bytes: Bytes that moving each layer costs.
        memory: Memory that layers need and stages have; checked afterwards.
        pinned: Cut positions ``c`` that are forbidden: layers ``c - 1`` and ``c`` stay together.
        speeds: Relative speed of every stage; for the plan's figures only.
        allow_empty: Whether a stage may hold no layer.

    Returns:
        The plan.

    Raises:
        InfeasiblePartitionError: Fewer layers than stages, or a stage exceeds its cap.
        ValueError: An argument is wrong; the message has the value and the rule.
    """
    problem = prepare(
        costs,
        num_stages,
        current=current,
        layer_bytes=layer_bytes,
        memory=memory,
        pinned=pinned,
        speeds=speeds,
        allow_empty=allow_empty,
    )
    cuts = uniform_cuts(problem)
    problem.require_fit(cuts, "uniform")
    return problem.plan(cuts)


def uniform_cuts(problem: Problem) -> list[int]:
    """Cut by the number of layers.

    Args:
        problem: The problem.

    Returns:
        ``S + 1`` group indices.
    """
    num_layers, num_stages = problem.starts[-1], problem.num_stages
    size, rest = divmod(num_layers, num_stages)
    if not size:
        boundaries = [min(stage, num_layers) for stage in range(num_stages + 1)]
    else:
        boundaries = [stage * size + min(stage, rest) for stage in range(num_stages + 1)]
    cuts = problem.snap(boundaries)
    return cuts if problem.allow_empty else fill_empty_stages(cuts, problem.num_groups)
