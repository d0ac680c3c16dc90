"""What messages between stages take, from the newest batches in which that could be measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from dynpipe_ds.measure.profile import PipelineProfile

_NEWEST = 8  # measurements that a delay is the median of: a message that a busy machine held up is none


class Links:
    """Remembers delays, boundary by boundary; they belong to workers, not to layers."""

    def __init__(self) -> None:
        self._measured: list[deque[float]] = []

    def observe(self, profile: PipelineProfile) -> PipelineProfile:
        """Take in a batch, and give it the delays as they are known by now.

        Args:
            profile: as measured.
        """
        if len(profile.link_s) != len(self._measured):
            self._measured = [deque(maxlen=_NEWEST) for _ in profile.link_s]
        for seconds, known in zip(profile.link_s, self._measured, strict=True):
            if seconds is not None:
                known.append(seconds)
        return replace(profile, link_s=tuple(median(known) if known else None for known in self._measured))

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {"measured": [list(known) for known in self._measured]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint, or from other stages.
        """
        self._measured = [deque(known, maxlen=_NEWEST) for known in state.get("measured", ())]
