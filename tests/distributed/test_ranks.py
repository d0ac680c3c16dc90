"""The multi-process helper itself: results come back by rank, and failures name their rank."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import ranks
from tests.distributed.ranks import RankFailure, run_ranks


def total(rank: int, offset: int) -> tuple[int, int]:
    tensor = torch.tensor([rank + offset])
    dist.all_reduce(tensor)
    return rank, int(tensor)


def raise_on_one(rank: int, message: str) -> None:
    if rank == 1:
        raise ValueError(message)
    dist.barrier()


def exit_on_one(rank: int) -> None:
    if rank == 1:
        print("the last words of rank one")
        os._exit(3)
    dist.barrier()


def stick_on_one(rank: int) -> None:
    if rank == 1:
        wait_for_ever()
    dist.barrier()


def wait_for_ever() -> None:
    dist.barrier()  # when the others have answered, this one is here
    time.sleep(600)


def return_a_lock(_rank: int) -> Any:
    import threading

    return threading.Lock()


def fail(function: Any, *args: Any, timeout_s: float = 60) -> str:
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, 3 if function is stick_on_one else 2, *args, timeout_s=timeout_s)
    return str(caught.value)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(total, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_a_rank_that_raises_is_named_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 1.0)
    message = fail(raise_on_one, "no such layer: 9", timeout_s=1e6)
    assert "rank 1: Traceback" in message and "ValueError: no such layer: 9" in message
    assert "in raise_on_one" in message
    assert "did not finish" not in message, "the rank that waits for it is a victim, not a cause"


def test_a_rank_that_exits_is_named_with_its_last_words() -> None:
    message = fail(exit_on_one)
    assert "rank 1: died with exit code 3" in message and "the last words of rank one" in message


def test_a_stuck_rank_is_named_with_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_for_all_but_one(pipes: Any, timeout: float) -> Any:
        return wait(pipes, timeout if len(pipes) == 1 else 240)

    monkeypatch.setattr(ranks, "wait", wait_for_all_but_one)
    message = fail(stick_on_one, timeout_s=1)
    assert "rank 1 did not finish in time" in message and "wait_for_ever" in message
    assert "rank 0" not in message and "rank 2" not in message


def test_a_result_that_cannot_travel_is_an_error_of_its_rank() -> None:
    assert "cannot pickle" in fail(return_a_lock)


def stop_one(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return rank


def test_nobody_waits_for_a_stopped_rank_that_may_die() -> None:
    assert run_ranks(stop_one, 2, may_die={1}, timeout_s=1e6) == [0, None]


def answer_late(rank: int) -> int:
    time.sleep(2.0 * rank)
    return rank


def test_a_rank_that_may_die_and_lives_is_waited_for() -> None:
    assert run_ranks(answer_late, 2, may_die={1}) == [0, 1]
