"""Training on more ranks: plan, let newcomers in, renew what is counted by stage, and let layers move to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynpipe_ds.events import RepackEvent
from dynpipe_ds.joining.address import DOOR_FILE, Address
from dynpipe_ds.joining.doorway import Doorway
from dynpipe_ds.joining.grow import Grow
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.agreement import from_first
from dynpipe_ds.repacking.live import RepackError
from dynpipe_ds.repacking.outcome import Repacking

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_DOING = "workers joined"


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
        is_open = self._doorway is not None  # a worker that has joined need not find anything in its surroundings
        if joined or is_open or self._run.config.elastic.enabled or DOOR_FILE in os.environ:
            self._doorway = self._doorway or Doorway(self._run)
            self._doorway.settle()

    @property
    def may_join(self) -> bool:
        """Whether there is a door."""
        return self._doorway is not None

    def end(self) -> None:
        """Close this rank's door; not collective."""
        if self._doorway is not None:
            self._doorway.close()
            self._doorway = None

    def door_of(self, rank: int) -> tuple[Address | None, str]:
        """Where a rank's door is, and what it takes to be let in; no address if there is no door.

        Args:
            rank: of the present world.
        """
        if self._doorway is None or not self._doorway.addresses:
            return None, ""
        return self._doorway.addresses[rank], self._doorway.token

    def num_waiting(self) -> int:
        """How many workers fit and wait, and can be let in; the same on every rank."""
        if self._doorway is None or self._stage.pipeline.reading.lacks_replicas:
            return 0
        door = self._doorway.door
        return from_first(lambda: 0 if door is None else len(door.waiting()))

    def check_open(self, num_stages: int) -> None:
        """Refuse to grow where nobody can wait.

        Args:
            num_stages: more than now.

        Raises:
            RepackError: on every rank, with the remedy.
        """
        stage = self._stage
        if self._doorway is None or self._doorway.door is None:
            raise RepackError(
                f"re-packing from {stage.num_stages} to {num_stages} stages needs workers that join; set "
                '"dynamic_pipeline": {"elastic": {"enabled": true}} and start them with dynpipe join'
            )
        if stage.pipeline.reading.lacks_replicas:
            raise RepackError(
                "workers can't join where replicas were lost: the others train their micro-batches; restart from a "
                "checkpoint to have as many replicas as before"
            )
        if stage.optimizer is None:
            raise RepackError("layers can't move without an optimizer to tell: make it before the pipeline grows")
        if stage.pipeline.sizes.get("model", 1) > 1:
            raise RepackError("workers can't join a pipeline with tensor parallelism; restart from a checkpoint")

    def grow(
        self, chosen: Repacking, plan_s: float, per_stage: Mapping[str, Any], *, checks: Callable[[], object],
        settle: Callable[[bool], None], renew: Callable[[], None],
    ) -> RepackEvent:
        """Go on with more stages.

        Args:
            chosen: boundaries and micro-batches of the longer pipeline, the same on every rank.
            plan_s: seconds that deciding took.
            per_stage: what the section gives for each stage, as it will be.
            checks: what else has to be true before.
            settle: renews what is counted by stage, given whether the newcomers came.
            renew: renews what knows of ranks, with those that have joined; collective.

        Returns:
            What happened.

        Raises:
            RepackError: on every rank, if it can't be done or failed; training can go on as it was.
        """
        run, stage, clock = self._run, self._stage, self._run.clock
        self.check_open(chosen.num_stages)
        assert self._doorway is not None and self._doorway.door is not None, "checked"
        before, growing_s = stage.partition, clock.now_s()
        with stage.guard.naming_lost_ranks(_DOING):
            grow = Grow(run, self._doorway.door, chosen, self.client_state)
            grow.prepare(per_stage, checks)
        run.snapshots.pause()
        with stage.guard.no_way_back(_DOING):
            with clock.work("regroup"):
                came = grow.go_on()
                self._doorway.settle()
            settle(came)
        regroup_s = clock.now_s() - growing_s
        with stage.guard.no_way_back(_DOING):
            renew()
        if not came:
            raise RepackError("a worker that was joining has ended; training goes on without it")
        migrate_s = self.move(chosen.boundaries)
        return RepackEvent(
            batch=run.num_batches, before=before, after=stage.partition, released_ranks=(), released=False,
            reason=chosen.reason, plan_s=plan_s, migrate_s=migrate_s, regroup_s=regroup_s,
            joined_ranks=grow.joined_ranks,
        )

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
