"""Training on more ranks: plan, let newcomers in, renew what is counted by stage, and let layers move to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynpipe_ds.events import RepackEvent
from dynpipe_ds.host.coordinates import present_stage
from dynpipe_ds.joining.door import DOOR_FILE
from dynpipe_ds.joining.doorway import Doorway
from dynpipe_ds.joining.grow import Grow
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.partition import InfeasiblePartitionError, StageMemory, optimal
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.agreement import from_first, same_everywhere
from dynpipe_ds.repacking.live import RepackError

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_DOING = "workers joined"


def partition_for(
    profile: PipelineProfile, num_stages: int, *, memory_cap_bytes: int | Sequence[int] | None = None,
    pinned: Sequence[int] = (), speeds: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Boundaries of a longer pipeline with the smallest bottleneck (:func:`dynpipe_ds.partition.optimal`).

    Args:
        profile: seconds and bytes of every layer.
        num_stages: of the longer pipeline.
        memory_cap_bytes: most bytes a stage may hold: one number.
        pinned: forbidden cuts.
        speeds: relative speed of every stage's workers, as they will be.

    Raises:
        RepackError: with value, rule and remedy, if there is none.
    """
    if isinstance(memory_cap_bytes, Sequence):
        raise RepackError(
            f"memory_cap_bytes = {list(memory_cap_bytes)}: a list has no entry for stages that join; give one number"
        )
    memory = None if memory_cap_bytes is None else StageMemory(
        profile.state_bytes(), profile.activation_bytes(), profile.num_micro_batches, memory_cap_bytes
    )
    try:
        plan = optimal(profile.costs("time"), num_stages, memory=memory, pinned=pinned, speeds=speeds)
    except InfeasiblePartitionError as error:
        raise RepackError(f"re-packing to {num_stages} stages is not possible: {error}") from error
    return plan.boundaries


class Growing:
    """Lets a pipeline get longer while it trains; all methods are collective over all ranks.

    Args:
        run: the run.

    Attributes:
        client_state: gives the user's own values for newcomers; the first rank's count.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stage = run, run.stage
        self._doorway: Doorway | None = None
        self.client_state: Callable[[], Mapping[str, Any]] = dict

    def start(self, *, joined: bool = False) -> None:
        """Open the doors, if the section asks for it; or tell newcomers how the job is now.

        Args:
            joined: whether this process has joined, so that all others have doors.

        Raises:
            ValueError: on every rank, if there can be no door.
        """
        if joined or self._run.config.elastic.enabled or DOOR_FILE in os.environ:
            self._doorway = self._doorway or Doorway(self._run)
            self._doorway.settle()

    def end(self) -> None:
        """Close this rank's door; not collective."""
        if self._doorway is not None:
            self._doorway.close()
            self._doorway = None

    def num_waiting(self) -> int:
        """How many workers fit and wait; the same on every rank."""
        if self._doorway is None:
            return 0
        door = self._doorway.door
        return from_first(lambda: 0 if door is None else len(door.waiting()))

    def grow(
        self, num_stages: int, *, checks: Callable[[], object], settle: Callable[[Mapping[str, Any]], None],
        renew: Callable[[], None],
    ) -> RepackEvent:
        """Go on with more stages.

        Args:
            num_stages: more than now.
            checks: what else has to be true before.
            settle: renews what is counted by stage, given what the section gives for each stage.
            renew: renews what knows of ranks, with those that have joined; collective.

        Returns:
            What happened.

        Raises:
            RuntimeError: if no batch was profiled yet.
            RepackError: on every rank, if it can't be done or failed; training can go on as it was.
        """
        run, stage, clock = self._run, self._stage, self._run.clock
        if self._doorway is None or self._doorway.door is None:
            raise RepackError(
                f"re-packing from {stage.num_stages} to {num_stages} stages needs workers that join; set "
                '"dynamic_pipeline": {"elastic": {"enabled": true}} and start them with dynpipe join'
            )
        before = stage.partition
        with stage.guard.naming_lost_ranks(_DOING):
            with clock.work("decide") as deciding:
                boundaries, per_stage = self._plan(num_stages)
                same_everywhere(boundaries, "the longer pipeline", stage.device)
            growing_s = clock.now_s()
            grow = Grow(run, self._doorway.door, boundaries, self.client_state)
            grow.prepare(per_stage, checks)
        run.snapshots.pause()
        with stage.guard.no_way_back(_DOING):
            with clock.work("regroup"):
                came = grow.go_on()
                self._doorway.settle()
            settle(per_stage if came else {})
        regroup_s = clock.now_s() - growing_s
        with stage.guard.no_way_back(_DOING):
            renew()
        if not came:
            raise RepackError("a worker that was joining has ended; training goes on without it")
        migrate_s = self.move(boundaries)
        event = RepackEvent(
            batch=run.num_batches, before=before, after=stage.partition, released_ranks=(), released=False,
            reason=f"{len(grow.joined_ranks)} workers joined", plan_s=deciding.seconds, migrate_s=migrate_s,
            regroup_s=regroup_s, joined_ranks=grow.joined_ranks,
        )
        run.overhead.repacking_s += event.seconds
        return event

    def move(self, boundaries: Sequence[int]) -> float:
        """Let layers move to the stages that have joined; where that fails they go on without layers.

        Args:
            boundaries: the same on every rank.

        Returns:
            Seconds that it took.
        """
        with self._run.clock.work("move") as moving:
            try:
                moving.num_bytes = self._run.move_layers(Placement.from_boundaries(boundaries))
            except MigrationError as error:
                self._run.warn_once(f"workers have joined, but no layers could move to them ({error})", "join")
        return moving.seconds

    def _plan(self, num_stages: int) -> tuple[tuple[int, ...], dict[str, Any]]:
        """Boundaries, and what the section gives for each stage, for the longer pipeline."""
        run = self._run
        profile = run.balancer.smoothed()
        if profile is None:
            raise RuntimeError("there is no profile to re-pack by; train one batch first")
        num_layers = len(profile.layers)
        if num_stages > num_layers:
            raise RepackError(
                f"num_stages = {num_stages}: {num_layers} layers can't fill them; give {num_layers} or less"
            )
        if self._stage.optimizer is None:
            raise RepackError("layers can't move without an optimizer to tell: make it before the pipeline grows")
        if self._stage.pipeline.sizes.get("model", 1) > 1:
            raise RepackError("workers can't join a pipeline with tensor parallelism; restart from a checkpoint")
        per_stage: dict[str, Any] = {}
        speeds = run.balancer.speeds
        if speeds is not None and isinstance(run.config.stage_speeds, list):
            per_stage["stage_speeds"] = speeds = with_new(speeds, num_stages)
        elif speeds is not None:
            speeds = with_new(speeds, num_stages)
        boundaries = partition_for(
            profile, num_stages, memory_cap_bytes=run.config.memory_cap_bytes, pinned=run.balancer.pinned,
            speeds=speeds,
        )
        return boundaries, per_stage


def with_new(speeds: Sequence[float], num_stages: int) -> list[float]:
    """Speeds of a longer pipeline: what is not known of a new stage is taken to be the usual, 1.

    Args:
        speeds: of every present stage.
        num_stages: of the longer pipeline.
    """
    present = [present_stage(stage, len(speeds), num_stages) for stage in range(num_stages)]
    return [1.0 if stage is None else speeds[stage] for stage in present]
