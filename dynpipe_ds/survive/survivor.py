"""The way from a lost rank to the next batch, on one rank that is left.

The main thread comes here with a :class:`~dynpipe_ds.ranks.fatal.RankLostError`, wherever it waited: connections were
shut down (``ranks/connections.py``). Survivors form a world of their own (:mod:`forming`), go back to the newest
snapshot that they hold together, with the layers of lost stages on their neighbours, and repeat the batches since. Who
is lost meanwhile lets them begin again: until the batches are repeated, nothing that is needed has changed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from dynpipe_ds.host.broken import abandon_batch
from dynpipe_ds.host.world import NobodyMetError, identity
from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.agreement import gather, together
from dynpipe_ds.ranks.connections import can_break_off
from dynpipe_ds.ranks.fatal import RankLostError
from dynpipe_ds.ranks.meeting import NoMeetingError
from dynpipe_ds.ranks.place import open_place
from dynpipe_ds.snapshots.restore import newest, restore
from dynpipe_ds.snapshots.shared_data import SnapshotError
from dynpipe_ds.survive.forming import Forming, no_fewer_replicas
from dynpipe_ds.survive.reload import reload
from dynpipe_ds.survive.seats import CantGoOnError
from dynpipe_ds.telling import log, warn

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_MOST_TRIES = 8
_WHY_NOT = (CantGoOnError, NoMeetingError, SnapshotError)


class Survivor:
    """Lets this rank go on when others are lost.

    Args:
        run: of this rank.

    Attributes:
        is_on: whether it would.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stage = run, run.stage
        self.is_on = False
        self._forming = Forming(run)
        self._reached = 0
        self._was_reading: bool | None = None
        self._has_looked_at_data = False

    @property
    def wanted_stages(self) -> int:
        """Stages that there were before some were lost; 0: none is missing."""
        return self._forming.wanted_stages

    def start(self) -> None:
        """Get ready if the section says so; collective over all ranks.

        Raises:
            ValueError: on every rank, if some rank can't leave broken process groups, or ``survive.fewer_replicas``
                asks for what can't be.
        """
        heartbeat = self._stage.guard.heartbeat
        self._has_looked_at_data = False  # workers that join are asked, too
        if not self._run.config.survive.enabled or dist.get_world_size() == 1:
            return
        if heartbeat is None:
            self._run.warn_once("survive.enabled = true: the ranks can't ask each other, so a loss ends all", "survive")
            return
        if self._run.config.survive.silent_s is not None:
            heartbeat.be_patient(self._run.config.survive.silent_s)
        self._check_fewer_replicas()
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

    def _check_fewer_replicas(self) -> None:
        problem = no_fewer_replicas(self._run)
        if self._run.config.survive.fewer_replicas == "first" and self._stage.module.replica.count > 1 and problem:
            raise ValueError(
                f'survive.fewer_replicas = "first": there can\'t be fewer replicas here; {problem}, or set it to "last"'
            )

    def begin_batch(self) -> None:
        """Look once whether the data of lost replicas could be read; collective over all ranks.

        Raises:
            ValueError: on every rank, if ``survive.fewer_replicas`` relies on it and it can't.
        """
        if not self.is_on or self._has_looked_at_data:
            return
        self._has_looked_at_data = True
        is_wanted = self._run.config.survive.fewer_replicas == "first" and self._stage.module.replica.count > 1
        if is_wanted and not all(gather(self._stage.pipeline.reading.open_at is not None)):
            raise ValueError(
                'survive.fewer_replicas = "first": the data of a lost replica can\'t be read by the others; say by '
                'engine.data_at, on every rank and before the first batch, how to, or set it to "last"'
            )

    def follow(self, *, fewer: bool) -> None:
        """Take note that the ranks are others, on purpose; collective over all ranks.

        Args:
            fewer: whether some have left.
        """
        self._forming.wanted_stages = 0 if fewer else max(gather(self._forming.wanted_stages))
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
                self._tell(error, losses, time.monotonic() - started_s)
                return losses
        self._end(error, CantGoOnError(f"no world came about in {_MOST_TRIES} tries"))

    def _tell(self, error: RankLostError, losses: dict[int, Any], seconds: float) -> None:
        if self._stage.pipeline.rank == 0:
            remarks = "".join(f"; {remark}" for remark in self._forming.remarks)
            replicas = self._stage.module.replica.count
            of_each = f" of {replicas} replicas" if replicas > 1 else ""
            warn(
                f"survive: {fatal.names(error.ranks)} was lost; training goes on with {self._stage.num_stages} "
                f"stages{of_each}, {list(self._stage.partition)}{remarks}; batches {sorted(losses)} were repeated; "
                f"{seconds:.1f} s"
            )

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
        if self._was_reading is None:
            self._was_reading = self._stage.pipeline.reading.is_here
        self._forming.form(heartbeat, error.ranks)
        return self._go_back()

    # -- the state ----------------------------------------------------------------------------

    def _go_back(self) -> dict[int, Any]:
        run, reading = self._run, self._stage.pipeline.reading
        with self._stage.guard.naming_lost_ranks("training went back to a snapshot"):
            run.repacker.goes_on_with(self._forming.staying)
            self._forming.staying = []
            run.repeating.share_results()
            own = max(self._reached, reading.kept.num_noted)
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
        reading = self._stage.pipeline.reading
        if reading.is_here and self._was_reading is False:
            reading.missed(missed)
            reading.catch_up()
            self._was_reading = True
