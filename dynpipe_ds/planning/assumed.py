"""What a profile without measured halves of backwards is taken to have."""

from __future__ import annotations

from dynpipe_ds.measure.profile import PipelineProfile


def assume_halves(profile: PipelineProfile, weight_share: float) -> PipelineProfile:
    """Let a profile have split backwards where none was measured.

    Args:
        profile: of whole backwards.
        weight_share: of every layer's backward, the share that computes gradients of weights, from 0 to 1; splitting
            is taken to cost nothing.

    Returns:
        The profile with ``weight_s``; as it is, if a backward was split while it was measured.
    """
    if any(layer.weight_s for layer in profile.layers):
        return profile
    return profile.with_seconds(weight_s=[weight_share * layer.backward_s for layer in profile.layers])
