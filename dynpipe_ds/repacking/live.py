"""The live shrink: layers move to the survivors, the others leave, training goes on between two batches.

First an ordinary migration empties the stages that go (all or nothing). Then all ranks vote; until that vote
everything can be undone. After it, the leaving ranks end and the survivors meet in a smaller world, where the
stages are numbered anew in their old order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from dynpipe_ds.host.topology import renumber
from dynpipe_ds.host.world import World
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.placement import Placement
from dynpipe_ds.ranks.agreement import together

if TYPE_CHECKING:
    from dynpipe_ds.stage import Stage


class RepackError(RuntimeError):
    """Re-packing failed or was refused; training can go on with all ranks, on every rank."""


def widened(boundaries: Sequence[int], staying: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Boundaries of the present stages that leave only the staying ones with layers.

    Args:
        boundaries: ``n + 1`` boundaries of the shorter pipeline.
        staying: the ``n`` present stages that stay, ascending.
        num_stages: present number of stages, S.

    Returns:
        ``S + 1`` boundaries; a stage that goes is empty.
    """
    end_of = dict(zip(staying, boundaries[1:], strict=True))
    wide = [boundaries[0]]
    for stage in range(num_stages):
        wide.append(end_of.get(stage, wide[-1]))
    return tuple(wide)


class Shrink:
    """One re-packing on one rank; making it is collective over all ranks.

    Args:
        stage: what is here of the model.
        move: lets layers move to boundaries, on all ranks or none; gives the bytes that this rank sent or received.
        staying: stages that stay, ascending, the same on every rank; stage 0 among them.
        boundaries: partition of the shorter pipeline.
    """

    def __init__(
        self, stage: Stage, move: Callable[[Placement], int], staying: Sequence[int], boundaries: Sequence[int]
    ) -> None:
        self._stage = stage
        self._move = move
        self._staying = tuple(staying)
        self._boundaries = tuple(boundaries)
        ranks = {s: stage.pipeline.ranks_of(s) for s in range(stage.num_stages)}
        self._everybody = {rank for of_stage in ranks.values() for rank in of_stage}
        remaining = sorted(rank for s in staying for rank in ranks[s])
        self._leaving = self._everybody.difference(remaining)
        self.world = World.among(remaining)

    @property
    def stays(self) -> bool:
        """Whether this rank goes on."""
        return self._stage.stage_id in self._staying

    def prepare(self, checks: Callable[[], None]) -> int:
        """Move the layers to the survivors and vote; collective over all ranks.

        Args:
            checks: more to try before the vote.

        Returns:
            Bytes that this rank sent or received, whichever is more.

        Raises:
            RepackError: on every rank, if any can't go through with it; the partition is then as it was.
        """
        before = self._stage.module.placement
        self._together(checks)
        try:
            wide = widened(self._boundaries, self._staying, self._stage.num_stages)
            num_bytes = self._move(Placement.from_boundaries(wide))
        except MigrationError as error:
            raise RepackError(f"re-packing failed, training goes on with all ranks ({error})") from error
        try:
            self._together(self._try)
        except RepackError:
            self._move(before)
            raise
        return num_bytes

    def _together(self, action: Callable[[], None]) -> None:
        stages = f"{self._stage.num_stages} to {len(self._staying)} stages"
        together(action, self._stage.device, lambda text: RepackError(
            f"re-packing from {stages} failed, training goes on with all ranks ({text})"
        ))

    def _try(self) -> None:
        stage = self._stage
        if self.stays and self._staying[-1] == stage.stage_id and not stage.pipeline.reading.is_here:
            stage.pipeline.reading.catch_up()
        self.world.check()

    def leave(self, last_words: Callable[[], None], end: Callable[[], NoReturn]) -> NoReturn:
        """End this process, which has no layers any more, when the others can do without it.

        Args:
            last_words: done when all others have let go.
            end: ends the process. Not ``sys.exit()``: the user's script would go on to collectives of its own,
                and atexit handlers of the back-ends wait for ranks that are no longer in their world.
        """
        dist.barrier()
        self._miss_no_more()
        self.world.leave()
        self._stage.guard.forget(self._everybody)  # what fails from here on is no concern of theirs
        self._stage.guard.stop()
        last_words()
        logging.shutdown()
        self.world.say_goodbye()
        end()

    def go_on(self) -> None:
        """Meet the other survivors and renew all that knows of ranks, stages or groups."""
        dist.barrier()
        self._miss_no_more()
        renumber(self._stage.pipeline, self.world, Placement.from_boundaries(self._boundaries))
        self._stage.guard.start()

    def _miss_no_more(self) -> None:
        """Who leaves now is not lost."""
        self._stage.guard.forget(self._leaving - {self._stage.pipeline.rank})
