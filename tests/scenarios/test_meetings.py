"""Meetings before exchanges, and the thread beside a batch: who gives up, what is late, what raises."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from scenarios.moe.sharded.meetings import Meetings, PartnerGaveUpError
from scenarios.moe.sharded.relay import Relay
from tests.distributed.ranks import run_ranks


def meet(rank: int) -> None:
    """Ranks give up one after the other, at different places; after each batch all are together again."""
    meetings, num_ranks = Meetings(dist.group.WORLD, 3), dist.get_world_size()
    for number in range(2 * num_ranks):
        assert meetings.meet(7, [rank, number]) == [[other, number] for other in range(num_ranks)]
        if number % num_ranks == rank:
            meetings.give_up()
            meetings.give_up()  # is no second one
            with pytest.raises(PartnerGaveUpError, match="has given the batch up"):
                meetings.meet(7)
        elif number % 2:  # the others come to their next meeting in the batch, or when it is dropped
            with pytest.raises(PartnerGaveUpError, match=f"rank {number % num_ranks} of those that share experts"):
                meetings.meet(7, [rank])
            meetings.give_up()  # as whoever is told does
        meetings.reopen()
    everyone_gives_up(meetings)
    if rank == 0:
        expected = pytest.raises(RuntimeError, match=r"came for different things: \[1, 2, 2\]")
    else:
        expected = pytest.raises(RuntimeError, match="came for different things")
    with expected:
        meetings.meet(1 if rank == 0 else 2)


def everyone_gives_up(meetings: Meetings) -> None:
    meetings.give_up()
    meetings.reopen()
    meetings.reopen()  # a batch that is dropped for a reason of its own
    assert not meetings.is_closed and meetings.meet(1) == [[]] * dist.get_world_size()


def test_a_rank_that_gives_up_is_waited_for_by_nobody() -> None:
    run_ranks(meet, 3, timeout_s=60)


def test_jobs_run_in_order_and_beside_who_posts_them() -> None:
    relay, ran, goes_on = Relay(), [], threading.Event()
    first = relay.post(lambda: goes_on.wait(30))
    rest = [relay.post(lambda i=i: ran.append(i) or i) for i in range(3)]  # type: ignore[misc]
    assert not ran
    goes_on.set()
    assert [job.wait(30) for job in rest] == ran == [0, 1, 2]
    assert first.wait(30) and first.seconds >= rest[0].seconds >= 0
    assert first.hidden_s <= first.seconds
    relay.close()
    assert relay.post(lambda: 5).wait(30) == 5, "a new thread"
    relay.close()


def test_what_a_job_raises_is_raised_where_it_is_waited_for() -> None:
    def fail() -> Any:
        raise ZeroDivisionError("no idea")

    relay = Relay()
    job, after = relay.post(fail), relay.post(lambda: 1)
    assert after.wait(30) == 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="no idea"):
            job.wait(30)
    relay.close()


def test_who_is_late_is_not_waited_for_for_ever() -> None:
    relay, goes_on = Relay(), threading.Event()
    job, began = relay.post(goes_on.wait), time.monotonic()
    with pytest.raises(RuntimeError, match="still under way after 0 s: Connection timed out"):
        job.wait(0.05)
    assert job.waited_s >= 0.05 and time.monotonic() - began < 20
    goes_on.set()
    assert job.wait(30)
    relay.close()
