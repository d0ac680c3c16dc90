"""Survivors agree on who goes on, whoever is lost meanwhile; a stuck rank hears of a loss wherever it waits."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynpipe_ds.host.world import identity
from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.ranks.answering import Address, Answer
from dynpipe_ds.ranks.guard import Guard
from dynpipe_ds.ranks.meeting import Meeting, NoMeetingError, Person, ask_people
from dynpipe_ds.ranks.place import open_place
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point


def end(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_a_sum(rank: int) -> None:
    dist.all_reduce(torch.ones(3))


def wait_for_each_other(rank: int) -> None:
    """Ranks 2 and 3 wait for one another, 0 for 2: nobody is connected to whom he waits for and who is lost."""
    dist.recv(torch.zeros(1), {0: 2, 2: 3, 3: 2}[rank])


def wait_in_a_group(rank: int) -> None:
    """In a group that was made after the connections were noted."""
    group = dist.new_group([2, 3], use_local_synchronization=True) if rank > 1 else None
    if rank == 2:
        time.sleep(3600) if group is None else dist.recv(torch.zeros(1), 3, group)
    elif rank == 3:
        dist.recv(torch.zeros(1), 2, group)
    else:
        dist.recv(torch.zeros(1), 3)


def wait_at_the_store(rank: int) -> None:
    dist.distributed_c10d._get_default_store().wait(["nobody sets this"])


def wait_to_send(rank: int) -> None:
    dist.send(torch.zeros(1 << 24), {0: 3, 2: 0, 3: 2}[rank])


def stay(rank: int, done: Path, count: int) -> None:
    """Be there until so many ranks are through: others read this one's place, or ask who lives."""
    (done / str(rank)).touch()
    until = time.monotonic() + 30.0
    while len(list(done.iterdir())) < count:
        assert time.monotonic() < until, f"only ranks {sorted(one.name for one in done.iterdir())} are through"
        time.sleep(0.02)


def stuck(rank: int, victim: int, wait: Callable[[int], None], done: Path) -> tuple[str, float]:
    guard = Guard(lambda: None)
    guard.start()
    assert guard.heartbeat is not None
    guard.heartbeat.stay_connected(identity(), open_place())
    fatal.survive(guard.heartbeat.break_off)
    dist.all_reduce(torch.ones(1))
    times = [time.time()]
    if rank == victim:
        time.sleep(0.3)
        end()
    try:
        with guard.naming_lost_ranks("something was waited for"):
            wait(rank)
    except fatal.RankLostError as error:
        took_s = time.time() - times[0]
        stay(rank, done, 3)
        assert error.ranks == [victim]
        return str(error), took_s
    return "", 0.0


@pytest.mark.parametrize(
    "wait", [wait_for_a_sum, wait_for_each_other, wait_in_a_group, wait_at_the_store, wait_to_send]
)
def test_who_waits_for_somebody_else_hears_of_it(
    wait: Callable[[int], None], record_property: Callable[[str, object], None], tmp_path: Path
) -> None:
    outcomes = [o for o in run_ranks(stuck, 4, 1, wait, tmp_path, may_die={1}) if o is not None]
    assert len(outcomes) == 3
    assert all("rank 1 ended while something was waited for" in text for text, _ in outcomes), outcomes
    assert max(seconds for _, seconds in outcomes) < 2.3, outcomes
    record_property("seconds", [round(seconds - 0.3, 2) for _, seconds in outcomes])


def test_the_first_rank_and_its_store(tmp_path: Path) -> None:
    outcomes = [o for o in run_ranks(stuck, 4, 0, wait_at_the_store, tmp_path, may_die={0}) if o is not None]
    assert len(outcomes) == 3
    assert all("rank 0 ended while" in text for text, _ in outcomes), outcomes


