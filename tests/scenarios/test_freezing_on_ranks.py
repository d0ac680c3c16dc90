"""Freezing on several ranks: moving layers changes no bit, and all ranks freeze alike."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from scenarios.freezing import AutoFreeze, EgeriaFreezing, ScheduledFreezing
from scenarios.scenario import gather_by_layer
from tests.scenarios.exactness import Job, assert_same_bits

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
    [
        pytest.param(job(Scheduled, SCHEDULE, "bf16_zero1", 2), 2, id="schedule-bf16-PP2"),
        pytest.param(job(Scheduled, SCHEDULE, "fp32_adamw", 3), 3, id="schedule-fp32-PP3"),
        pytest.param(job(Scheduled, SCHEDULE, "fp32_adamw", 4), 4, id="schedule-fp32-PP4"),
        pytest.param(job(Scheduled, SCHEDULE, "zero1_adamw", 2), 4, id="schedule-zero1-PP2xDP2"),
        pytest.param(job(Egeria, EAGER, "fp32_adamw", 2), 2, id="egeria-fp32-PP2"),
        pytest.param(job(Egeria, EAGER | {"reference_bits": 8}, "fp32_adamw", 4), 4, id="egeria-int8-fp32-PP4"),
        pytest.param(job(Egeria, EAGER, "zero1_adamw", 2), 4, id="egeria-zero1-PP2xDP2"),
        pytest.param(job(Auto, AUTO, "bf16_zero1", 2), 2, id="autofreeze-bf16-PP2"),
        pytest.param(job(Auto, AUTO, "fp32_adamw", 3), 3, id="autofreeze-fp32-PP3"),
        pytest.param(job(Auto, AUTO, "fp32_adamw", 4), 4, id="autofreeze-fp32-PP4"),
        pytest.param(job(Auto, AUTO, "zero1_adamw", 2), 4, id="autofreeze-zero1-PP2xDP2"),
    ],
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
