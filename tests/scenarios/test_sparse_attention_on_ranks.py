"""Hash-sparse attention on several ranks: moving layers changes no bit, hashes and counts travel."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.gpt import GPTConfig
from tests.matrix import mostly
from tests.scenarios.exactness import Job, assert_same_bits

SETTINGS: dict[str, Any] = {"batches": (1, 3, 6), "buckets": (4, 8, 4), "blocks": (0.5, 1.0, 1.0)}
SEPARATE = {**SETTINGS, "hashing": "separate", "redraw_every": 2}


@pytest.mark.parametrize(
    ("job", "ranks"),
    mostly(
        [
            pytest.param(Job("sparse_attention", SETTINGS), 2, id="shared-PP2"),
            pytest.param(Job("sparse_attention", SEPARATE, stages=3), 3, id="separate-PP3"),
            pytest.param(Job("sparse_attention", {**SETTINGS, "redraw_every": 1}, stages=4), 4, id="shared-PP4"),
            pytest.param(Job("sparse_attention", SETTINGS, optimizer="zero1_adamw"), 4, id="shared-zero1-PP2xDP2"),
            pytest.param(Job("sparse_attention", SEPARATE, optimizer="bf16_zero1"), 2, id="separate-bf16-PP2"),
        ],
        ["separate-PP3", "shared-zero1-PP2xDP2"],
    ),
)
def test_same_bits_whatever_the_partition(job: Job, ranks: int) -> None:
    """Losses, weights and counted pairs; buckets follow the schedule, and layers differ."""
    reports = assert_same_bits(job, ranks).reports
    assert [report["buckets by block"] for report in reports] == [
        [1] * 4, [4, 4, 1, 1], [4, 4, 1, 1], [8] * 4, [8] * 4, [8] * 4, [4] * 4, [4] * 4,
    ]  # fmt: skip
    replicas = ranks // job.stages
    dense = replicas * 3 * 2 * 2 * 16 * 17 // 2
    assert reports[0]["pairs by block"] == [dense] * 4
    for report in reports[3:]:
        assert max(report["pairs by block"]) < 0.9 * dense
        assert len(set(report["pairs by block"])) > 1


def test_the_loss_falls_on_text() -> None:
    """With all blocks sparse from the start; moving layers changes nothing here either."""
    model = GPTConfig(depth=2, hidden=32, heads=2, seq_len=64, positions="rotary")
    settings = {"batches": (0,), "buckets": (4,), "blocks": (1.0,)}
    losses = assert_same_bits(Job("sparse_attention", settings, model=model, text=True, num_batches=16), 2).losses
    assert sum(losses[-3:]) / 3 < losses[0] - 0.3
