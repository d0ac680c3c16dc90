"""What is decided, refused, done and told when a pipeline is to get shorter; without an engine, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from dynpipe_ds import MigrationError, RepackError
from dynpipe_ds.events import RepackEvent
from dynpipe_ds.placement import Placement
from dynpipe_ds.release import Constraints, ReleaseError
from dynpipe_ds.repacking import live, repacker
from dynpipe_ds.repacking.live import Shrink
from dynpipe_ds.repacking.outcome import Repacking
from dynpipe_ds.repacking.repacker import Repacker
from tests.one_rank import CPU, Calls, FakeRun, Guard, world


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with world():
        yield


class Stage:
    """One of several stages of a rank each."""

    def __init__(self, partition: tuple[int, ...], stage_id: int = 0) -> None:
        self.calls: Calls = []
        self.partition, self.stage_id, self.device = partition, stage_id, CPU
        self.guard = Guard(self.calls)
        self.pipeline: Any = SimpleNamespace(
            ranks_of=lambda stage: (stage,), micro_batch_size=4, num_micro_batches=4,
            reading=SimpleNamespace(
                is_here=stage_id == 0, lacks_replicas=False, catch_up=lambda: self.calls.append(("start reading",)),
            ),
            check_micro_batches=lambda number: None,
            set_micro_batches=lambda number: self.calls.append(("micro-batches", number)),
        )

    @property
    def num_stages(self) -> int:
        return len(self.partition) - 1

    @property
    def module(self) -> Any:
        return SimpleNamespace(placement=Placement.from_boundaries(self.partition))

    def settle(self) -> None:
        self.calls.append(("settle",))


class Backend:
    """The release back-end on this rank, and what the engine does with it."""

    def __init__(self, calls: Calls, num_ranks: int) -> None:
        self._calls = calls
        self.nodes, self.positions = tuple(f"node {rank}" for rank in range(num_ranks)), ()
        self.way_out = lambda _door, _token, *, is_taken: f"the way out{' of the taken' * is_taken}"
        self.rules = Constraints(ranks_stay=frozenset({0}))
        self.refuses: Exception | None = None

    def constraints(self) -> Constraints:
        self._calls.append(("constraints",))
        if self.refuses is not None:
            raise self.refuses
        return self.rules

    def prepare(self, chosen: Repacking) -> None:
        self._calls.append(("prepare", chosen.released_ranks, chosen.released_nodes))

    def give_back(self, chosen: Repacking, world: Any) -> None:
        self.nodes = tuple(self.nodes[rank] for rank in chosen.surviving_ranks)
        self._calls.append(("give back", chosen.released_ranks, world))


class Left(Exception):
    """This process would have ended."""


class FakeShrink:
    """Does what the survivors would see, and notes what it is told."""

    def __init__(
        self, stage: Stage, move: Callable[[Placement], int], staying: Sequence[int], boundaries: Sequence[int]
    ) -> None:
        self._stage, self._boundaries = stage, tuple(boundaries)
        self.stays, self.world = stage.stage_id in staying, "the world before"

    def prepare(self, checks: Callable[[], None]) -> int:
        try:
            checks()
        except Exception as error:
            raise RepackError(str(error)) from error
        self._stage.calls.append(("voted",))
        return 0

    def leave(self, last_words: Callable[[], None], end: Any) -> None:
        last_words()
        self._stage.calls.append(("leave", end))
        raise Left

    def go_on(self) -> None:
        self._stage.partition = self._boundaries
        self._stage.calls.append(("go on", self._boundaries))


@pytest.fixture(autouse=True)
def fake_shrink() -> Iterator[None]:
    with patch.object(repacker, "Shrink", FakeShrink):
        yield


EVEN = [1.0, 1.0, 1.0, 1.0]


class Case:
    """A re-packer of a pipeline with a layer a stage, one batch of which was profiled.

    Args:
        seconds: of the layers; none for a pipeline that has not trained.
        stage_id: of this rank.
        repack: keys of the section ``repack``.
        **section: other keys.
    """

    def __init__(
        self, seconds: Sequence[float] = EVEN, *, stage_id: int = 0, repack: dict[str, Any] | None = None,
        **section: Any,
    ) -> None:
        self.stage = Stage(tuple(range(5)), stage_id)
        self.run = FakeRun(self.stage, repack=repack or {}, profile_batches=1, **section)
        self.repacker = Repacker(self.run)
        self.backend = Backend(self.stage.calls, 4)
        self.repacker.giving_back = self.backend
        self.events: list[RepackEvent] = []
        self.repacker.callbacks.append(self.events.append)
        self.seconds = list(seconds)

    def train(self, num_batches: int = 1) -> list[int]:
        """Have batches profiled and re-packed after; after how many the pipeline got shorter."""
        for _ in range(num_batches):
            self.run.observe(self.run.num_batches, self.seconds)
            self.repacker.repack_if_wanted()
        return [event.batch for event in self.events]

    def asked(self) -> int:
        """How often a decision was made."""
        return self.stage.calls.count(("constraints",))


# -- by the user's word -----------------------------------------------------------------------


def test_nothing_to_re_pack_by() -> None:
    case = Case()
    with pytest.raises(RuntimeError, match="no profile to re-pack by; train one batch first"):
        case.repacker.repack(2)
    assert not case.stage.calls


@pytest.mark.parametrize(("num_stages", "why"), [(0, "re-packing makes the 4"), (4, "the pipeline has 4")])
def test_a_number_that_can_not_be(num_stages: int, why: str) -> None:
    case = Case()
    case.run.observe(0, EVEN)
    text = f"re-packing to {num_stages} stages is not possible: num_stages = {num_stages}: {why}"
    with pytest.raises(RepackError, match=text):
        case.repacker.repack(num_stages)
    assert case.stage.calls == [("constraints",)] and not case.events


def test_who_is_told_what_in_which_order() -> None:
    case = Case(memory_cap_bytes=[10**6, 10**6, 10**6, 2 * 10**6], stage_speeds=[1.0, 0.5, 0.5, 1.0])
    case.run.observe(0, EVEN)
    event = case.repacker.repack(2)
    assert case.stage.calls == [
        ("constraints",), ("naming lost ranks", "layers were moved to fewer ranks"),
        ("prepare", (1, 2), ("node 1", "node 2")), ("voted",), ("no way back", "layers were moved to fewer ranks"),
        ("go on", (0, 2, 4)), ("no way back", "layers were moved to fewer ranks"), ("settle",), ("sizes changed",),
        ("give back", (1, 2), "the world before"),
    ]  # fmt: skip
    assert case.events == [event]
    assert (event.batch, event.before, event.after) == (1, (0, 1, 2, 3, 4), (0, 2, 4))
    assert event.released_ranks == (1, 2) and not event.released and "4 -> 2 stages keep" in event.reason
    assert case.run.overhead.repacking_s == event.seconds > 0
    # What is given for each stage belongs to the workers that stayed.
    assert case.run.config.memory_cap_bytes == [10**6, 2 * 10**6] and case.run.config.stage_speeds == [1.0, 1.0]
    assert not case.run.balancer.newest, "what was measured on four stages"


def test_a_rank_that_leaves() -> None:
    case = Case(stage_id=1)
    case.run.observe(0, EVEN)
    with pytest.raises(Left):
        case.repacker.repack(2)
    assert case.stage.calls[-1] == ("leave", "the way out")
    assert not {call[0] for call in case.stage.calls} & {"go on", "give back", "settle"}
    (event,) = case.events
    assert event.released and event.regroup_s == 0.0


def test_the_stage_that_reads_the_labels_stays_if_it_can() -> None:
    """Rank 3 is asked for first; where the back-end wants the lowest to stay, they do."""
    case = Case()
    case.run.observe(0, EVEN)
    assert case.repacker.repack(2).released_ranks == (1, 2)
    case = Case()
    case.run.observe(0, EVEN)
    case.backend.rules = Constraints(lowest_stay=True)
    assert case.repacker.repack(2).released_ranks == (2, 3)


def test_other_engines_of_the_process(tmp_path: Path) -> None:
    """Re-packing replaces the process groups that they use; an engine that ended does not count."""
    release = {"backend": "tests.repacking.backends:Recording", "folder": str(tmp_path)}
    case, other = Case(repack={"release": release}), Case(repack={"release": release})
    case.repacker.start()
    other.repacker.start()
    case.repacker.giving_back = case.backend
    case.run.observe(0, EVEN)
    with pytest.raises(RepackError, match="1 other engine.* of this process use the process groups"):
        case.repacker.repack(2)
    assert "prepare" not in {call[0] for call in case.stage.calls} and case.stage.num_stages == 4
    other.repacker.end()
    assert case.repacker.repack(2).released_ranks == (1, 2)
    case.repacker.end()


# -- by itself --------------------------------------------------------------------------------


def test_a_target_is_reached_at_once() -> None:
    case = Case(repack={"enabled": True, "target_stages": 2, "earliest_batch": 3})
    assert case.train(5) == [4], "after batch 3, the fourth"
    assert case.stage.num_stages == 2


def test_what_was_measured_must_be_said_twice() -> None:
    """Everything is tolerated: the wish is noted, new profiles are asked for, and they confirm it."""
    case = Case(repack={"enabled": True, "tolerance": 0.99, "min_stages": 2})
    assert not case.train() and case.asked() == 1
    assert case.repacker.wants_profile(case.run.num_batches)
    assert case.run.overhead.planning_s > 0
    assert case.train() == [2] and case.stage.num_stages == 2
    assert not case.repacker.wants_profile(case.run.num_batches), "nothing is left to confirm"


def test_a_wish_that_is_not_confirmed() -> None:
    case = Case([9.0, 0.1, 0.1, 9.0], repack={"enabled": True, "tolerance": 0.05})
    assert not case.train()
    assert case.repacker.state_dict()["wished_stages"] == 2
    case.seconds = [9.0] * 4
    assert not case.train()
    assert case.repacker.state_dict()["wished_stages"] is None


@pytest.mark.parametrize("repack", [{}, {"enabled": True, "target_stages": 2, "earliest_batch": 9}])
def test_nobody_is_asked_before_it_is_time(repack: dict[str, Any]) -> None:
    case = Case(repack=repack)
    assert not case.train(3) and not case.asked()


def test_the_number_of_micro_batches_follows_the_stages() -> None:
    """Two stages need fewer to be busy than four; off by default."""
    for adapt in (False, True):
        case = Case(repack={"enabled": True, "target_stages": 1, "adapt_micro_batches": adapt})
        case.train()
        changed = [call for call in case.stage.calls if call[0] == "micro-batches"]
        assert changed == ([("micro-batches", 1)] if adapt else []), "one stage has no bubble, and fixed seconds"
        assert "micro-batches" in case.events[0].reason or not adapt
        if adapt:
            assert not case.run.balancer.newest and case.repacker.scaling._left == (4, sum(EVEN))


def test_boundaries_that_hold_are_left_alone() -> None:
    case = Case(repack={"enabled": True, "target_stages": 2})
    case.run.balancer.hold(0, 3)
    assert case.train(2) == [] and not case.asked()
    assert case.train() == [3]


def test_a_target_that_can_not_be_reached_is_told() -> None:
    case = Case(repack={"enabled": True, "target_stages": 1}, memory_cap_bytes=200)
    assert not case.train()
    ((what, text),) = case.run.warned
    assert what == "target" and "repack.target_stages is not possible: num_stages = 1" in text


def test_a_scheduler_that_does_not_answer_is_asked_again_later() -> None:
    case = Case(repack={"enabled": True, "target_stages": 2})
    case.backend.refuses = ReleaseError("no scheduler")
    assert not case.train(8) and case.asked() == 1
    ((what, text),) = case.run.warned
    assert what == "repack" and text == "re-packing after batch 1 failed (no scheduler)"
    case.backend.refuses = None
    assert case.train(8) == [9]


def test_what_a_checkpoint_keeps() -> None:
    case = Case(repack={"enabled": True, "tolerance": 0.99, "min_stages": 2})
    case.train(1)
    state = case.repacker.state_dict()
    assert state["wished_stages"] == 2 and state["next_batch"] == 1 and state["most_stages"] == 4
    other = Case(repack={"enabled": True, "tolerance": 0.99, "min_stages": 2, "earliest_batch": 5})
    other.repacker.load_state_dict(state, same_stages=True)
    assert other.repacker.state_dict() == {**state, "next_batch": 5}
    other.repacker.load_state_dict(state, same_stages=False)
    forgotten = {"wished_stages": None, "times": 0, "most_stages": 0, "next_batch": 5}
    assert other.repacker.state_dict() == {**state, **forgotten}
    other.repacker.load_state_dict({}, same_stages=True)  # of an older checkpoint
    assert other.repacker.state_dict() == {**state, **forgotten}


# -- the shrink itself ------------------------------------------------------------------------


class World:
    """The processes of before and after, which may not be reached."""

    fails: Exception | None = None

    @classmethod
    def among(cls, members: Any) -> World:
        world = cls()
        world.members = list(members)
        return world

    def check(self) -> None:
        if self.fails is not None:
            raise self.fails


@pytest.mark.parametrize("fault", ["", "checks", "move", "vote"])
def test_until_all_have_voted_everything_can_be_undone(fault: str) -> None:
    stage, moves = Stage((0, 1, 2, 3, 4), stage_id=2), []

    def checks() -> None:
        if fault == "checks":
            raise ReleaseError("not now")

    def move(placement: Placement) -> int:
        moves.append(placement.boundaries)
        if fault == "move":
            raise MigrationError("no memory")
        return 8

    failure = OSError("no store") if fault == "vote" else None
    with patch.object(live, "World", World), patch.object(World, "fails", failure):
        shrink = Shrink(stage, move, (0, 2), (0, 3, 4))
        assert shrink.stays and shrink.world.members == [0, 2]
        if fault:
            with pytest.raises(RepackError, match="training goes on with all ranks .*(not now|no memory|store)"):
                shrink.prepare(checks)
        else:
            assert shrink.prepare(checks) == 8
    wide, before = (0, 3, 3, 4, 4), (0, 1, 2, 3, 4)
    assert moves == {"": [wide], "checks": [], "move": [wide], "vote": [wide, before]}[fault]
    assert stage.calls == ([("start reading",)] if fault in ("", "vote") else []), "it will be the last stage"
