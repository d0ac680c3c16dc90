"""Mixture of Depths on several ranks: moving layers changes no bit, whatever the cut, and the loss falls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.matrix import mostly
from tests.scenarios.exactness import MODEL, Job, assert_same_bits

# Full capacity, less, nothing at all, and some again.
CHANGING = {"batches": [2, 4, 5], "capacity": [0.5, 0.0, 0.25], "blocks": [0, 2, 3]}
OVER = {"parts": {"adding": {"name": "tests.scenarios.routed_fakes:Adding"}, "mod": CHANGING}}
EXPERTS = {"num_experts": 4, "every": 1, "dense_blocks": 2}  # shared by replicas, inside blocks 2 and 3
OVER_EXPERTS = {"parts": {"moe": EXPERTS, "mod": CHANGING}}
ROTARY = replace(MODEL, positions="rotary", dropout=0.1)


@pytest.mark.parametrize(
    ("job", "ranks"),
    mostly(
        [
            pytest.param(Job("mod", CHANGING, stages=2, model=ROTARY), 2, id="rotary-dropout-PP2"),
            pytest.param(Job("mod_moe", OVER, stages=3, every=1), 3, id="adding-to-the-loss-PP3"),
            pytest.param(Job("mod", CHANGING, stages=4), 4, id="PP4"),
            pytest.param(Job("mod_moe", OVER_EXPERTS, stages=2, optimizer="zero1_adamw"), 4, id="experts-PP2xDP2"),
            pytest.param(Job("mod", CHANGING, stages=2, optimizer="bf16_zero1"), 2, id="bf16-PP2"),
        ],
        ["rotary-dropout-PP2", "adding-to-the-loss-PP3", "experts-PP2xDP2"],
    ),
)
def test_same_bits_whatever_the_partition(job: Job, ranks: int) -> None:
    """Losses, reports, weights and optimizer state, while the capacity changes."""
    reports = assert_same_bits(job, ranks).reports
    shares = [report["share of tokens computed by layer"] for report in reports]
    for batch, share in enumerate([1, 1, 0.5, 0.5, 0, 0.25, 0.25, 0.25]):
        assert shares[batch] == [1, share, 1, share, share, 1]
    accuracy: list[Any] = [report["predictor accuracy by layer"][3] for report in reports]
    assert [value is None for value in accuracy] == [True, True, False, False, True, False, False, False]


def test_the_loss_falls_on_real_text() -> None:
    """Of a model whose later blocks are routed."""
    model = replace(MODEL, hidden=32, seq_len=32, vocab_size=256)
    settings = {"blocks": "later_half", "capacity": [0.25], "batches": [4]}
    losses = assert_same_bits(Job("mod", settings, model=model, num_batches=30, every=6, text=True), 2).losses
    assert sum(losses[-3:]) / 3 < losses[0] - 0.8
