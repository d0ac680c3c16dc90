"""Training on fewer or more ranks: decide, shrink or grow, renew what is counted by stage."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dynpipe_ds.events import RepackEvent
from dynpipe_ds.joining.address import Address
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.ranks.agreement import gather, same_everywhere, together
from dynpipe_ds.release import Constraints, ReleaseError
from dynpipe_ds.release.notice import Notice
from dynpipe_ds.repacking.confirming import Confirmation
from dynpipe_ds.repacking.decision import Decide, Wish, fewest_stages, keeping_last, to_stages
from dynpipe_ds.repacking.first_fit import first_fit
from dynpipe_ds.repacking.giving_back import GivingBack
from dynpipe_ds.repacking.growing import Growing
from dynpipe_ds.repacking.leaving import without
from dynpipe_ds.repacking.letting_in import LettingIn
from dynpipe_ds.repacking.live import RepackError, Shrink
from dynpipe_ds.repacking.micro_batches import Scaling
from dynpipe_ds.repacking.outcome import Refusal, Repacking
from dynpipe_ds.repacking.request import Holders, Request
from dynpipe_ds.repacking.survivors import Workers
from dynpipe_ds.telling import tell_all

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_SHARE_FOR_PLANNING = 0.01
"""Deciding may cost this share of run: where it takes long, it is done less often."""

FIRST_PAUSE_S = 3.0
"""What the first change is expected to take; the shrinks of our tests took 0.1 to 0.3 s."""

_runs: weakref.WeakSet[Run] = weakref.WeakSet()


class Repacker:
    """Lets a pipeline get shorter or longer while it trains; deciding and doing is collective over all ranks.

    Attributes:
        giving_back: gives the freed workers back.
        growing: lets workers join.
        callbacks: called after re-packing, also on the ranks that leave.
        scaling: how seconds follow from the size of micro-batches.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stage = run.stage
        self.callbacks: list[Callable[[RepackEvent], Any]] = []
        self._confirmation = Confirmation()
        self._most_stages = 0
        self._pause_s = FIRST_PAUSE_S
        self.scaling = Scaling(1)
        self.growing = Growing(run)
        self._letting_in = LettingIn(run, self._carry_out)
        self._notice: Notice | None = None
        self._known_to_go: set[int] = set()
        self._next_batch = run.config.repack.earliest_batch

    def start(self) -> None:
        """Begin, after DeepSpeed's constructor.

        Raises:
            ValueError: on every rank, if the release back-end can't work on some rank.
        """
        self.scaling = Scaling(self._stage.pipeline.micro_batch_size)
        self.giving_back = GivingBack(self._run.config.repack.release, self._stage.device)
        leave_on = self._run.config.repack.leave_on
        if leave_on is not None:
            self._notice = together(lambda: Notice(leave_on), self._stage.device, ValueError)
        _runs.add(self._run)

    def has_joined(self, boundaries: Sequence[int], before: Sequence[int], num_micro_batches: int) -> None:
        """Do what the ranks do that were there before, after this process has entered; layers come to it.

        Args:
            boundaries: of the longer pipeline, the same on every rank.
            before: of the pipeline as it was.
            num_micro_batches: M, of the batches to come.
        """
        with self._stage.guard.no_way_back("workers joined"):
            self.growing.start(joined=True)
            self._stage.settle()
            if num_micro_batches != self._stage.pipeline.num_micro_batches:
                self._stage.pipeline.set_micro_batches(num_micro_batches)
                self._run.balancer.expect_change()
            self._renew()
        migrate_s = self.growing.move(boundaries)
        self._letting_in.has_joined()
        self._has_changed(len(before) - 1, len(boundaries) - 1, migrate_s)

    def open_doors(self) -> None:
        """Let workers knock, if the section asks for it; as soon as the engine is complete.

        Raises:
            ValueError: on every rank, if there can be no door.
        """
        self.growing.start()
        self.giving_back.check_door(has_door=self.growing.may_join)

    def end(self) -> None:
        """The process groups are the engine's no more."""
        _runs.discard(self._run)
        self.growing.end()
        if self._notice is not None:
            self._notice.stop()

    def wants_profile(self, batch: int) -> bool:
        """Tell whether to profile a batch, the same on every rank: a wish is confirmed by new profiles only."""
        balancer, window = self._run.balancer, self._run.config.profile_batches
        confirms = self._confirmation.wished is not None and self._next_batch - batch < window
        return confirms and not balancer.is_held(batch)

    def repack(self, num_stages: int) -> RepackEvent:
        """Go on with fewer stages, whatever throughput that costs, or with more, as soon as workers wait.

        Does not return on ranks that are not needed.

        Args:
            num_stages: n, at least 1 and another number than now.

        Raises:
            RuntimeError: if no batch was profiled yet.
            RepackError: on every rank, if it can't be done or failed; training can go on with all ranks.
        """
        if not self._run.balancer.newest:
            raise RuntimeError("there is no profile to re-pack by; train one batch first")
        if num_stages > self._stage.num_stages:
            self.growing.check_open(num_stages)
        with self._run.clock.work("decide") as deciding:
            chosen = self._choose_workers(lambda request: to_stages(request, num_stages))
        if isinstance(chosen, Refusal):
            raise RepackError(f"re-packing to {num_stages} stages is not possible: {chosen.reason}")
        return self._carry_out(chosen, deciding.seconds)

    # -- deciding -----------------------------------------------------------------------------

    def repack_if_wanted(self) -> None:
        """Change the number of stages if the configuration asks for it; a failure leaves all ranks training on."""
        run = self._run
        config, balancer, batch = run.config.repack, run.balancer, run.num_batches - 1
        if not config.enabled or not balancer.is_ready or batch < self._next_batch or balancer.is_held(batch):
            return
        try:
            with run.clock.work("decide") as deciding:
                chosen = self._choose_workers(self._decide)
            plan_s = max(gather(deciding.seconds))
            wanted = self._is_wanted(chosen)
            self._next_batch = batch + self._batches_until_next_decision(plan_s)
            if not wanted:
                run.overhead.planning_s += plan_s
                return
            assert isinstance(chosen, Repacking)
            do = self._letting_in.choose if chosen.joining_stages else self._carry_out
            do(chosen, plan_s)
        except (RepackError, ReleaseError) as error:  # raised only before the point of no return
            self._has_failed(error)

    def let_in(self, wanted_stages: int) -> None:
        """As a batch begins, let workers in that were decided on or that take the place of lost ones; collective.

        Args:
            wanted_stages: that there were before some were lost; 0: none is missing.
        """
        try:
            self._letting_in.begin_batch(wanted_stages, self.growing.num_waiting, self.repack)
        except (RepackError, ReleaseError) as error:
            self._has_failed(error)

    def _has_failed(self, error: Exception) -> None:
        self._next_batch = 2 * self._run.num_batches + 6
        self._run.warn_once(f"re-packing after batch {self._run.num_batches} failed ({error})", "repack")

    def leave_if_told(self) -> None:
        """Go on without workers that were warned that they are taken away; does not return on them.

        Where that can't be, or fails, training goes on with all ranks for as long as they are there.
        """
        if self._notice is None:
            return
        going, profile = self._who_goes(), self._run.balancer.smoothed()
        if not going - self._known_to_go or profile is None:  # without a profile, after the next batch
            return
        self._known_to_go = going
        try:
            with self._run.clock.work("decide") as deciding:
                chosen = without(self._request(profile, Constraints()), going)
            if isinstance(chosen, Refusal):
                raise RepackError(chosen.reason)
            self._agree_on(chosen)
            self._carry_out(chosen, deciding.seconds, is_taken=True)
        except RepackError as error:
            self._run.warn_once(f"workers were not left in time ({error})", "notice")

    @property
    def is_warned(self) -> bool:
        """Whether this process was told that it is taken away."""
        return self._notice is not None and self._notice.has_come

    def _who_goes(self) -> set[int]:
        """Ranks that were warned, the same on every rank."""
        warned = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=self._stage.device)
        warned[dist.get_rank()] = int(self.is_warned)
        dist.all_reduce(warned)
        return {rank for rank, number in enumerate(warned.tolist()) if number}

    def _batches_until_next_decision(self, plan_s: float) -> int:
        """Soon, if only the confirmation is missing; else as deciding can be afforded."""
        newest = self._run.balancer.newest[-1]
        batch_s = max((stage.batch_s for stage in newest.stages), default=0.0) or plan_s
        affordable = 0 if self._confirmation.wished is not None else math.ceil(plan_s / (_SHARE_FOR_PLANNING * batch_s))
        return max(self._run.config.profile_batches, affordable)

    def _decide(self, request: Request) -> Repacking | Refusal:
        config, present = self._run.config.repack, request.num_stages
        if config.method == "first_fit":
            return first_fit(request, target_stages=config.target_stages, min_stages=config.min_stages)
        if config.target_stages is not None:
            return to_stages(request, min(config.target_stages, present + request.more_stages))
        batch_s = request.batch_s(request.current, range(present))
        return fewest_stages(request, Wish(
            tolerance=config.tolerance, min_gain=config.least_gain, min_stages=config.min_stages,
            max_stages=config.max_stages, horizon_s=config.horizon_batches * batch_s, pause_s=self._pause_s,
        ))

    def _is_wanted(self, chosen: Repacking | Refusal) -> bool:
        """A target at once; what was measured when it was said often enough."""
        target, present = self._run.config.repack.target_stages, self._stage.num_stages
        if isinstance(chosen, Refusal):
            self._confirmation.hear(present, None)
            if target is not None and target < present:
                self._run.warn_once(
                    f"re-packing to repack.target_stages is not possible: {chosen.reason}", "target"
                )
            return False
        return self._confirmation.hear(present, chosen.num_stages) or target is not None

    def _choose_workers(self, decide: Decide) -> Repacking | Refusal:
        """Decide, the same on every rank."""
        rules, stage, run = self.giving_back.constraints(), self._stage, self._run
        profile = run.balancer.smoothed()
        assert profile is not None, "asked after a batch was profiled"
        more_stages = self.growing.num_waiting() // len(stage.pipeline.ranks_of(0))
        if stage.num_stages == 1 and not more_stages:
            return Refusal("there is one stage, nothing can be given back, and no workers wait")
        self._most_stages = max(self._most_stages, stage.num_stages + more_stages)
        request = replace(
            self._request(profile, rules), more_stages=more_stages, most_stages=self._most_stages,
            others=self._in_other_micro_batches(profile),
        )
        chosen = decide(request)
        if isinstance(chosen, Refusal):
            return chosen
        if chosen.num_stages < stage.num_stages:
            chosen = keeping_last(decide, request, chosen)
        self._agree_on(chosen)
        return chosen

    def _request(self, profile: PipelineProfile, rules: Constraints) -> Request:
        run, stage = self._run, self._stage
        ranks = tuple(stage.pipeline.ranks_of(s) for s in range(stage.num_stages))
        workers = Workers(ranks, self.giving_back.nodes, self.giving_back.positions)
        return Request(
            profile=profile, current=stage.partition, workers=workers,
            constraints=rules, memory_cap_bytes=run.config.memory_cap_bytes, stage_speeds=run.balancer.speeds,
            pinned=run.balancer.pinned,
        )

    def _agree_on(self, chosen: Repacking) -> None:
        holders = [-1 if holder is None else holder for holder in chosen.holders]
        decided = [chosen.num_stages, chosen.num_micro_batches, *chosen.boundaries, *holders]
        same_everywhere(decided, "whom to re-pack onto", self._stage.device)

    def micro_batch_s(self) -> float:
        """Seconds that all layers take for one micro-batch; 0 where that is not known."""
        profile = self._run.balancer.smoothed()
        return 0.0 if profile is None else math.fsum(profile.costs("time"))

    def _in_other_micro_batches(self, profile: PipelineProfile) -> tuple[PipelineProfile, ...]:
        if not self._run.config.repack.adapt_micro_batches:
            return ()
        size = self._stage.pipeline.micro_batch_size
        self.scaling.arrives(size, self.micro_batch_s())
        return self.scaling.alternatives(profile, size)

    # -- doing it -----------------------------------------------------------------------------

    def _carry_out(self, chosen: Repacking, plan_s: float, *, is_taken: bool = False) -> RepackEvent:
        """Do what was chosen; does not return on ranks that are released.

        Args:
            chosen: the change.
            plan_s: seconds that deciding took.
            is_taken: whether the workers that go are taken away, so that there is nothing to give back.
        """
        if chosen.joining_stages:
            event = self._grow(chosen, plan_s)
        else:
            event = self._shrink(chosen, plan_s, is_taken=is_taken)
        self._run.overhead.repacking_s += event.seconds
        self._has_changed(len(event.before) - 1, len(event.after) - 1, event.seconds)
        self._run.journal.repacked(event)
        tell_all(self.callbacks, event, "on_repack")
        return event

    def _has_changed(self, before: int, after: int, pause_s: float) -> None:
        """Take note of what is the same on every rank, also on those that have joined."""
        self._known_to_go = set()  # ranks are numbered anew
        self._pause_s = max(gather(pause_s))
        self._confirmation.carried_out(before, after)

    def _grow(self, chosen: Repacking, plan_s: float) -> RepackEvent:
        """Go on with workers that wait."""
        return self.growing.grow(
            chosen, plan_s, self._of_each(chosen.holders), checks=lambda: self._check(chosen),
            settle=lambda came: self._settle(chosen) if came else self._count_stages_anew({}),
            renew=self._renew,
        )

    def _shrink(self, chosen: Repacking, plan_s: float, *, is_taken: bool) -> RepackEvent:
        """Go on with the chosen stages; does not return on the ranks of the others."""
        guard, clock, before = self._stage.guard, self._run.clock, self._stage.partition
        doing = "layers were moved to fewer ranks"
        with guard.naming_lost_ranks(doing), clock.work("move") as moving:
            shrink = Shrink(self._stage, self._run.move_layers, chosen.surviving_stages, chosen.boundaries)
            moving.num_bytes = shrink.prepare(lambda: self._check_before_shrinking(chosen, is_taken=is_taken))
        event = RepackEvent(
            batch=self._run.num_batches, before=before, after=chosen.boundaries,
            released_ranks=chosen.released_ranks, released=not shrink.stays, reason=chosen.reason, plan_s=plan_s,
            migrate_s=moving.seconds, regroup_s=0.0,
        )
        self._run.snapshots.pause()
        with guard.no_way_back(doing):
            if not shrink.stays:
                way_out = self.giving_back.way_out(*self.door_of(0), is_taken=is_taken)
                self.growing.end()
                shrink.leave(lambda: tell_all(self.callbacks, event, "on_repack"), way_out)
            regrouping_s = clock.now_s()
            with clock.work("regroup"):
                shrink.go_on()
        with guard.no_way_back(doing):  # among the ranks that stay
            self._settle(chosen)
            self._run.watch_anew(fewer=True)
            if is_taken:
                self.giving_back.went(chosen)
            else:
                self.giving_back.give_back(chosen, shrink.world)
            self.growing.start()
        return replace(event, regroup_s=clock.now_s() - regrouping_s)

    def _check_before_shrinking(self, chosen: Repacking, *, is_taken: bool) -> None:
        self._check(chosen)
        if not is_taken:
            self.giving_back.prepare(chosen)

    def _check(self, chosen: Repacking) -> None:
        self._stage.pipeline.check_micro_batches(chosen.num_micro_batches)
        others = [run for run in _runs if run is not self._run]
        if others:
            raise ValueError(
                f"{len(others)} other engine(s) of this process use the process groups that re-packing replaces; "
                "call their destroy() before"
            )

    def goes_on_with(self, staying: Sequence[int]) -> None:
        """Renew what is counted by stage or rank after ranks were lost; collective over those that are left.

        Args:
            staying: former stages that are left, ascending.
        """
        self._known_to_go = set()  # ranks are numbered anew
        self.giving_back.find_nodes()
        self.growing.start()
        self._count_stages_anew(self._of_each(tuple(staying)))  # last: it must not be done twice

    def _renew(self) -> None:
        self.giving_back.find_nodes()
        self._run.watch_anew()

    def node_name(self) -> str:
        """Of this rank's node."""
        return self.giving_back.backend.node_name()

    def door_of(self, rank: int) -> tuple[Address | None, str]:
        """Where a rank's door is, and what it takes to be let in; no address if there is no door.

        Args:
            rank: of the present world.
        """
        return self.growing.door_of(rank)

    def _settle(self, chosen: Repacking) -> None:
        """Go on in the number of micro-batches that was chosen, with stages counted anew."""
        takes_other_times = self._adapt_micro_batches(chosen.num_micro_batches)
        self._count_stages_anew(self._of_each(chosen.holders))
        if takes_other_times:
            self._run.balancer.expect_change()

    def _adapt_micro_batches(self, num_micro_batches: int) -> bool:
        """Run the same batches in another number of micro-batches, which was checked before; whether it is another."""
        pipeline = self._stage.pipeline
        if num_micro_batches == pipeline.num_micro_batches:
            return False
        self.scaling.leaves(pipeline.micro_batch_size, self.micro_batch_s())
        pipeline.set_micro_batches(num_micro_batches)
        return True

    def _of_each(self, holders: Holders) -> dict[str, Any]:
        """What is given for each stage, for those that will be; of workers that join nothing is known."""
        found: dict[str, Any] = {}
        caps, speeds = self._run.config.memory_cap_bytes, self._run.balancer.speeds
        if isinstance(caps, list):
            found["memory_cap_bytes"] = [min(caps) if holder is None else caps[holder] for holder in holders]
        if speeds is not None:
            found["stage_speeds"] = [median(speeds) if holder is None else speeds[holder] for holder in holders]
        return found

    def _count_stages_anew(self, per_stage: Mapping[str, Any]) -> None:
        """What was measured on stages, or is given for each stage, belongs to the pipeline as it was."""
        run = self._run
        run.config = run.config.model_copy(update=dict(per_stage))
        run.balancer.serve(run.config)
        self._stage.settle()
        run.profiler.sizes_changed()

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that its decisions rest on besides profiles, as plain values."""
        return {
            **self._confirmation.state_dict(), "next_batch": self._next_batch, "most_stages": self._most_stages,
            "pause_s": self._pause_s, "scaling": self.scaling.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; older checkpoints have none of it.
            same_stages: whether it comes from as many stages.
        """
        self._confirmation.load_state_dict(state, same_stages=same_stages)
        # A run that is loaded on another number of workers measures against them.
        self._most_stages = state.get("most_stages", 0) if same_stages else 0
        self._pause_s = state.get("pause_s", FIRST_PAUSE_S)
        self.scaling.load_state_dict(state.get("scaling", {}))
        self._next_batch = max(state.get("next_batch", 0), self._run.config.repack.earliest_batch)
