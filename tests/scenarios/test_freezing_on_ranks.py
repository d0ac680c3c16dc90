"""Freezing on several ranks: moving layers changes no bit, and all ranks freeze alike."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scenarios.freezing import FreezingScenario
from scenarios.gpt import GPTConfig
from scenarios.settings import RunSettings, Settings, load_deepspeed_json, merge
from tests.distributed.ranks import run_ranks

MODEL = GPTConfig(depth=4, hidden=16, heads=2, seq_len=12, vocab_size=64)
SMALL_BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
NUM_BATCHES = 12

# Less than a stage, all of the first stage, more than that, and back to nothing.
SCHEDULE = ("freezing", {"batches": [2, 4, 6, 8, 10], "frozen": [1, 3, 5, 2, 0]})
EAGER = ("freezing_egeria", {
    "first_batch": 1, "evaluate_every": 1, "window": 2, "tolerance": 0.9, "patience": 1,
})  # fmt: skip
MOVES = {
    2: {1: (0, 1, 6), 3: (0, 5, 6), 5: (0, 3, 6), 7: (0, 4, 6), 8: (0, 2, 6), 9: (0, 5, 6)},
    3: {1: (0, 1, 2, 6), 3: (0, 4, 5, 6), 5: (0, 2, 4, 6), 7: (0, 1, 5, 6), 9: (0, 3, 5, 6)},
}


def train(
    _rank: int, scenario: tuple[str, dict[str, Any]], optimizer: str, stages: int, moves: bool
) -> tuple[list[float], list[int], list[dict[int, str]]]:
    """Train, and give back losses, frozen layers and this rank's weights after every batch."""
    from scenarios.compare import build_contender

    settings = Settings(
        model=MODEL, scenario=scenario[0], scenario_settings=scenario[1], data_path=None,
        data_dtype=None, deepspeed=merge(load_deepspeed_json(optimizer), SMALL_BATCH),
        partition_method="uniform", run=RunSettings(num_stages=stages), seed=5, output_dir=Path(),
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(MODEL.vocab_size, size=5000).astype(np.uint8)
    run = build_contender(settings, tokens, dynamic=False)
    assert isinstance(run.scenario, FreezingScenario)
    frozen, weights = [], []
    for batch in range(NUM_BATCHES):
        if moves and batch in MOVES[stages]:
            run.engine.repartition(MOVES[stages][batch])
        list(run.train_window([batch], timed=True))
        frozen.append(run.scenario.num_frozen)
        weights.append(hashes(run.engine))
    return run.losses, frozen, weights


def hashes(engine: Any) -> dict[int, str]:
    """Hash the weights of every local layer."""
    found = {}
    for index, layer in engine.local_layers().items():
        tensors = [p.detach().float().numpy().tobytes() for p in layer.parameters()]
        found[index] = hashlib.sha256(b"".join(tensors)).hexdigest()
    return found


def merged(results: list[Any]) -> list[list[tuple[int, str]]]:
    """Put the layers of all ranks together; replicas must agree."""
    batches = []
    for batch in range(NUM_BATCHES):
        every = {(i, h) for rank in results for i, h in rank[2][batch].items()}
        assert sorted(i for i, _ in every) == list(range(6)), "replicas have different weights"
        batches.append(sorted(every))
    return batches


@pytest.mark.parametrize(
    ("scenario", "optimizer", "stages", "ranks"),
    [
        pytest.param(SCHEDULE, "fp32_adamw", 3, 3, id="schedule-fp32-PP3"),
        pytest.param(SCHEDULE, "zero1_adamw", 2, 4, id="schedule-zero1-PP2xDP2"),
        pytest.param(SCHEDULE, "bf16_zero1", 2, 2, id="schedule-bf16-PP2"),
        pytest.param(EAGER, "fp32_adamw", 2, 2, id="egeria-fp32-PP2"),
        pytest.param(EAGER, "zero1_adamw", 2, 4, id="egeria-zero1-PP2xDP2"),
    ],
)
def test_same_bits_whatever_the_partition(
    scenario: tuple[str, dict[str, Any]], optimizer: str, stages: int, ranks: int
) -> None:
    """Losses, decisions and weights; frozen layers keep their bits; all ranks decide alike."""
    static = run_ranks(train, ranks, scenario, optimizer, stages, False)
    moved = run_ranks(train, ranks, scenario, optimizer, stages, True)
    for results in (static, moved):
        assert all(rank[:2] == static[0][:2] for rank in results)
    weights = merged(static)
    assert merged(moved) == weights
    losses, frozen, _ = static[0]
    assert all(torch.isfinite(torch.tensor(losses)))
    assert max(frozen) >= 3, "the first stage froze altogether"
    for batch in range(1, NUM_BATCHES):
        # A schedule freezes before the batch, a rule that measures after it.
        held = frozen[batch - (scenario is EAGER)]
        same = [old == new for old, new in zip(weights[batch - 1], weights[batch], strict=True)]
        assert same == [index < held for index in range(6)]
