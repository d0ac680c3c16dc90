"""The door: who waits, who is sent away, who hung up; and nothing is left of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds.joining.address import JOIN, LEFT, TOKEN, Address, find_door, find_token, write_door_file
from dynpipe_ds.joining.anew import newcomer_environment
from dynpipe_ds.joining.door import Door
from dynpipe_ds.joining.newcomer import Newcomer, OverError, RefusedError, is_in, newcomer
from dynpipe_ds.joining.wire import WireError

PAPERS = {"model": [{"name": "a"}], "versions": {"torch": "1"}}
JOB = {"num_stages": 2, "num_replicas": 1, "owned": [[3, ["w"]]]}


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv(TOKEN, "word")


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door(PAPERS, "word")
    made.lead(JOB)
    yield made
    made.close()


def knocking(door: Door, name: str = "n") -> Newcomer:
    one = Newcomer("{}:{}".format(*door.address), name)
    one.knock(5.0)
    return one


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_fits_waits_in_order_and_is_invited(door: Door) -> None:
    first, second = knocking(door, "a"), knocking(door, "b")
    assert first.job == JOB and first.owned == {3: ("w",)}
    for one in (first, second):
        one.show(PAPERS)
        until(lambda one=one: one.identity in door.waiting())
    assert door.waiting() == ["a", "b"]
    told: dict[str, Any] = {}

    def answer() -> None:
        told.update(first.wait())
        first.answer("")

    thread = threading.Thread(target=answer)
    thread.start()
    door.invite(["a"], {"rank": 2})
    thread.join()
    assert told == {"rank": 2} and door.lost(["a"]) == ""
    first.hang_up()
    until(lambda: door.lost(["a"]))
    assert door.lost(["a"]) == "newcomer a ended while joining"
    door.forget(["a"])
    assert door.waiting() == ["b"]
    second.hang_up()


def test_who_cannot_come_says_why(door: Door) -> None:
    one = knocking(door)
    one.show(PAPERS)
    until(door.waiting)
    thread = threading.Thread(target=lambda: (one.wait(), one.answer("MemoryError: no room")))
    thread.start()
    with pytest.raises(WireError, match="can't come: MemoryError: no room"):
        door.invite(["n"], {})
    thread.join()
    with pytest.raises(WireError, match="newcomers m are gone"):
        door.invite(["m"], {})
    one.hang_up()


def test_who_does_not_fit_is_told_why(door: Door) -> None:
    one = knocking(door)
    text = r"model\[0\].name: 'a' in the job, 'b' here.*torch: '1' in the job, '2' here"
    with pytest.raises(RefusedError, match=text):
        one.show({"model": [{"name": "b"}], "versions": {"torch": "2"}})
    assert door.waiting() == []
    one.hang_up()


def test_another_word(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "guessed")
    with pytest.raises(RefusedError, match=f"the token is another one; set {TOKEN}"):
        knocking(door)


def test_who_dies_while_waiting_waits_no_more(door: Door) -> None:
    one = knocking(door)
    one.show(PAPERS)
    until(door.waiting)
    one.hang_up()
    until(lambda: not door.waiting())


def test_other_doors_send_to_the_first() -> None:
    first, second = Door(PAPERS, "word"), Door(PAPERS, "word")
    first.lead(JOB)
    second.send_to(first.address)
    one = knocking(second)
    one.show(PAPERS)
    until(first.waiting)
    third = Door(PAPERS, "word")  # the first rank is another one now
    third.lead(JOB)
    first.send_to(third.address)
    ends: list[str] = []

    def wait() -> None:
        try:
            one.wait()
        except OverError as error:
            ends.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    until(third.waiting)
    for door in (first, second, third):
        door.close()
    thread.join(10)
    assert ends == ["the job has ended"]


def test_the_end_of_the_job_is_told(door: Door) -> None:
    one = knocking(door)
    one.show(PAPERS)
    until(door.waiting)
    door.close()
    with pytest.raises(OverError, match="the job has ended"):
        one.wait()


def test_no_door() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(OverError, match="no door of the job answered in 0.5 s .*refused"):
            Newcomer(where, "n").knock(0.5)


def test_who_was_a_rank_ends_when_the_job_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynpipe_ds.joining.newcomer.AGAIN_S", 0.5)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        environment = newcomer_environment(Address(*bound.getsockname()), "word")
        for name in (LEFT, TOKEN):
            monkeypatch.setenv(name, environment[name])
        with pytest.raises(SystemExit) as ended:
            Newcomer(environment[JOIN], "n").begin()
    assert ended.value.code == 0


def test_only_the_jobs_address_listens(door: Door) -> None:
    import psutil

    ours = [c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
    assert {a.ip for a in ours if a.port == door.address.port} == {"127.0.0.1"}


def test_nothing_is_left() -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for round_ in range(5):
        door = Door(PAPERS, "word")
        door.lead(JOB)
        one, other = knocking(door, "a"), knocking(door, "b")
        one.show(PAPERS)
        until(door.waiting)
        silent = socket.create_connection(door.address)  # says nothing at all
        door.close()
        one.hang_up()
        other.hang_up()
        silent.close()
        until(lambda: not [t for t in threading.enumerate() if t.name.startswith("dynpipe_ds newcomer")])
        if round_ == 0:
            before = counts()
    until(lambda: counts() <= before)


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "door.json"
    write_door_file(file, Address("127.0.0.1", 7), "secret")
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(file.read_text()) == {"address": "127.0.0.1:7", "token": "secret"}
    assert [path.name for path in file.parent.iterdir()] == ["door.json"]


def test_where_a_door_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_door("host:80") == (Address("host", 80), "word")
    file = tmp_path / "door.json"
    write_door_file(file, Address("10.0.0.1", 7), "secret")
    assert find_door(str(file)) == (Address("10.0.0.1", 7), "word"), "the user's word goes first"
    monkeypatch.delenv(TOKEN)
    assert find_door(str(file)) == (Address("10.0.0.1", 7), "secret")
    assert len(find_token()) == 32 and find_token() != find_token()
    with pytest.raises(ValueError, match=f"{TOKEN} is not set"):
        find_door("host:80")
    with pytest.raises(ValueError, match="neither HOST:PORT nor a file"):
        find_door("nowhere")


def test_a_process_is_a_newcomer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert newcomer("n") is None
    monkeypatch.setenv(JOIN, "host:80")
    one = newcomer("n")
    assert one is not None and newcomer("n") is one
    is_in()
    assert newcomer("n") is None and JOIN not in os.environ


def test_a_door_that_names_a_lost_one_is_knocked_at_again() -> None:
    """It does not know yet that the first rank is gone, and leads soon after."""
    gone, second = Door(PAPERS, "word"), Door(PAPERS, "word")
    second.send_to(gone.address)
    gone.close()
    one = Newcomer("{}:{}".format(*second.address), "n")
    with pytest.raises(OverError):
        one.knock(0.1)
    second.lead(JOB)
    one.knock(5.0)
    assert one.job == JOB
    one.hang_up()
    second.close()


def test_another_jobs_door_in_the_same_file_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN)
    file, first, other = tmp_path / "door.json", Door(PAPERS, "word"), Door(PAPERS, "another")
    first.lead(JOB)
    other.lead({**JOB, "num_stages": 7})
    write_door_file(file, first.address, "word")
    one = Newcomer(str(file), "n")
    one.knock(5.0)
    write_door_file(file, other.address, "another")
    one.hang_up()
    one.knock(5.0)
    assert one.job == JOB
    one.hang_up()
    first.close()
    one.job = {}
    with pytest.raises(OverError):
        one.knock(0.5)
    assert not one.job
    other.close()
