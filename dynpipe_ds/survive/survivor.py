"""The way from a lost rank to the next batch, on one rank that is left.

The main thread comes here with a :class:`~dynpipe_ds.ranks.fatal.RankLostError`, wherever it waited: connections were
shut down (``ranks/connections.py``). Survivors meet (``ranks/meeting.py``), form a world of their own, go back to the
newest snapshot that they hold together, with the layers of lost stages on their neighbours, and repeat the batches
since. Who is lost meanwhile lets them begin again: until the batches are repeated, nothing that is needed has changed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch.distributed as dist

from dynpipe_ds.host.broken import abandon_batch
from dynpipe_ds.host.topology import in_rank_order, renumber
from dynpipe_ds.host.world import Groups, NobodyMetError, World, generation, identity
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.agreement import gather, together
from dynpipe_ds.ranks.answering import Answer
from dynpipe_ds.ranks.connections import can_break_off
from dynpipe_ds.ranks.fatal import RankLostError
from dynpipe_ds.ranks.heartbeat import PATIENCE_S, Heartbeat, adopt_heartbeat, make_heartbeat
from dynpipe_ds.ranks.meeting import Agreed, Meeting, NoMeetingError, Person, ask_people
from dynpipe_ds.ranks.place import open_place
from dynpipe_ds.snapshots.handing_over import hand_over
from dynpipe_ds.snapshots.restore import newest, restore
from dynpipe_ds.snapshots.shared_data import SnapshotError
from dynpipe_ds.survive.leftover import leave
from dynpipe_ds.survive.reload import reload
from dynpipe_ds.survive.seats import CantGoOnError, Seating, seated, without_stages
from dynpipe_ds.telling import log, warn

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_MOST_TRIES = 8
_DOING = "the ranks that are left formed a world"
_WHY_NOT = (CantGoOnError, NoMeetingError, SnapshotError)


class _Base(NamedTuple):
    """What the present heartbeat's world is like, until the next one's is adopted.

    Attributes:
        stages: ranks of each.
        boundaries: of the stages.
        groups: process groups.
    """

    stages: list[tuple[int, ...]]
    boundaries: tuple[int, ...]
    groups: Groups | None


class Survivor:
    """Lets this rank go on when others are lost.

    Args:
        run: of this rank.

    Attributes:
        is_on: whether it would.
        wanted_stages: that there were before some were lost; 0: none is missing.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stage = run, run.stage
        self.is_on = False
        self.wanted_stages = 0
        self._base: _Base | None = None
        self._reached = 0
        self._was_reading: bool | None = None
        self._staying: list[int] = []

    def start(self) -> None:
        """Get ready if the section says so; collective over all ranks.

        Raises:
            ValueError: on every rank, if some rank can't leave broken process groups.
        """
        heartbeat = self._stage.guard.heartbeat
        if not self._run.config.survive.enabled or dist.get_world_size() == 1:
            return
        if heartbeat is None:
            self._run.warn_once("survive.enabled = true: the ranks can't ask each other, so a loss ends all", "survive")
            return
        if self._run.config.survive.silent_s is not None:
            heartbeat.be_patient(self._run.config.survive.silent_s)
        place = together(self._open, self._stage.device, ValueError)
        heartbeat.stay_connected(identity(), place)
        fatal.survive(heartbeat.break_off)
        self.is_on = True

    @staticmethod
    def _open() -> Any:
        if not can_break_off():
            raise ValueError(
                "survive.enabled = true: this system does not show a process its connections (/proc/self/fd), so that "
                "ranks could not leave broken process groups; set it to false"
            )
        return open_place()

    def follow(self, *, fewer: bool) -> None:
        """Take note that the ranks are others, on purpose; collective over all ranks.

        Args:
            fewer: whether some have left.
        """
        self.wanted_stages = 0 if fewer else max(gather(self.wanted_stages))
        self.start()

    def end(self) -> None:
        """Go on no more."""
        if self.is_on:
            fatal.survive(None)
        self.is_on = False

    # -- the operation ------------------------------------------------------------------------

    def go_on(self, error: RankLostError) -> dict[int, Any]:
        """Go on without lost ranks; collective over all that are left.

        Args:
            error: says who was lost.

        Returns:
            Losses of the batches that were repeated, by number; the run has trained all that any rank had trained.

        Raises:
            RankLostError: the given one, with why not, if they can't.
        """
        if not self.is_on:
            raise error
        started_s = time.monotonic()
        self._reached = max(self._reached, self._run.num_batches)
        for _ in range(_MOST_TRIES):
            try:
                losses = self._without(error)
            except RankLostError as another:
                error = another
            except NobodyMetError as why:
                log.info("dynamic_pipeline: survive: %s; meeting again", why)
            except _WHY_NOT as why:
                self._end(error, why)
            else:
                self._was_reading, self._reached = None, 0
                if self._stage.pipeline.rank == 0:
                    warn(
                        f"survive: {fatal.names(error.ranks)} was lost; training goes on with {self._stage.num_stages} "
                        f"stages, {list(self._stage.partition)}; batches {sorted(losses)} were repeated; "
                        f"{time.monotonic() - started_s:.1f} s"
                    )
                return losses
        self._end(error, CantGoOnError(f"no world came about in {_MOST_TRIES} tries"))

    def _end(self, error: RankLostError, why: Exception) -> NoReturn:
        self.is_on = False
        fatal.survive(None)
        text = f"{error}; survive: the ranks that are left can't go on: {why}"
        verdict = fatal.Verdict(tuple(error.ranks), text, lost=True)
        fatal.mourn(())
        raise fatal.hold(verdict).error() from why

    def _without(self, error: RankLostError) -> dict[int, Any]:
        heartbeat = self._stage.guard.heartbeat
        assert heartbeat is not None, "survive needs it"
        if not heartbeat.people:
            raise CantGoOnError("workers were just joining or leaving, and not all ranks know of each other yet")
        if heartbeat.rank in error.ranks:
            raise CantGoOnError("they have gone on without this rank, which did not answer for a while")
        abandon_batch(self._stage.pipeline)
        agreed = self._meet(heartbeat, error.ranks)
        names = [one.identity for one in heartbeat.people]
        living = sorted(names.index(member) for member in agreed.members)
        self._miss_no_more(heartbeat, [rank for rank in range(len(names)) if rank not in living])
        if self._base is None:
            stages = [self._stage.pipeline.ranks_of(stage) for stage in range(self._stage.num_stages)]
            self._base = _Base(stages, self._stage.partition, Groups(self._stage.module))
        seating = seated(
            self._base.stages, living, reads_any=all(said["opens"] for said in agreed.said.values())
        )
        self._form_world(heartbeat, agreed, seating, self._base)
        self.wanted_stages = max(self.wanted_stages, len(self._base.stages))
        self._base = None
        return self._go_back()

    def _meet(self, heartbeat: Heartbeat, lost: Sequence[int]) -> Agreed:
        self._miss_no_more(heartbeat, lost)
        meeting = Meeting(
            identity(), heartbeat.people, lambda people: ask_people(people, PATIENCE_S),
            {heartbeat.people[rank].identity for rank in lost},
        )
        return meeting.meet({"generation": generation(), "opens": self._stage.pipeline.open_at is not None})

    @staticmethod
    def _miss_no_more(heartbeat: Heartbeat, ranks: Sequence[int]) -> None:
        heartbeat.forget(ranks)
        fatal.mourn({rank for rank in range(len(heartbeat.people)) if not heartbeat.misses(rank)})

    # -- the world ----------------------------------------------------------------------------

    def _form_world(self, heartbeat: Heartbeat, agreed: Agreed, seating: Seating, base: _Base) -> None:
        pipeline, guard = self._stage.pipeline, self._stage.guard
        boundaries = without_stages(base.boundaries, seating.origins, self._run.balancer.pinned)
        if self._was_reading is None:
            self._was_reading = pipeline.reads_data
        people = [one for one in heartbeat.people if one.identity in agreed.members]
        number = max(int(said["generation"]) for said in agreed.said.values()) + 1
        with guard.naming_lost_ranks(_DOING):
            if seating.leftover:
                everybody = World(agreed.members, agreed.place, number, lost=lambda: _ended(people))
                self._let_go(heartbeat, everybody, seating)
                number += 1
            members = in_rank_order(pipeline, [[heartbeat.people[rank] for rank in row] for row in seating.rows])
            world = World(
                [one.identity for one in members], members[0].place, number, lost=lambda: _ended(members)
            )
            self._stage.module.is_absent = True
            try:
                renumber(pipeline, world, Placement.from_boundaries(boundaries), old=base.groups)
                self._base = base._replace(groups=None)
            finally:
                self._stage.module.is_absent = False
            made = self._make_heartbeat()
        why = fatal.Verdict((), "the others went on without this rank, which did not answer; it ends", lost=True)
        heartbeat.stay_silent(why)
        guard.heartbeat = adopt_heartbeat(made)
        fatal.survive(None if made is None else made.break_off)
        fatal.mourn(())
        known = self._staying or list(range(len(base.stages)))
        self._staying = [known[stage] for stage in seating.origins]

    def _let_go(self, heartbeat: Heartbeat, everybody: World, seating: Seating) -> None:
        """Let ranks that have no place give their copies to the others; does not return on them.

        Args:
            heartbeat: of the world that broke.
            everybody: a world of all that live, for this alone.
            seating: who has a place.
        """
        everybody.regroup()
        names = [heartbeat.people[rank].identity for row in seating.rows for rank in row]
        hand_over(self._run, sorted(everybody.members.index(name) for name in names))
        dist.barrier()
        if heartbeat.rank in seating.leftover:
            door, token = self._run.repacker.door_of(min(rank for row in seating.rows for rank in row))
            leave(door, token)
        self._miss_no_more(heartbeat, seating.leftover)

    def _make_heartbeat(self) -> Heartbeat | None:
        made = make_heartbeat()
        try:
            if made is not None:
                made.stay_connected(identity(), open_place())
                if self._run.config.survive.silent_s is not None:
                    made.be_patient(self._run.config.survive.silent_s)
            dist.barrier()
        except BaseException:
            if made is not None:
                made.stop()
            raise
        return made

    # -- the state ----------------------------------------------------------------------------

    def _go_back(self) -> dict[int, Any]:
        run = self._run
        with self._stage.guard.naming_lost_ranks("training went back to a snapshot"):
            run.repacker.goes_on_with(self._staying)
            self._staying = []
            run.repeating.share_results()
            own = max(self._reached, self._stage.pipeline.kept.num_noted)
            everyone = gather((self._reached, own))
            until, read = (max(numbers) for numbers in zip(*everyone, strict=True))
            run.repeating.reached = until
            together(lambda: self._catch_up(read - own), self._stage.device, CantGoOnError)
            self._restore_or_reload(read)
            run.snapshots.connect(run.repacker.node_name())
            losses = run.repeating.replay(until)
            self._stage.pipeline.take_counters(until)
            return losses

    def _restore_or_reload(self, read: int) -> None:
        """Go back to the newest snapshot; where no snapshot serves, to the newest checkpoint."""
        run = self._run
        batch = newest(run)
        try:
            if batch is None:
                raise SnapshotError("no snapshot is complete on them")
            restore(run, batch, self._stage.partition, until=read)
        except SnapshotError as error:
            mark = reload(run, read, error)
            run.warn_once(f"survive: {error}; training goes back to checkpoint {mark.path}", f"reload {mark.path}")

    def _catch_up(self, missed: int) -> None:
        """If this rank reads data from now on, let its iterator be where the others' are."""
        pipeline = self._stage.pipeline
        if pipeline.reads_data and self._was_reading is False:
            if missed:
                pipeline.data.fall_behind(pipeline.engine.data_iterator, missed * pipeline.num_loaded)
            self._was_reading = True
            pipeline.start_reading()


def _ended(people: Sequence[Person]) -> str:
    answers = ask_people(people, PATIENCE_S)
    gone = [name for name, answer in answers.items() if answer is Answer.ENDED]
    return f"members {', '.join(gone)} of the world to be have ended" if gone else ""
