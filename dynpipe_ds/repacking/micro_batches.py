"""The same batch in another number of micro-batches: what layers would take and hold; pure functions.

Proposed, and not built, in the paper's supplement (DynMo, D.5). How seconds follow from the size is ours: a micro-batch
takes ``fixed + samples * per_sample`` seconds, with one ratio of both for the whole model. It is measured where batches
ran in two sizes one after the other; before that :data:`ASSUMED_SHARE` is taken for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile

ASSUMED_SHARE = 0.2
"""Where nothing was measured: so much of a micro-batch's seconds, at the size that the JSON asks for, is fixed."""

FARTHEST = 8
"""Numbers of micro-batches are looked at up to so many times as many, or as few, as now: farther nothing is known."""


def possible_numbers(num_samples: int, present: int) -> list[int]:
    """Other numbers of micro-batches that part a batch evenly.

    Args:
        num_samples: of a batch, on one replica of the pipeline.
        present: number of micro-batches now.

    Returns:
        Ascending numbers M, of which each divides the samples, from an eighth of the present one to eight times it.
    """
    numbers = range(max(1, math.ceil(present / FARTHEST)), min(num_samples, present * FARTHEST) + 1)
    return [number for number in numbers if num_samples % number == 0 and number != present]


class Scaling:
    """How seconds of a layer follow from the number of samples in a micro-batch.

    Args:
        usual_size: samples of a micro-batch that the JSON asks for.

    Attributes:
        fixed_samples: what is fixed, in samples that would take as long.
        is_measured: whether that was measured, or is assumed.
    """

    def __init__(self, usual_size: int) -> None:
        self.fixed_samples = usual_size * ASSUMED_SHARE / (1.0 - ASSUMED_SHARE)
        self.is_measured = False
        self._left: tuple[int, float] | None = None

    def leaves(self, size: int, seconds: float) -> None:
        """Take note that batches are about to run in micro-batches of another size.

        Args:
            size: samples of a micro-batch until now.
            seconds: that all layers took for one.
        """
        self._left = (size, seconds) if seconds > 0 else None

    def arrives(self, size: int, seconds: float) -> None:
        """Take in what the first batches of another size took; once for every change.

        Args:
            size: samples of a micro-batch now.
            seconds: that all layers take for one.
        """
        if self._left is None or self._left[0] == size or seconds <= 0:
            return
        size_before, before_s = self._left
        self._left = None
        sample_s = (seconds - before_s) / (size - size_before)
        fixed_s = max(0.0, before_s - size_before * sample_s)
        if sample_s > 0:  # else it was noise: more samples never take less
            self.fixed_samples, self.is_measured = fixed_s / sample_s, True

    def scaled(self, profile: PipelineProfile, size: int, num_micro_batches: int) -> PipelineProfile:
        """What a profile would be in another number of micro-batches.

        Activations and messages are taken to be in proportion to the samples; the optimizer's step stays.

        Args:
            profile: as measured.
            size: samples of its micro-batches.
            num_micro_batches: M, another one that parts the batch evenly.

        Returns:
            The profile with seconds and bytes of the smaller or larger micro-batches.
        """
        other_size = size * profile.num_micro_batches / num_micro_batches
        times = (self.fixed_samples + other_size) / (self.fixed_samples + size)
        share = other_size / size

        def changed(layer: LayerProfile) -> LayerProfile:
            return replace(
                layer, forward_s=layer.forward_s * times, backward_s=layer.backward_s * times,
                weight_s=layer.weight_s * times, split_s=layer.split_s * times,
                activation_bytes=math.ceil(layer.activation_bytes * share),
            )

        return replace(
            profile, num_micro_batches=num_micro_batches, layers=tuple(map(changed, profile.layers)),
            link_s=tuple(None if seconds is None else seconds * share for seconds in profile.link_s),
        )

    def alternatives(self, profile: PipelineProfile, size: int) -> tuple[PipelineProfile, ...]:
        """A profile in each other number of micro-batches that is to be looked at.

        Args:
            profile: as measured.
            size: samples of its micro-batches.
        """
        present = profile.num_micro_batches
        return tuple(self.scaled(profile, size, other) for other in possible_numbers(present * size, present))

    def state_dict(self) -> dict[str, Any]:
        """What was measured, as plain values."""
        return {"fixed_samples": self.fixed_samples, "is_measured": self.is_measured}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave; nothing where nothing was measured."""
        if state.get("is_measured"):
            self.fixed_samples, self.is_measured = state["fixed_samples"], True
