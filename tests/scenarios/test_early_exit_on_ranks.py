"""Early exit on several ranks: moving layers changes no bit while tokens leave."""

from __future__ import annotations

from typing import Any

import pytest

from scenarios.gpt import GPTConfig
from tests.matrix import mostly
from tests.scenarios.exactness import Job, Trained, assert_same_bits

EAGER = {"first_exit": 1, "exit_interval": 1, "first_batch": 2, "calibrate_every": 2, "target_share": 0.5,
         "audit_every": 4, "decay": None}  # fmt: skip
CALM = EAGER | {"left_tokens": "visible", "confidence": "classifier"}
SURE = EAGER | {"calibrate": "consistency", "max_differing": 1.0}
ADPC = EAGER | {"confidence": "probability", "loss_weights": "equal"}


def assert_tokens_left(trained: Trained, first_batch: int = 2) -> None:
    """All tokens are computed at first, fewer and fewer from block to block later."""
    computed = [report["tokens computed in block"] for report in trained.reports]
    assert all(len(set(tokens)) == 1 for tokens in computed[:first_batch])
    assert all(tokens[0] > tokens[-1] for tokens in computed[first_batch:])
    for report in trained.reports:
        tokens = report["tokens computed in block"]
        left = report["tokens left after block"]
        assert all(a - gone == b for a, gone, b in zip(tokens, left, tokens[1:], strict=False))


@pytest.mark.parametrize(
    ("settings", "optimizer", "stages", "ranks"),
    mostly(
        [
            pytest.param(CALM, "fp32_adamw", 2, 2, id="calm-fp32-PP2"),
            pytest.param(SURE, "fp32_adamw", 3, 3, id="consistency-fp32-PP3"),
            pytest.param(ADPC, "fp32_adamw", 4, 4, id="adpc-fp32-PP4"),
            pytest.param(EAGER | {"confidence": "state"}, "zero1_adamw", 2, 4, id="state-zero1-PP2xDP2"),
            pytest.param(CALM, "bf16_zero1", 2, 2, id="calm-bf16-zero1-PP2"),
        ],
        ["consistency-fp32-PP3", "state-zero1-PP2xDP2"],
    ),
)
def test_same_bits_whatever_the_partition(settings: dict[str, Any], optimizer: str, stages: int, ranks: int) -> None:
    """Losses, thresholds, who left, weights, buffers and optimizer state."""
    assert_tokens_left(assert_same_bits(Job("early_exit", settings, stages=stages, optimizer=optimizer), ranks))


def test_the_loss_falls_on_real_text() -> None:
    """Also while tokens leave."""
    model = GPTConfig(depth=4, hidden=32, heads=2, seq_len=32, vocab_size=256)
    job = Job("early_exit", EAGER, model=model, num_batches=14, text=True)
    trained = assert_same_bits(job, ranks=2)
    assert_tokens_left(trained)
    assert trained.losses[-1] < trained.losses[2] - 0.2 < trained.losses[0]
