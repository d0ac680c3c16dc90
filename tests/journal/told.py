"""Journals of runs that never were: written by the writer itself, with times that tests know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dynpipe_ds.events import RebalanceEvent
from dynpipe_ds.journal.write import JournalWriter
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile

NAMES = ("embed", *(f"block {i}" for i in range(6)), "head")


@dataclass
class Job:
    """A job on two stages, whose front is frozen at some batch, and whose layers then move.

    Attributes:
        folder: of the journal.
        frozen_at: from which batch on the first four layers have no backward.
        moved_at: after how many batches layers move.
        settings: keys of the section.
        compiles: seconds that layers are compiled in some batches, which have no profile.
    """

    folder: Path
    frozen_at: int = 12
    moved_at: int = 16
    boundaries: tuple[int, ...] = (0, 4, 8)
    better: tuple[int, ...] = (0, 5, 8)
    settings: Mapping[str, Any] = field(default_factory=dict)
    compiles: Mapping[int, float] = field(default_factory=dict)

    def about(self) -> dict[str, Any]:
        return {
            "layers": list(NAMES), "samples_a_batch": 8, "num_ranks": 2, "device": "cpu",
            "settings": dict(self.settings),
        }  # fmt: skip

    def seconds(self, batch: int) -> list[tuple[float, float]]:
        """Forward and backward of each layer."""
        return [(0.01, 0.0 if batch >= self.frozen_at and i < 4 else 0.02) for i in range(len(NAMES))]

    def boundaries_at(self, batch: int) -> tuple[int, ...]:
        return self.better if batch >= self.moved_at else self.boundaries

    def profile(self, batch: int, *, halves: bool = False) -> PipelineProfile:
        layers = tuple(
            LayerProfile(name, f, b, 100, 400, 400, 800, 64, b / 2 if halves else 0.0)
            for name, (f, b) in zip(NAMES, self.seconds(batch), strict=True)
        )
        cuts = self.boundaries_at(batch)
        busy_s = [round(4 * sum(layer.seconds for layer in layers[a:b]), 4) for a, b in pairwise(cuts)]
        batch_s = round(max(busy_s) + 0.1, 4)
        stages = tuple(StageProfile(s, 0.04, round(batch_s - s - 0.06, 4), 0.02, batch_s, 2**20 * (1 + i))
                       for i, s in enumerate(busy_s))  # fmt: skip
        return PipelineProfile(batch, cuts, 4, layers, stages, (0.001,))

    def event(self) -> RebalanceEvent:
        return RebalanceEvent(self.moved_at, self.boundaries, self.better, 0.125, 3 * 2**20, 0.01, 0.2)

    def begin(self) -> JournalWriter:
        """Let a process begin, and train nothing yet."""
        writer = JournalWriter(str(self.folder), self.about)
        with patch("torch.distributed.get_rank", return_value=0):
            writer.begin()
        return writer

    def write(
        self, batches: Sequence[int], *, rank: int = 0, profile_every: int = 1, writer: JournalWriter | None = None
    ) -> JournalWriter:
        """Let a process train some batches, and end; one that has begun, if it is given."""
        writer = JournalWriter(str(self.folder), self.about) if writer is None else writer
        with patch("torch.distributed.get_rank", return_value=rank):
            for batch in batches:
                if batch in self.compiles:
                    writer.compiled(batch, self.compiles[batch])
                elif batch % profile_every == 0:
                    order = "planned" if batch >= self.moved_at else "1F1B"
                    smoothed = self.profile(batch, halves=True)
                    writer.profile(self.profile(batch), smoothed, order=order, speeds=None, pinned=())
                if batch + 1 == self.moved_at:
                    writer.moved(self.event())
                writer.batch(batch, 2.0 - 0.01 * batch, self.profile(batch).stages[0].batch_s)
        writer.close()
        return writer
