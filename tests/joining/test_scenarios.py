"""Every scenario on a pipeline that gets longer and shorter in the middle of its dynamism: the same bits as on one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.joining.test_random import assert_nothing_is_left, steps
from tests.matrix import mostly
from tests.scenarios.exactness import Job, Trained, train
from tests.scenarios.sharded_jobs import Seen, build_placed, train_run

PRUNING = {"start_batch": 1, "end_batch": 6, "every": 1, "crossover": 0.6}
FREEZING = {"batches": [1, 3, 5, 7], "frozen": [1, 3, 5, 2]}
EXITS = {"first_exit": 1, "exit_interval": 1, "first_batch": 2, "calibrate_every": 2, "target_share": 0.5,
         "audit_every": 4, "decay": None}  # fmt: skip
EXPERTS = {"every": 1, "num_experts": 4, "routing": "loss_free", "bias_rate": 0.05}
DEPTHS = {"batches": [2, 4, 5], "capacity": [0.5, 0.0, 0.25], "blocks": [0, 2, 3]}
BUCKETS = {"batches": (1, 3, 6), "buckets": (4, 8, 4), "blocks": (0.5, 1.0, 1.0)}
EGERIA = {"first_batch": 1, "evaluate_every": 1, "window": 2, "tolerance": 0.9, "patience": 1}
AUTO = {"first_batch": 1, "evaluate_every": 2, "percentile": 95.0}
JOBS = {
    "pruning": Job("pruning", PRUNING),
    "pruning and Egeria": Job("combined", {"parts": {"pruning": PRUNING, "freezing_egeria": EGERIA}},
                              optimizer="zero1_adamw"),
    "freezing": Job("freezing", FREEZING, optimizer="bf16_zero1"),
    "freezing with a cache": Job("freezing", FREEZING | {"cache": True}, shuffle="once", max_tokens=2 * 6 * 16 + 1),
    "AutoFreeze": Job("freezing_autofreeze", AUTO),
    "early exit": Job("early_exit", EXITS),
    "early exit, ADP-C": Job("early_exit_adpc", EXITS | {"confidence": "probability", "loss_weights": "equal"}),
    "experts": Job("moe", EXPERTS, optimizer="zero1_adamw"),
    "Mixture of Depths": Job("mod", DEPTHS),
    "sparse attention": Job("sparse_attention", BUCKETS, optimizer="bf16_zero1"),
}  # fmt: skip


SHARDED = {
    "static": Job("moe", stages=2, num_batches=7),
    "lanes": Job("moe", stages=2, num_batches=7, optimizer="zero1_adamw"),
    "random": Job("moe", stages=2, num_batches=7, optimizer="bf16_zero1"),
}


def train_job(_rank: int, job: Job) -> Trained:
    """Train on one rank, as long as it stays; the same function is what a newcomer runs."""
    return train(job, moves=False)


def train_sharded(_rank: int, job: Job, placement: str) -> Seen:
    """The same with experts that replicas own."""
    return train_run(build_placed(job, placement), job, moves=False)


def run_both(job: Job, function: Callable[..., Any], *args: Any, replicas: int = 1, come_again: bool = False) -> Any:
    """Run a job that keeps its ranks, and one that is resized; what the first ones knew, and those at the end.

    Args:
        job: with its resizes; the most stages come last if workers come again.
        function: what ranks and newcomers run.
        *args: its further arguments.
        replicas: of each stage.
        come_again: whether a worker that left comes again; else there is a new one for each that joins.
    """
    sizes = [job.stages, *(job.resizes[batch] for batch in sorted(job.resizes))]
    ups = (max(sizes) - 1,) if come_again else (max(0, after - before) for before, after in pairwise(sizes))
    ranks, newcomers = job.stages * replicas, sum(ups) * replicas
    everyone = run_ranks(function, ranks, replace(job, resizes={}), *args)
    found = run_ranks(
        function, ranks, replace(job, joins=True), *args, newcomers=newcomers, come_again=come_again,
        may_leave=range(1, ranks + newcomers),
    )  # fmt: skip
    last = [rank for rank in found if rank is not None]
    assert len(last) == sizes[-1] * replicas and any(rank.first > 0 for rank in last)
    for rank in last:
        assert rank.losses == everyone[0].losses[rank.first :]
        assert rank.reports == everyone[0].reports[rank.first :]
    return everyone, last


def assert_same_bits(job: Job, *, replicas: int = 1, come_again: bool = False) -> Trained:
    """Compare losses, reports, weights and optimizer state of both; what the first rank of the resized one knew."""
    both = run_both(job, train_job, replicas=replicas, come_again=come_again)
    layers = [{item for rank in ranks for item in rank.layers.items()} for ranks in both]
    assert layers[0] == layers[1]
    assert len(layers[0]) == job.model.depth + 2, "replicas have different weights"
    first: Trained = both[1][0]
    return first


@pytest.mark.parametrize("name", mostly(JOBS, ["pruning and Egeria"]))
def test_two_four_one_three(name: str) -> None:
    assert_same_bits(replace(JOBS[name], resizes={2: 4, 4: 1, 6: 3}))


@pytest.mark.exhaustive
def test_experts_that_replicas_share() -> None:
    """All replicas hold all of them, and each computes some."""
    assert_same_bits(replace(JOBS["experts"], resizes={2: 3, 4: 1, 6: 2}), replicas=2)


@pytest.mark.parametrize("placement", mostly(SHARDED, ["random"]))
def test_experts_that_replicas_own(placement: str) -> None:
    """Two replicas, whatever places experts; the groups that share them are made anew with those that join."""
    job = replace(SHARDED[placement], resizes={2: 3, 4: 1, 5: 2})
    everyone, last = run_both(job, train_sharded, placement, replicas=2)
    assert all(seen.layers == everyone[0].layers for seen in (*everyone, *last))


LONG = {
    **JOBS, "pruning": Job("pruning", PRUNING | {"end_batch": 91, "every": 3}),
    "freezing": Job("freezing", {"batches": [10, 30, 50, 70], "frozen": [1, 3, 5, 2]}, optimizer="bf16_zero1"),
}  # fmt: skip


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", mostly(LONG, ["experts"]))
def test_at_random(name: str) -> None:
    """Another number of stages before every batch; a hundred times where the dynamism takes as long. Nothing is left.

    Descriptors, threads and sockets of the first rank are compared, and its memory after the twentieth resize.
    """
    number = 100 if LONG[name] is not JOBS[name] else 8
    resizes = steps(number, seed=len(name))
    first = assert_same_bits(replace(LONG[name], resizes=resizes, num_batches=number + 1), come_again=True)
    assert len(first.held) == number
    assert_nothing_is_left(first.held)
