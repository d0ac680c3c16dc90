"""Scenarios in orders that split the backward, another one in every batch: the bits are those of 1F1B."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import Way, counting_splits, order_for_of
from tests.scenarios import exactness
from tests.scenarios.exactness import Job, Trained, build, train
from tests.scenarios.test_early_exit_on_ranks import CALM
from tests.scenarios.test_freezing_on_ranks import EAGER
from tests.scenarios.test_mod_on_ranks import CHANGING
from tests.scenarios.test_moe_on_ranks import EVERY
from tests.scenarios.test_pruning_on_ranks import BLOCKS, SCHEDULE
from tests.scenarios.test_sparse_attention_on_ranks import SEPARATE

FREEZING = {"batches": [1, 3, 4], "frozen": [1, 3, 4]}
LATER_FREEZING = {"batches": [2, 5], "frozen": [3, 1]}
LOSS_FREE = {**EVERY, "routing": "loss_free", "bias_rate": 0.05}

JOBS: dict[str, tuple[Job, int]] = {
    "none": (Job("none"), 2),
    "freezing": (Job("freezing", FREEZING), 2),
    "pruning": (Job("pruning", SCHEDULE), 2),
    "moe": (Job("moe", {**EVERY, "capacity_factor": 0.75}), 2),
    "mod": (Job("mod", CHANGING), 2),
    "sparse_attention": (Job("sparse_attention", SEPARATE), 2),
    "early_exit": (Job("early_exit", CALM), 2),
}
MORE: dict[str, tuple[Job, int]] = {
    "freezing-bf16-PP3": (Job("freezing", LATER_FREEZING, stages=3, optimizer="bf16_zero1"), 3),
    "freezing-zero1-PP2xDP2": (Job("freezing", FREEZING, optimizer="zero1_adamw"), 4),
    "egeria-PP3": (Job("tests.scenarios.test_freezing_on_ranks:Egeria", EAGER, stages=3), 3),
    "pruning-blocks-PP3": (Job("pruning", BLOCKS, stages=3, optimizer="bf16_zero1"), 3),
    "moe-shared-PP2xDP2": (Job("moe", LOSS_FREE), 4),
    "moe-shared-zero1-PP2xDP2": (Job("moe", EVERY, optimizer="zero1_adamw"), 4),
    "mod-PP4": (Job("mod", CHANGING, stages=4), 4),
    "sparse_attention-PP3": (Job("sparse_attention", SEPARATE, stages=3, optimizer="zero1_adamw"), 3),
    "early_exit-PP4": (Job("early_exit", CALM, stages=4), 4),
    "early_exit-bf16": (Job("early_exit", CALM, optimizer="bf16_zero1"), 2),
}


@contextmanager
def ordered(way: Way) -> Iterator[None]:
    """Inside, runs are built with an order."""

    def built(job: Job) -> Any:
        run = build(job)
        run.engine.dynamic.pipeline.order_for = order_for_of(way)
        return run

    with patch.object(exactness, "build", built):
        yield


def train_each(_rank: int, jobs: dict[str, Job], ways: list[Way]) -> dict[str, list[tuple[Trained, int]]]:
    """Each job in each way, with moves, and how many backwards were split."""
    found: dict[str, list[tuple[Trained, int]]] = {}
    for name, job in jobs.items():
        for way in ways:
            with ordered(way), counting_splits() as split:
                found.setdefault(name, []).append((train(job, moves=True), len(split)))
    return found


def compare(jobs: dict[str, tuple[Job, int]], ways: list[Way], num_ranks: int) -> None:
    asked = {name: job for name, (job, ranks) in jobs.items() if ranks == num_ranks}
    ranks = run_ranks(train_each, num_ranks, asked, [None, *ways], timeout_s=200)
    for rank, found in enumerate(ranks):
        for name, ((plain, none), *others) in found.items():
            assert none == 0 and len(plain.layers) > 0
            for way, (other, split) in zip(ways, others, strict=True):
                assert other == plain, f"{name}, rank {rank}, W: {way}"
                assert split > 0 or rank < num_ranks - 1, f"{name}: the last stage splits"


def test_the_bits_are_those_of_1f1b() -> None:
    """The six scenarios and none, in one world."""
    compare({name: (replace(job, num_batches=4), ranks) for name, (job, ranks) in JOBS.items()}, ["planned"], 2)


@pytest.mark.exhaustive
def test_the_bits_are_those_of_1f1b_in_more_orders() -> None:
    compare(JOBS, [0, 2, "planned"], 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_the_bits_are_those_of_1f1b_in_more_settings(name: str) -> None:
    compare({name: MORE[name]}, [1, "planned"], MORE[name][1])
