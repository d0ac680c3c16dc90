"""What a planned order may hold: as much as the fullest worker under 1F1B, or a cap."""

from __future__ import annotations

from collections.abc import Sequence

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.placement import Placement


def worker_bytes_of_1f1b(profile: PipelineProfile, boundaries: Placement | Sequence[int]) -> int:
    """State and activations that the fullest worker holds under 1F1B.

    Args:
        profile: bytes of every layer, and M.
        boundaries: S + 1 layer indices, or a placement that is a partition.

    Returns:
        Bytes.
    """
    return max(_memory(profile).stage_bytes(boundaries))


def activation_caps(
    profile: PipelineProfile, boundaries: Placement | Sequence[int], worker_bytes: int | Sequence[int]
) -> tuple[int, ...]:
    """What every worker has left for activations beside its layers' state; for :func:`plan_order`.

    Args:
        profile: bytes of every layer.
        boundaries: S + 1 layer indices, or a placement that is a partition.
        worker_bytes: what a worker may hold, for all or for each.

    Returns:
        S bytes, negative where the state alone is too much.

    Raises:
        ValueError: when there is not one number, or one for each stage.
    """
    placement = Placement.of(boundaries, num_layers=len(profile.layers))
    most = _memory(profile, worker_bytes).caps(placement.num_stages)
    state = placement.by_stage(profile.state_bytes())
    return tuple(cap - sum(held) for cap, held in zip(most, state, strict=True))


def _memory(profile: PipelineProfile, worker_bytes: int | Sequence[int] = 0) -> StageMemory:
    return StageMemory(
        profile.state_bytes(), profile.activation_bytes(), profile.num_micro_batches, cap_bytes=worker_bytes
    )
