"""Freezing on several ranks: moving layers changes no bit, and all ranks freeze alike."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from scenarios.freezing import AutoFreeze, EgeriaFreezing, ScheduledFreezing
from scenarios.scenario import gather_by_layer
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly
from tests.scenarios.exactness import MODEL, Job, Trained, assert_same_bits, train

NUM_BATCHES = 10


class Hashed:
    """Reports a hash of every layer's weights after every batch."""

    def report(self, engine: Any) -> dict[str, Any]:
        """Add to the report what replicas must agree on: their hashes, and the sum of them."""
        own = {index: hash_weights(layer) for index, layer in engine.local_layers().items()}
        replicas = engine.mpu.get_data_parallel_world_size()
        means = (gather_by_layer(engine, {index: (value,) for index, value in own.items()}, 1) / replicas)[:, 0]
        assert all(means[index] == value for index, value in own.items()), "replicas have different weights"
        return {**super().report(engine), "weights": means.tolist(), "frozen": self.num_frozen}


def hash_weights(layer: Any) -> int:
    """Hash a layer's weights into 40 bits, which a float64 holds exactly."""
    tensors = [p.detach().float().cpu().numpy().tobytes() for p in layer.parameters()]
    return int.from_bytes(hashlib.sha256(b"".join(tensors)).digest()[:5], "big")


class Scheduled(Hashed, ScheduledFreezing):
    """By a schedule."""


class Egeria(Hashed, EgeriaFreezing):
    """By plasticity."""


class Auto(Hashed, AutoFreeze):
    """By gradient norms."""


# Less than a stage, all of the first stage, more than that, and back to nothing.
SCHEDULE = {"batches": [1, 3, 5, 7, 9], "frozen": [1, 3, 5, 2, 0]}
EAGER = {"first_batch": 1, "evaluate_every": 1, "window": 2, "tolerance": 0.9, "patience": 1}
AUTO = {"first_batch": 1, "evaluate_every": 1, "percentile": 95.0}


def job(rule: type, settings: dict[str, Any], optimizer: str, stages: int) -> Job:
    """Moves before every second batch."""
    name = f"{__name__}:{rule.__name__}"
    return Job(name, settings, stages=stages, optimizer=optimizer, num_batches=NUM_BATCHES)


@pytest.mark.parametrize(
    ("job", "ranks"),
    mostly(
        [
            pytest.param(job(Scheduled, SCHEDULE, "bf16_zero1", 2), 2, id="schedule-bf16-PP2"),
            pytest.param(job(Scheduled, SCHEDULE, "fp32_adamw", 3), 3, id="schedule-fp32-PP3"),
            pytest.param(job(Scheduled, SCHEDULE, "fp32_adamw", 4), 4, id="schedule-fp32-PP4"),
            pytest.param(job(Scheduled, SCHEDULE, "zero1_adamw", 2), 4, id="schedule-zero1-PP2xDP2"),
            pytest.param(job(Egeria, EAGER | {"reference_bits": 8}, "fp32_adamw", 2), 2, id="egeria-int8-fp32-PP2"),
            pytest.param(job(Egeria, EAGER, "fp32_adamw", 4), 4, id="egeria-fp32-PP4"),
            pytest.param(job(Egeria, EAGER, "zero1_adamw", 2), 4, id="egeria-zero1-PP2xDP2"),
            pytest.param(job(Auto, AUTO, "bf16_zero1", 2), 2, id="autofreeze-bf16-PP2"),
            pytest.param(job(Auto, AUTO, "fp32_adamw", 3), 3, id="autofreeze-fp32-PP3"),
            pytest.param(job(Auto, AUTO, "fp32_adamw", 4), 4, id="autofreeze-fp32-PP4"),
            pytest.param(job(Auto, AUTO, "zero1_adamw", 2), 4, id="autofreeze-zero1-PP2xDP2"),
        ],
        ["schedule-zero1-PP2xDP2", "egeria-int8-fp32-PP2", "autofreeze-fp32-PP3"],
    ),
)
def test_same_bits_whatever_the_partition(job: Job, ranks: int) -> None:
    """Losses, decisions and weights; frozen layers keep their bits; all ranks decide alike."""
    reports = assert_same_bits(job, ranks).reports
    frozen = [report["frozen"] for report in reports]
    assert max(frozen) >= 3, "the first stage froze altogether"
    for batch in range(1, NUM_BATCHES):
        # A schedule freezes before the batch, a rule that measures after it.
        held = frozen[batch - (not job.scenario.endswith("Scheduled"))]
        pairs = zip(reports[batch - 1]["weights"], reports[batch]["weights"], strict=True)
        assert [old == new for old, new in pairs] == [index < held for index in range(6)]


# Two batches that come in turns. Cached from batch 3 on; grown at 5; begun anew at 9.
CACHED = {"batches": [1, 5, 9], "frozen": [2, 4, 1], "cache": True}


def train_with_cache(_rank: int, job: Job) -> tuple[Trained, Trained]:
    """Train without a cache and moves, and with both."""
    plain = replace(job, settings={**job.settings, "cache": False})
    return train(plain, moves=False), train(job, moves=True)


@pytest.mark.parametrize(
    ("optimizer", "stages", "ranks"),
    mostly(
        [
            pytest.param("bf16_zero1", 2, 2, id="bf16-PP2"),
            pytest.param("fp32_adamw", 4, 4, id="fp32-PP4"),
            pytest.param("zero1_adamw", 2, 4, id="zero1-PP2xDP2"),
        ],
        ["zero1-PP2xDP2"],
    ),
)
def test_a_cache_changes_no_bit(optimizer: str, stages: int, ranks: int) -> None:
    """Losses, weights and optimizer state as without a cache and without moves; every rank skips alike."""
    num_tokens = 2 * 6 * (ranks // stages) * 16 + 1
    job = Job(
        "freezing", CACHED, stages=stages, optimizer=optimizer, num_batches=12, max_tokens=num_tokens, shuffle="once"
    )
    results = run_ranks(train_with_cache, ranks, job)
    layers = [{item for rank in results for item in rank[run].layers.items()} for run in (0, 1)]
    assert layers[0] == layers[1]
    for plain, cached in results:
        assert cached.losses == plain.losses
        skipped = [report["layers from cache"] for report in cached.reports]
        assert skipped == [0, 0, 0, 2, 2, 2, 2, 4, 4, 0, 0, 1]


def test_the_loss_falls_on_real_text() -> None:
    """Also with most of the model frozen half-way."""
    settings = AUTO | {"first_batch": 3}
    text = Job(
        "freezing_autofreeze", settings, model=replace(MODEL, vocab_size=256), num_batches=14, text=True
    )
    found = run_ranks(train_moving, 2, text)[0]
    assert found.losses[-1] < found.losses[0] - 0.05
    assert found.reports[-1]["frozen layers"] == "4 of 6"


def train_moving(_rank: int, job: Job) -> Trained:
    """Train with moves."""
    return train(job, moves=True)
