"""The release back-end on one rank: agreed on before, apart from training after."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dynpipe_ds.release import Constraints, ReleaseError
from dynpipe_ds.repacking.giving_back import GivingBack
from tests.one_rank import CPU, world


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with world():
        yield


class Recording:
    """A back-end that may fail."""

    workers_leave_first = True

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def _note(self, what: str, *more: Any) -> None:
        self.calls.append((what, *more))
        if what == self._fails:
            raise ValueError("no route")

    def check(self) -> None:
        self._note("check")

    def position(self) -> int | None:
        return None

    def node_name(self) -> str:
        return "node 0"

    def constraints(self) -> Constraints:
        self._note("constraints")
        return Constraints(ranks_stay=frozenset({5}), whole_nodes=True)

    def prepare(self, ranks: Any, nodes: Any) -> None:
        self._note("prepare", ranks, nodes)

    def release(self, ranks: Any, nodes: Any) -> None:
        self._note("release", ranks, nodes)

    def verify(self) -> None:
        self._note("verify")


def giving_back(backend: Recording) -> GivingBack:
    with patch("dynpipe_ds.repacking.giving_back.make_backend", lambda options: backend):
        return GivingBack(SimpleNamespace(backend="mine"), CPU)


def test_rank_0_always_stays_and_a_scheduler_that_can_not_be_asked_is_named() -> None:
    assert giving_back(Recording()).constraints() == Constraints(ranks_stay=frozenset({0, 5}), whole_nodes=True)
    with pytest.raises(ReleaseError, match="the release back-end can't say who must stay: ValueError: no route"):
        giving_back(Recording("constraints")).constraints()
    with pytest.raises(ValueError, match='repack.release.backend = "mine" can\'t be used here: rank 0: ValueError: no'):
        giving_back(Recording("check"))


@pytest.mark.parametrize("fails", ["", "release", "verify"])
def test_workers_are_given_back_once_they_have_left(fails: str, recwarn: pytest.WarningsRecorder) -> None:
    """In a thread of its own; what fails then is told, since training goes on in any case."""
    backend = Recording(fails)
    given = giving_back(backend)
    given.nodes = tuple(f"node {rank}" for rank in range(4))
    chosen: Any = SimpleNamespace(
        surviving_ranks=(0, 3), released_ranks=(1, 2), released_nodes=("node 1", "node 2")
    )
    old_world: Any = SimpleNamespace(wait_for_leaving=lambda: backend.calls.append(("all have left",)))
    given.give_back(chosen, old_world)
    given.wait()
    expected = [("check",), ("all have left",), ("release", (1, 2), ("node 1", "node 2")), ("verify",)]
    assert backend.calls == expected[: 3 if fails == "release" else 4]
    assert given.nodes == ("node 0", "node 3")
    told = [str(warning.message) for warning in recwarn]
    text = "ranks [1, 2] have left, but giving them back failed (ValueError: no route); training goes on without them"
    assert told == ([f"dynamic_pipeline: {text}"] if fails else [])


def test_the_last_release_is_through_before_another_is_asked_for() -> None:
    backend, left = Recording(), threading.Event()
    given = giving_back(backend)
    chosen: Any = SimpleNamespace(surviving_ranks=(0,), released_ranks=(1,), released_nodes=())
    given.give_back(chosen, SimpleNamespace(wait_for_leaving=lambda: left.wait(60)))  # type: ignore[arg-type]
    threading.Timer(0.2, left.set).start()
    given.prepare(chosen)
    assert backend.calls == [("check",), ("release", (1,), ()), ("verify",), ("prepare", (1,), ())]
