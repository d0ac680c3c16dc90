"""What a planned order may hold: as much as the fullest worker under 1F1B, or a cap."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.placement import Placement


def worker_bytes_of_1f1b(
    profile: PipelineProfile, boundaries: Placement | Sequence[int], *, activation_budget: float = 1.0
) -> int:
    """State and activations that the fullest worker holds under 1F1B.

    Args:
        profile: bytes of every layer, and M.
        boundaries: S + 1 layer indices, or a placement that is a partition.
        activation_budget: how often its activations count.

    Returns:
        Bytes.
    """
    placement = Placement.of(boundaries, num_layers=len(profile.layers))
    state = (sum(held) for held in placement.by_stage(profile.state_bytes()))
    held = zip(state, _memory(profile).stage_bytes(placement), strict=True)
    return max(kept + round(activation_budget * (most - kept)) for kept, most in held)


def activation_caps(
    profile: PipelineProfile, boundaries: Placement | Sequence[int], worker_bytes: int | Sequence[int]
) -> tuple[int, ...]:
    """What every worker has left for activations beside its layers' state; for :func:`plan_order`.

    Args:
        profile: bytes of every layer.
        boundaries: S + 1 layer indices, or a placement that is a partition.
        worker_bytes: what a worker may hold, for all or for each.

    Returns:
        S bytes.

    Raises:
        ValueError: when there is not one number, or one for each stage, or a stage has no room for one micro-batch.
    """
    placement = Placement.of(boundaries, num_layers=len(profile.layers))
    most = _memory(profile, worker_bytes).caps(placement.num_stages)
    state, activation = (
        [sum(held) for held in placement.by_stage(num_bytes)]
        for num_bytes in (profile.state_bytes(), profile.activation_bytes())
    )
    for stage, (cap, kept, needed) in enumerate(zip(most, state, activation, strict=True)):
        if cap < kept + needed:
            raise ValueError(
                f"stage {stage} may hold {cap:,} bytes: must be at least the {kept + needed:,} that its layers' state "
                f"({kept:,}) and one micro-batch ({needed:,}) take; raise the cap, or give the stage fewer layers"
            )
    return tuple(cap - kept for cap, kept in zip(most, state, strict=True))


def late_layers(
    profile: PipelineProfile, boundaries: Placement | Sequence[int], cap_bytes: Sequence[int],
    weight_bytes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Of how many layers of each stage, from the first one on, the gradients of weights may wait.

    A micro-batch that waits for its weight gradients lies beside the activations of another one. Where there is no room
    for all of it, there is often room for most: the last stage holds a little more than the first one does, for
    example, for the head.

    Args:
        profile: bytes of every layer.
        boundaries: S + 1 layer indices, or a placement that is a partition.
        cap_bytes: S most bytes of activations, as :func:`activation_caps` has them.
        weight_bytes: L bytes that a layer holds between both halves of a backward; ``None``: its activation bytes.

    Returns:
        For :class:`~dynpipe_ds.schedule.Order`: S numbers; empty if all layers of all stages may wait.
    """
    placement = Placement.of(boundaries, num_layers=len(profile.layers))
    waiting = placement.by_stage(profile.activation_bytes() if weight_bytes is None else weight_bytes)
    found, are_all = [], True
    for held, waits, cap in zip(placement.by_stage(profile.activation_bytes()), waiting, cap_bytes, strict=True):
        found.append(num_late([0, *accumulate(waits)], 0, len(waits), cap - sum(held)))
        are_all &= found[-1] == len(waits)
    return () if are_all else tuple(found)


def num_late(until_bytes: Sequence[int], first: int, end: int, room_bytes: int) -> int:
    """Of how many layers of a stage the gradients of weights may wait.

    Args:
        until_bytes: that all layers before each one hold between both halves of a backward.
        first: its first layer.
        end: the layer behind its last one.
        room_bytes: beside the activations of a micro-batch.
    """
    return max(0, bisect_right(until_bytes, until_bytes[first] + room_bytes, first, end + 1) - first - 1)


def _memory(profile: PipelineProfile, worker_bytes: int | Sequence[int] = 0) -> StageMemory:
    return StageMemory(
        profile.state_bytes(), profile.activation_bytes(), profile.num_micro_batches, cap_bytes=worker_bytes
    )
