"""Checks of a partitioner's arguments, and the problem they make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.partition.plan import InfeasiblePartitionError, Plan
from dynpipe_ds.partition.problem import Problem, stage_loads
from dynpipe_ds.placement import check_boundaries, plain_ints

_COST_BITS = 51  # the integer total stays below 2**52: a float64 holds every sum exactly
_MAX_BYTES = 2**60  # int64 sums of byte counts stay clear of overflow


def prepare(
    costs: Sequence[float],
    num_stages: int,
    *,
    current: Sequence[int] | None = None,
    layer_bytes: Sequence[int] | None = None,
    memory: StageMemory | None = None,
    pinned: Sequence[int] = (),
    speeds: Sequence[float] | None = None,
    allow_empty: bool = False,
) -> Problem:
    """Check the arguments that all partitioners share and build the problem.

    Args:
        costs: Cost of every layer, in any unit; finite and >= 0.
        num_stages: ``S``, at least 1.
        current: Boundaries now in use; may have another number of stages.
        layer_bytes: Bytes that moving each layer costs.
        memory: Memory that layers need and stages have; None for no cap.
        pinned: Cut positions ``c`` that are forbidden: layers ``c - 1`` and ``c`` stay together.
        speeds: Relative speed of every stage, 1.0 normal, 0.5 half as fast; None for all equal.
        allow_empty: Whether a stage may hold no layer.

    Returns:
        The problem.

    Raises:
        InfeasiblePartitionError: Fewer layers (or pinned groups of layers) than stages.
        ValueError: An argument is wrong; the message has the value and the rule.
    """
    num_stages = _check_num_stages(num_stages)
    amounts = _check_costs(costs)
    num_layers = len(amounts)
    integers, scale_bits = _to_integers(amounts)
    starts = _group_starts(num_layers, num_stages, pinned, allow_empty)
    factors = _check_speeds(speeds, num_stages)
    prefix = [0, *np.cumsum(integers).tolist()]
    old = None if current is None else _check_current(current, num_layers)
    return Problem(
        costs=tuple(costs),
        starts=starts,
        num_stages=num_stages,
        load=[prefix[start] for start in starts],
        scale_bits=scale_bits,
        speeds=factors,
        allow_empty=allow_empty,
        current=old,
        bottleneck_before=None if old is None else _bottleneck(old, prefix, factors, scale_bits),
        layer_bytes=None if layer_bytes is None else _byte_sums(layer_bytes, num_layers),
        **_memory_fields(memory, num_layers, num_stages, starts),
    )


def plan_from_boundaries(
    boundaries: Sequence[int],
    costs: Sequence[float],
    *,
    current: Sequence[int] | None = None,
    layer_bytes: Sequence[int] | None = None,
    speeds: Sequence[float] | None = None,
) -> Plan:
    """Make the plan of boundaries that were chosen elsewhere.

    The boundaries must be a partition; pinned cuts, empty stages and memory are not looked at
    (:func:`check_boundaries` does the first two).

    Args:
        boundaries: ``S + 1`` layer indices.
        costs: Cost of every layer.
        current: Boundaries now in use.
        layer_bytes: Bytes that moving each layer costs.
        speeds: Relative speed of every stage.

    Returns:
        The plan, its bottleneck computed as every partitioner computes it.

    Raises:
        ValueError: An argument is wrong; the message has the value and the rule.
    """
    cuts = plain_ints("boundaries", boundaries)
    if len(cuts) < 2:
        raise ValueError(f"boundaries {cuts} have {len(cuts)} entries; one stage needs two")
    num_stages = len(cuts) - 1
    problem = prepare(costs, num_stages, current=current, layer_bytes=layer_bytes, speeds=speeds, allow_empty=True)
    check_boundaries(cuts, num_layers=problem.num_groups, num_stages=num_stages, allow_empty=True)
    return problem.plan(cuts)


def _check_num_stages(num_stages: int) -> int:
    (count,) = plain_ints("num_stages", (num_stages,))
    if count < 1:
        raise ValueError(f"num_stages is {count}; it must be at least 1")
    return count


def _check_costs(costs: Sequence[float]) -> npt.NDArray[np.float64]:
    amounts = np.asarray(costs, dtype=np.float64)
    if amounts.ndim != 1 or not len(amounts):
        raise ValueError(f"costs have shape {amounts.shape}; give one number for each layer")
    wrong = np.flatnonzero(~(np.isfinite(amounts) & (amounts >= 0)))
    if len(wrong):
        layer = int(wrong[0])
        raise ValueError(
            f"cost of layer {layer} is {float(amounts[layer])}; costs must be finite and >= 0"
        )
    return amounts


def _to_integers(amounts: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], int]:
    """Scale costs by a power of two and round; integers whose total is small stay exact."""
    with np.errstate(over="ignore"):
        total = float(amounts.sum())
    if not math.isfinite(total):
        raise ValueError("the costs add up to more than a float can hold; use a larger unit")
    scale_bits = _COST_BITS - math.frexp(total)[1]
    return np.rint(np.ldexp(amounts, scale_bits)).astype(np.int64), scale_bits


def _group_starts(
    num_layers: int, num_stages: int, pinned: Sequence[int], allow_empty: bool
) -> tuple[int, ...]:
    forbidden = set(plain_ints("pinned", pinned))
    for cut in sorted(forbidden):
        if not 0 < cut < num_layers:
            raise ValueError(
                f"pinned cut {cut} is outside 1..{num_layers - 1}; a cut c lies between layers "
                f"c - 1 and c, and there are {num_layers} layers"
            )
    starts = tuple(cut for cut in range(num_layers + 1) if cut not in forbidden)
    if len(starts) - 1 < num_stages and not allow_empty:
        groups = f" in {len(starts) - 1} groups (pinned cuts join layers)" if forbidden else ""
        raise InfeasiblePartitionError(
            f"{num_layers} layers{groups} are fewer than {num_stages} stages and every stage "
            "needs one; use fewer stages or allow empty stages"
        )
    return starts


def _check_speeds(speeds: Sequence[float] | None, num_stages: int) -> tuple[float, ...]:
    factors = (1.0,) * num_stages if speeds is None else tuple(float(speed) for speed in speeds)
    if len(factors) != num_stages:
        raise ValueError(f"speeds have {len(factors)} entries; give one for each of {num_stages}")
    for stage, speed in enumerate(factors):
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(
                f"speed of stage {stage} is {speed}; speeds must be finite and > 0 (1.0 is normal)"
            )
    return factors


def _check_current(current: Sequence[int], num_layers: int) -> tuple[int, ...]:
    cuts = plain_ints("current", current)
    try:
        return check_boundaries(
            cuts, num_layers=num_layers, num_stages=max(len(cuts) - 1, 1), allow_empty=True
        )
    except ValueError as error:
        raise ValueError(f"current partition: {error}") from error


def _bottleneck(
    boundaries: tuple[int, ...], prefix: list[int], speeds: tuple[float, ...], scale_bits: int
) -> float | None:
    if len(boundaries) != len(speeds) + 1:
        if len(set(speeds)) > 1:
            return None  # another number of stages: whose speed each one had is not known
        speeds = (speeds[0],) * (len(boundaries) - 1)
    return math.ldexp(max(stage_loads(prefix, boundaries, speeds)), -scale_bits)


def _byte_sums(layer_bytes: Sequence[int], num_layers: int) -> list[int]:
    values = plain_ints("layer_bytes", layer_bytes)
    if len(values) != num_layers:
        raise ValueError(f"layer_bytes has {len(values)} entries for {num_layers} layers")
    if min(values) < 0:
        layer = values.index(min(values))
        raise ValueError(f"layer_bytes of layer {layer} is {values[layer]}; it must be >= 0")
    # Ties between equal bytes are decided by layers: the sum grows by this factor (see nearest).
    _check_total("layer_bytes", sum(values), _MAX_BYTES // (num_layers + 1))
    return _sums(values)


def _sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values, initial=0))


def _check_total(name: str, total: int, limit: int) -> None:
    if total >= limit:
        raise ValueError(f"{name} add up to {total:,} bytes; sums must stay below {limit:,}")


def _memory_fields(
    memory: StageMemory | None, num_layers: int, num_stages: int, starts: tuple[int, ...]
) -> dict[str, Any]:
    if memory is None:
        return {}
    if len(memory.state_bytes) != num_layers:
        raise ValueError(
            f"memory describes {len(memory.state_bytes)} layers, the costs {num_layers}"
        )
    state = _sums(plain_ints("state_bytes", memory.state_bytes))
    activation = _sums(plain_ints("activation_bytes", memory.activation_bytes))
    in_flight = tuple(memory.in_flight(stage, num_stages) for stage in range(num_stages))
    needed = state[-1] + in_flight[0] * activation[-1]
    _check_total("state and activations in flight", needed, _MAX_BYTES)
    return {
        "caps": memory.caps(num_stages),
        "in_flight": in_flight,
        "state": [state[start] for start in starts],
        "activation": [activation[start] for start in starts],
    }
