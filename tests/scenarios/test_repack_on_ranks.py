"""Every scenario re-packed in the middle of its dynamism: the same bits as with all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.ranks import run_ranks
from tests.scenarios.exactness import Job, Trained, train

PRUNING = {"start_batch": 1, "end_batch": 5, "every": 1, "crossover": 0.6}
FREEZING = {"batches": [1, 3, 5, 7], "frozen": [1, 3, 5, 2]}
EXITS = {"first_exit": 1, "exit_interval": 1, "first_batch": 2, "calibrate_every": 2, "target_share": 0.5,
         "audit_every": 4, "decay": None}  # fmt: skip
EXPERTS = {"every": 1, "num_experts": 4, "routing": "loss_free", "bias_rate": 0.05}
DEPTHS = {"batches": [2, 4, 5], "capacity": [0.5, 0.0, 0.25], "blocks": [0, 2, 3]}
BUCKETS = {"batches": (1, 3, 6), "buckets": (4, 8, 4), "blocks": (0.5, 1.0, 1.0)}
BOTH = {"parts": {"pruning": PRUNING, "freezing": FREEZING}}
JOBS = {
    "pruning and freezing": Job("pruning_freezing", BOTH, stages=3, optimizer="zero1_adamw", resizes={3: 2, 6: 1}),
    "experts shared by replicas": Job("moe", EXPERTS, stages=2, resizes={4: 1}),
    "pruning": Job("pruning", PRUNING, stages=4, resizes={2: 3, 4: 2, 6: 1}),
    "freezing": Job("freezing", FREEZING, stages=3, optimizer="bf16_zero1", resizes={4: 2, 6: 1}),
    "early exit": Job("early_exit", EXITS, stages=3, resizes={3: 2, 5: 1}),
    "early exit, ADP-C": Job("early_exit_adpc", EXITS | {"confidence": "probability", "loss_weights": "equal"},
                             stages=3, resizes={3: 2, 5: 1}),
    "experts": Job("moe", EXPERTS, stages=3, optimizer="zero1_adamw", resizes={3: 2, 5: 1}),
    "Mixture of Depths": Job("mod", DEPTHS, stages=3, resizes={3: 2, 5: 1}),
    "sparse attention": Job("sparse_attention", BUCKETS, stages=3, optimizer="bf16_zero1", resizes={2: 2, 5: 1}),
    "Egeria": Job("freezing_egeria", {"first_batch": 1, "evaluate_every": 1, "window": 2, "tolerance": 0.9,
                  "patience": 1}, stages=3, resizes={3: 2, 5: 1}),
    "AutoFreeze": Job("freezing_autofreeze", {"first_batch": 1, "evaluate_every": 1, "percentile": 95.0},
                      stages=3, resizes={3: 2, 5: 1}),
}  # fmt: skip
QUICK = ("pruning and freezing", "experts shared by replicas")


def train_job(_rank: int, job: Job) -> Trained:
    """Train on one rank, as long as it stays."""
    return train(job, moves=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in JOBS]
)
def test_same_bits_on_fewer_ranks(name: str) -> None:
    """Losses, reports, weights and optimizer state."""
    job = JOBS[name]
    ranks = 4 if name == "experts shared by replicas" else job.stages
    everyone = run_ranks(train_job, ranks, replace(job, resizes={}))
    shrunk = run_ranks(train_job, ranks, job, may_leave=range(1, ranks))
    survivors = [rank for rank in shrunk if rank is not None]
    assert len(survivors) == ranks // job.stages
    for survivor in survivors:
        assert survivor.losses == everyone[0].losses
        assert survivor.reports == everyone[0].reports
    layers = [{item for rank in runs for item in rank.layers.items()} for runs in (everyone, survivors)]
    assert layers[0] == layers[1]