MEETING = "dynpipe_ds.ranks.meeting:Meeting."
MEETINGS = {
    "nobody more": None,
    "before he is here": Point("a", MEETING + "meet"),
    "is here": Point("a", MEETING + "_set", after=True),
    "before his second word": Point("a", MEETING + "_set", call=2),
    "after his second word": Point("a", MEETING + "_set", call=2, after=True),
    "before his third word": Point("a", MEETING + "_set", call=3),
    "after his third word": Point("a", MEETING + "_set", call=3, after=True),
    "when his third word was heard": Point("heard", MEETING + "_set", call=3, after=True),
}


def people(address: Any) -> list[Person]:
    return [Person(*one) for one in gather((identity(), open_place(), address))]


def meet(rank: int, first: int, second: int, point: Point | None, done: Path) -> Any:
    """Meet until a world comes about, as survivors do: one whose members include somebody lost does not."""
    guard = Guard(lambda: None)
    guard.start()
    assert guard.heartbeat is not None
    everybody = people(guard.heartbeat.listener.address)
    names = [one.identity for one in everybody]
    if rank == first:
        end()
    meeting = Meeting(
        names[rank], everybody, lambda some: ask_people(some, 2.0), {names[first]}, lambda said: {"for": len(said)}
    )

    def end_here() -> None:
        while point is not None and point.name == "heard" and not list(done.glob("*/*/*")):
            time.sleep(0.001)
        end()

    with nullcontext() if rank != second or point is None else point.arm(end_here):
        while True:
            agreed = meeting.meet({"my": rank})
            members = [names.index(name) for name in agreed.members]
            if comes_about(rank, members, everybody, done / str(agreed.place.port)):
                return members, agreed.said, agreed.news, list(agreed.place)


def comes_about(rank: int, members: list[int], everybody: list[Person], met: Path) -> bool:
    """Whether all members come to the world that they agreed on; false as soon as one of them is lost."""
    world = met / "-".join(map(str, members))
    world.mkdir(parents=True, exist_ok=True)
    (world / str(rank)).touch()
    until = time.monotonic() + 30.0
    while True:
        answers = ask_people([everybody[member] for member in members if member != rank], 2.0)
        here = sorted(int(one.name) for one in world.iterdir())  # looked at last: who has seen all may have left
        if here == members:
            return True
        if any(answer is not Answer.LIVES for answer in answers.values()):
            return False
        assert time.monotonic() < until, f"of {members} only {here} came"
        time.sleep(0.02)


@pytest.mark.parametrize("moment", MEETINGS)
@pytest.mark.parametrize(("first", "second"), [(0, 1), (0, 3), (2, 0), (3, 1)])
def test_another_one_is_lost_while_they_meet(moment: str, first: int, second: int, tmp_path: Path) -> None:
    """Also one who has just said the last word: for those who heard it he is a member, and they meet once more."""
    point = MEETINGS[moment]
    lost = {first} if point is None else {first, second}
    outcomes = run_ranks(meet, 4, first, second, point, tmp_path, may_die=lost)
    agreed = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome is not None}
    for members, said, news, _ in agreed.values():
        assert members == sorted(agreed), "all who live are members, and nobody else"
        assert [one["my"] for one in said.values()] == members
        assert news == {"for": len(members)}
    assert len({tuple(place) for *_, place in agreed.values()}) == 1
    leader = min({0, 1, 2, 3} - {first})
    if "third" in moment and second != leader:  # who does not say one is not lost
        lost = {first}
    assert set(agreed) == {0, 1, 2, 3} - lost


def alone(rank: int) -> str:
    everybody = people(Address("127.0.0.1", 1, ""))
    if rank == 0:
        return ""
    try:
        Meeting(
            identity(), everybody, lambda some: {one.identity: Answer.SILENT for one in some}
        ).meet({})
    except NoMeetingError as error:
        return str(error)
    return "went on"


def test_who_cannot_reach_most_ranks_ends() -> None:
    assert "must not go on" in run_ranks(alone, 2)[1]
