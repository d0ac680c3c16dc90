"""Forked ranks: what the first hands over comes as it is made; who fails is named, and nobody is left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from benchmarks.forked import RankError, run_forked

Send = Callable[[object], None]


def _tell(send: Send, first: int) -> None:
    for number in range(first, first + 2):
        send((os.environ["RANK"], os.environ["WORLD_SIZE"], number))
    if os.environ["RANK"] == "1":
        sys.exit(0)  # as a rank that leaves


def _fail(_: Send, how: str) -> None:
    if os.environ["RANK"] != "2":
        time.sleep(600)
    elif how == "raises":
        raise ValueError("a layer of mine")
    else:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_first_rank_is_heard() -> None:
    assert list(run_forked(_tell, 3, 5)) == [("0", "3", 5), ("0", "3", 6)]
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("how", "said"), [
    ("raises", "rank 2 of 3 ended with code 1:\n(.|\n)*ValueError: a layer of mine"),
    ("dies", "rank 2 of 3 ended with code -9:\nlast words"),
])  # fmt: skip
def test_a_rank_that_fails_alone_is_named_and_ends_the_others(how: str, said: str) -> None:
    with pytest.raises(RankError, match=said) as caught:
        list(run_forked(_fail, 3, how))
    assert "rank 0" not in str(caught.value) and not multiprocessing.active_children()
