"""A rank fails in a batch of shared experts: all ranks drop it within seconds, and nothing of it is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds import RankLostError
from dynpipe_ds.host.passing import BatchRefused
from scenarios.gpt import Attention
from scenarios.moe import MoEMLP
from scenarios.moe.sharded import products
from tests.distributed.ranks import run_ranks
from tests.faults.points import kill
from tests.matrix import mostly
from tests.scenarios.exactness import Job
from tests.scenarios.sharded_jobs import Seen, build_placed, seen_of

WITHIN_S = 20.0
"""Far below any limit of a collective; a batch of these takes less than a second."""


@contextmanager
def nth_call(owner: Any, name: str, number: int) -> Iterator[None]:
    """Let the n-th call of a function on this rank raise."""
    original, calls = getattr(owner, name), count(1)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("no room on this device")
        return original(*args, **kwargs)

    with patch.object(owner, name, fail):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "before the first exchange": lambda: nth_call(Attention, "forward", 1),
    "between two layers": lambda: nth_call(Attention, "forward", 4),
    "between rows and answers": lambda: nth_call(MoEMLP, "run_lanes", 3),
    "in the backward of lanes": lambda: nth_call(products._Mlp, "backward", 2),
    "in the last gradients of weights": lambda: nth_call(products._Mlp, "backward", 6),
    "while sums go home": lambda: nth_call(MoEMLP, "finish_gradients", 2),
}


def train_failing(rank: int, job: Job, fault: str | None, victim: int, evaluates: bool = False) -> tuple[Seen, float]:
    run, took_s = build_placed(job, "random"), 0.0
    for batch in range(job.num_batches):
        if batch == 2 and fault is not None:
            began = time.monotonic()
            with FAULTS[fault]() if rank == victim else nullcontext(), pytest.raises(BatchRefused) as caught:
                if evaluates:
                    run.engine.eval_batch(run.data.micro_batches(7))
                else:
                    list(run.train_window([batch], timed=False))
            took_s = time.monotonic() - began
            assert "batch was dropped" in str(caught.value)
        list(run.train_window([batch], timed=False))
    sharing = run.scenario._balancing._sharing
    assert sharing.sum_bytes == 0 and not sharing._states, "nothing is kept between batches"
    return seen_of(run), took_s


JOB = Job("moe", {"num_experts": 8}, num_batches=4)
CASES = {f"{fault}, rank {victim}": (fault, victim) for fault in FAULTS for victim in (0, 3)}


@pytest.mark.parametrize("case", mostly(CASES, ["between rows and answers, rank 3"]))
def test_the_batch_is_dropped_and_the_next_one_has_the_same_bits(case: str) -> None:
    fault, victim = CASES[case]
    found, plain = (run_ranks(train_failing, 4, JOB, what, victim, timeout_s=60) for what in (fault, None))
    for (seen, took_s), (reference, _) in zip(found, plain, strict=True):
        assert seen.losses == reference.losses and seen.layers == reference.layers
        assert took_s < WITHIN_S


def test_in_evaluation() -> None:
    evaluating = partial(run_ranks, train_failing, 4, JOB, timeout_s=60)
    found, plain = evaluating("between rows and answers", 1, True), evaluating(None, 1, True)
    assert [seen.layers for seen, _ in found] == [seen.layers for seen, _ in plain]


# -- a rank that is lost --------------------------------------------------------------------------


def losing(rank: int, victim: int, note: str) -> str:
    """What this rank says; the victim is killed in its second batch, while its partners wait for rows."""
    run, ends = build_placed(JOB, "random"), partial(kill, note)
    list(run.train_window([0], timed=False))
    original = MoEMLP.run_lanes

    def run_lanes(self: Any, *args: Any) -> Any:
        if rank == victim:
            ends()
        return original(self, *args)

    with patch.object(MoEMLP, "run_lanes", run_lanes), pytest.raises(RankLostError) as caught:
        list(run.train_window([1], timed=False))
    return str(caught.value)


def test_a_rank_that_is_lost_is_named(tmp_path: Path) -> None:
    found = run_ranks(losing, 4, 2, str(tmp_path / "note"), may_die={2}, timeout_s=100)
    assert found[2] is None
    assert all(text.startswith("rank 2 ended while batch 1 was trained") for text in found if text is not None)
