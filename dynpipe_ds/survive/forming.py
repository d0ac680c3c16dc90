"""The world of the ranks that are left: who has which place in it, and how they come to it.

A world that does not come about, because another rank is lost meanwhile, leaves behind what the next try needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dynpipe_ds.host.dealing import fewer as fewer_replicas
from dynpipe_ds.host.topology import in_rank_order, renumber
from dynpipe_ds.host.world import Groups, World, generation, identity
from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.answering import Answer
from dynpipe_ds.ranks.heartbeat import PATIENCE_S, Heartbeat, adopt_heartbeat, make_heartbeat
from dynpipe_ds.ranks.meeting import Agreed, Meeting, Person, ask_people
from dynpipe_ds.ranks.place import open_place
from dynpipe_ds.snapshots.handing_over import hand_over
from dynpipe_ds.survive.leftover import leave
from dynpipe_ds.survive.seats import Fewer, Seating, seated, without_stages

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_DOING = "the ranks that are left formed a world"


@dataclass(frozen=True)
class _Base:
    """What the world of the present heartbeat is like, until the next one's is adopted.

    Attributes:
        stages: ranks of each.
        boundaries: of the stages.
        replicas: of each stage.
        micro_batches: M, of each replica.
        loaded: micro-batches that each replica takes from the data for a batch.
        groups: process groups, if they are not given up yet.
    """

    stages: list[tuple[int, ...]]
    boundaries: tuple[int, ...]
    replicas: int
    micro_batches: int
    loaded: int
    groups: Groups | None

    @classmethod
    def of(cls, run: Run) -> _Base:
        """What it is like now."""
        stage, pipeline = run.stage, run.stage.pipeline
        return cls(
            [pipeline.ranks_of(each) for each in range(stage.num_stages)], stage.partition, stage.module.replica.count,
            pipeline.num_micro_batches, pipeline.reading.num_loaded, Groups(stage.module),
        )


class Forming:
    """Lets ranks form a world of their own; all methods are collective over those that are left.

    Args:
        run: of this rank.

    Attributes:
        staying: of each stage of the newest world the one whose layers it keeps, as they were counted at the first try.
        wanted_stages: that there were before some were lost; 0: none is missing.
        remarks: on the newest world, for the log.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stage = run, run.stage
        self._base: _Base | None = None
        self.staying: list[int] = []
        self.wanted_stages = 0
        self.remarks: list[str] = []

    def form(self, heartbeat: Heartbeat, lost: Sequence[int]) -> None:
        """Meet, and form a world.

        Args:
            heartbeat: of the world that broke.
            lost: its ranks that are known to be lost.

        Raises:
            CantGoOnError: on every rank, if there is no place for them.
            NoMeetingError: on this rank, if it must not go on.
            NobodyMetError: if not all came.
        """
        self._base = base = self._base or _Base.of(self._run)
        agreed = self._meet(heartbeat, lost, base)
        names = [one.identity for one in heartbeat.people]
        living = sorted(names.index(member) for member in agreed.members)
        miss_no_more(heartbeat, [rank for rank in range(len(names)) if rank not in living])
        seating = self._seated(base, living, agreed)
        self._form(heartbeat, agreed, seating, base)
        self.wanted_stages = max(self.wanted_stages, len(base.stages))
        self._base = None

    def _meet(self, heartbeat: Heartbeat, lost: Sequence[int], base: _Base) -> Agreed:
        miss_no_more(heartbeat, lost)
        meeting = Meeting(
            identity(), heartbeat.people, lambda people: ask_people(people, PATIENCE_S),
            {heartbeat.people[rank].identity for rank in lost}, news=lambda _: self._needs(base),
        )
        return meeting.meet({"generation": generation(), "opens": self._stage.pipeline.reading.open_at is not None})

    # -- who has which place ------------------------------------------------------------------

    def _seated(self, base: _Base, living: Sequence[int], agreed: Agreed) -> Seating:
        fewer = self._fewer(base)
        reads_any = all(said["opens"] for said in agreed.said.values())
        seating = seated(
            base.stages, living, reads_any=reads_any, fewer=fewer,
            fits=lambda found: self._fits(found, base, agreed.news),
        )
        self.remarks = []
        passed = [n for n in range(base.replicas - 1, seating.size, -1) if n not in fewer.numbers and n <= len(living)]
        if seating.size < base.replicas and passed:
            self.remarks.append(
                f"the {base.replicas * base.loaded} micro-batches of a batch can't be dealt evenly to "
                f"{' or '.join(map(str, passed))} replicas"
            )
        if not self._fits(seating, base, agreed.news):
            self.remarks.append("some stages hold more than memory_cap_bytes")
        return seating

    def _fewer(self, base: _Base) -> Fewer:
        wanted = self._run.config.survive.fewer_replicas
        if wanted == "never":
            return Fewer(why_not='set survive.fewer_replicas to "last"')
        problem = no_fewer_replicas(self._run)
        if problem:
            return Fewer(why_not=problem)
        numbers = tuple(fewer_replicas(base.replicas, base.loaded, base.micro_batches))
        return Fewer(numbers, wanted == "first")

    def _needs(self, base: _Base) -> dict[str, Any]:
        """Bytes of every layer, where stages have a cap; of the rank that leads the meeting they count."""
        profile, optimizer = self._run.balancer.smoothed(), self._stage.optimizer
        if self._run.config.memory_cap_bytes is None or profile is None:
            return {}
        return {
            "kept": [layer.parameter_bytes + layer.gradient_bytes for layer in profile.layers],
            "optimizer": [layer.optimizer_state_bytes for layer in profile.layers],
            "activations": list(profile.activation_bytes()),
            "is_shared_out": optimizer is not None and optimizer.shares_out,
        }

    def _fits(self, seating: Seating, base: _Base, needs: Mapping[str, Any]) -> bool:
        caps = self._run.config.memory_cap_bytes
        if caps is None or not needs:
            return True
        growth = base.replicas / seating.size if needs["is_shared_out"] else 1.0
        state = [kept + round(growth * own) for kept, own in zip(needs["kept"], needs["optimizer"], strict=True)]
        memory = StageMemory(
            state, needs["activations"], base.micro_batches * base.replicas // seating.size,
            caps if isinstance(caps, int) else [caps[origin] for origin in seating.origins],
        )
        needed = memory.stage_bytes(self._boundaries(seating, base))
        return all(need <= cap for need, cap in zip(needed, memory.caps(len(needed)), strict=True))

    def _boundaries(self, seating: Seating, base: _Base) -> tuple[int, ...]:
        return without_stages(base.boundaries, seating.origins, self._run.balancer.pinned)

    # -- the world ----------------------------------------------------------------------------

    def _form(self, heartbeat: Heartbeat, agreed: Agreed, seating: Seating, base: _Base) -> None:
        guard = self._stage.guard
        people = [one for one in heartbeat.people if one.identity in agreed.members]
        number = max(int(said["generation"]) for said in agreed.said.values()) + 1
        with guard.naming_lost_ranks(_DOING):
            if seating.leftover:
                everybody = World(agreed.members, agreed.place, number, lost=lambda: _ended(people))
                self._let_go(heartbeat, everybody, seating)
                number += 1
            self._renumber(heartbeat, seating, base, number)
            made = self._make_heartbeat()
        why = fatal.Verdict((), "the others went on without this rank, which did not answer; it ends", lost=True)
        heartbeat.stay_silent(why)
        guard.heartbeat = adopt_heartbeat(made)
        fatal.survive(None if made is None else made.break_off)
        fatal.mourn(())
        known = self.staying or list(range(len(base.stages)))
        self.staying = [known[stage] for stage in seating.origins]

    def _renumber(self, heartbeat: Heartbeat, seating: Seating, base: _Base, number: int) -> None:
        """Begin the world, with as many replicas of as many stages as have a place, and a batch of the same samples."""
        module, pipeline = self._stage.module, self._stage.pipeline
        replicas = base.replicas * seating.size // len(base.stages[0])  # else it is a stage's ranks that are fewer
        members = in_rank_order(
            pipeline, [[heartbeat.people[rank] for rank in row] for row in seating.rows], replicas
        )
        world = World([one.identity for one in members], members[0].place, number, lost=lambda: _ended(members))
        module.is_absent = True
        try:
            renumber(
                pipeline, world, Placement.from_boundaries(self._boundaries(seating, base)),
                sizes={"data": replicas}, old=base.groups,
            )
            self._base = replace(base, groups=None)
        finally:
            module.is_absent = False
        module.surroundings.replica = module.replica
        pipeline.set_micro_batches(base.micro_batches * base.replicas // replicas, pipeline.micro_batch_size)
        pipeline.measure_norm(module.layer_of_parameter, len(module.layer_names()))
        self._run.snapshots.micro_batches = pipeline.num_micro_batches

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
        miss_no_more(heartbeat, seating.leftover)

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


def no_fewer_replicas(run: Run) -> str:
    """Why a run can't go on with fewer replicas, with the remedy; empty if it can.

    Args:
        run: of this rank, the same on every rank.
    """
    if run.stage.module.owned:
        return "do without parameters that replicas own (own_by_replica), of which each replica holds another part"
    if len(run.stage.pipeline.ranks_of(0)) != run.stage.module.replica.count:
        return "do without tensor parallelism, where a replica is more than one rank"
    return ""


def miss_no_more(heartbeat: Heartbeat, ranks: Sequence[int]) -> None:
    """Take note that some ranks will not be heard of again.

    Args:
        heartbeat: of their world.
        ranks: that are lost, or leave.
    """
    heartbeat.forget(ranks)
    fatal.mourn({rank for rank in range(len(heartbeat.people)) if not heartbeat.misses(rank)})


def _ended(people: Sequence[Person]) -> str:
    answers = ask_people(people, PATIENCE_S)
    gone = [name for name, answer in answers.items() if answer is Answer.ENDED]
    return f"members {', '.join(gone)} of the world to be have ended" if gone else ""
