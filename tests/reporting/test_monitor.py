"""What DeepSpeed's monitor is told of a batch."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile
from dynpipe_ds.reporting.monitor import write_profile


class Monitor:
    """Keeps what it is told."""

    enabled = True

    def __init__(self) -> None:
        self.told: list[tuple[str, float, int]] = []

    def write_events(self, events: list[tuple[str, float, int]]) -> None:
        """Keep them."""
        self.told += events


@pytest.mark.parametrize(("rank", "has_planned_order"), [(0, True), (0, False), (1, True)])
def test_figures_of_a_batch(rank: int, has_planned_order: bool) -> None:
    layer = LayerProfile("l", 1.0, 2.0, 1, 4, 4, 8, 16)
    profile = PipelineProfile(3, (0, 1, 2), 4, (layer, layer), (
        StageProfile(3.0, 1.0, 0.0, 0.0, 4.0, 0), StageProfile(1.0, 3.0, 0.0, 0.0, 4.0, 0),
    ))  # fmt: skip
    monitor = Monitor()
    with patch("torch.distributed.get_rank", return_value=rank):
        write_profile(monitor, profile, 64, has_planned_order=has_planned_order)
    busy_s = {"stage_0_busy_s": 3.0, "stage_1_busy_s": 1.0}
    expected = {"bubble_ratio": 0.5, "imbalance": 1.0, "planned_order": float(has_planned_order), **busy_s}
    assert monitor.told == ([] if rank else [(f"Train/DynamicPipeline/{k}", v, 64) for k, v in expected.items()])
