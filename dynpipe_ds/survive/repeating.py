"""What is done once more when ranks were lost: batches, and what ranks do together between two batches.

:class:`Repeating` stands around both. Who loses another rank inside goes on (``survivor.py``) and tries again, or takes
what others had done already. It keeps what a batch reads, and calls what acts between batches, so that a repeated batch
finds what it found the first time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.ranks.fatal import RankLostError
from dynpipe_ds.snapshots.between import BetweenBatches
from dynpipe_ds.snapshots.restore import newest, restore
from dynpipe_ds.snapshots.shared_data import SnapshotError
from dynpipe_ds.survive.survivor import Survivor

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

T = TypeVar("T")


class Repeating:
    """Repeats what ranks do together; all methods but :meth:`state` are collective over all ranks.

    Args:
        run: of this rank.
        survivor: goes on without ranks that are lost.

    Attributes:
        between: what the script does between batches, called here; :meth:`add` takes in another.
        reached: batches that any rank is known to have trained, while training goes on without lost ranks.
    """

    def __init__(self, run: Run, survivor: Survivor) -> None:
        self._run, self._survivor = run, survivor
        self.between: list[BetweenBatches] = []
        self._inherited: list[dict[str, Any]] = []
        self.reached = 0
        self._num_done = 0
        self._result: Any = None

    # -- what is tried again ------------------------------------------------------------------

    def batch(self, train: Callable[[], T]) -> T:
        """Train a batch, and again if ranks are lost meanwhile and the others go on.

        Args:
            train: trains it.

        Returns:
            Its result; its loss where it was over on others and was repeated here.
        """
        run = self._run
        number = run.num_batches
        while True:
            try:
                with run.stage.guard.naming_lost_ranks(f"batch {run.num_batches} was trained"):
                    return train()
            except RankLostError as error:
                repeated = self._survivor.go_on(error)
            _let_go()
            if number in repeated:
                return cast(T, repeated[number])

    def between_batches(self, action: Callable[[], T]) -> T:
        """Do something between batches, and again if ranks are lost meanwhile and the others go on.

        Where others had done it when the rank was lost, it is done, and what it returned there is returned here.

        Args:
            action: collective over all ranks; has done nothing that matters if it raises.
        """
        number = self._num_done
        while self._num_done == number:
            try:
                self._result = action()
            except RankLostError as error:
                self._survivor.go_on(error)
            else:
                self._num_done += 1
                if self._survivor.is_on:
                    self._run.stage.pipeline.note_counters(self._run.num_batches)
                continue
            _let_go()
        result, self._result = self._result, None if not self._survivor.is_on else self._result
        return cast(T, result)

    def share_results(self) -> None:
        """Let what some ranks have done between batches be done on all."""
        kept, checkpoints = self._run.stage.pipeline.reading.kept, self._run.checkpoints
        everyone = gather((self._num_done, self._result, checkpoints.last, kept.counters))
        done, result, checkpoint, _ = max(everyone, key=lambda told: told[0])
        if done > self._num_done:
            self._num_done, self._result, checkpoints.last = done, result, checkpoint
        for *_, counters in everyone:
            for batch, numbers in counters.items():
                known = kept.counters.setdefault(batch, numbers)
                kept.counters[batch] = max(known, numbers, key=lambda each: each["micro_offset"])

    # -- what acts between batches ------------------------------------------------------------

    def add(self, acts: BetweenBatches) -> None:
        """Call it around every batch from now on; on a worker that joined it first goes on where the job is.

        Args:
            acts: what the script does.
        """
        self.between.append(acts)
        if self._inherited:
            acts.load_state_dict(self._inherited.pop(0))
            return
        # What it knew before nobody has kept, and in earlier batches it did not act.
        self._run.snapshots.expire()
        self._run.landmarks.expire("later on the script gave an object to engine.between_batches")

    def inherit(self, state: Mapping[str, Any]) -> None:
        """Keep what the job's own knew when this worker joined: its script has not told of any yet.

        Args:
            state: what :meth:`state` gave on the first rank.
        """
        self._inherited = list(state["between"])

    # -- around a batch -----------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A batch is about to begin, with all ranks that there are for it."""
        self._survivor.begin_batch()
        self._run.landmarks.begin_batch()

    def keeping_data(self) -> AbstractContextManager[None]:
        """Keep what the batch reads while training may have to go back before it."""
        if not self._run.snapshots.is_on:
            return nullcontext()
        number, pipeline = self._run.num_batches, self._run.stage.pipeline
        pipeline.take_counters(number)
        pipeline.note_counters(number)
        return pipeline.reading.kept.batch(number)

    def act_before(self) -> None:
        """Let what acts between batches do so; a snapshot was taken before, from which it would act again."""
        if not self.between:
            return
        self._run.snapshots.before_change()
        for each in self.between:
            each.before_batch(self._run.num_batches)
        self._run.notice_frozen_layers()

    def act_after(self) -> None:
        """The same after the batch."""
        for each in self.between:
            each.after_batch(self._run.num_batches - 1)

    # -- going back ---------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What goes with a copy of this rank's state, as plain values and tensors."""
        return {"between": [each.state_dict() for each in self.between]}

    def went_back(self, state: Mapping[str, Any]) -> None:
        """Take note that this rank has gone back.

        Args:
            state: what :meth:`state` gave then.
        """
        for each, own in zip(self.between, state["between"], strict=True):
            each.load_state_dict(own)

    def replay(self, until: int) -> dict[int, Any]:
        """Train again the batches up to a number, on micro-batches that were kept or can be read again.

        They are not profiled, and nothing moves meanwhile.

        Args:
            until: number of batches that are trained then.

        Returns:
            Their losses, by number.
        """
        run, losses = self._run, dict[int, Any]()
        while run.num_batches < until:
            run.notice_frozen_layers()
            self.act_before()
            run.stage.pipeline.begin_batch()
            run.stage.pipeline.run_order(run.balancer.ordering.next(is_profiled=False))
            with self.keeping_data():
                losses[run.num_batches] = run.stage.pipeline.run_batch()
            run.num_batches += 1
            self.act_after()
        return losses

    def roll_back(self, boundaries: Sequence[int] | None = None) -> int:
        """Go back to the newest snapshot that all ranks can go back to, and repeat the batches since.

        Args:
            boundaries: of the stages from then on; ``None``: those of the snapshot.

        Returns:
            Batches that were trained when it was taken.

        Raises:
            SnapshotError: on every rank, if there is none; nothing has changed then.
        """
        self._run.snapshots.pause()
        until, batch = self._run.num_batches, newest(self._run)
        if batch is None:
            raise SnapshotError("there is no snapshot that is complete on the ranks that are left")
        restore(self._run, batch, boundaries)
        self.replay(until)
        return batch


def _let_go() -> None:
    """Let go of the world that was lost, when its error is handled.

    Process groups and frames that raised hold each other. Their sockets and threads would stay until Python looks for
    such cycles by itself, several losses later.
    """
    gc.collect()
