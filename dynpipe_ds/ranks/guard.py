"""What stands around everything that ranks do together: who was lost is named, and who can't go back ends all."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch.distributed as dist

from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.ending import wait_at_exit
from dynpipe_ds.ranks.fatal import FatalError, NewestCheckpoint, Verdict
from dynpipe_ds.ranks.heartbeat import Heartbeat, start_heartbeat

_LONGEST_REASON = 2000  # letters: the text travels to every rank


class Guard:
    """Knows whether the other ranks live, and from where a run can go on when they don't.

    Args:
        newest_checkpoint: finds the newest complete checkpoint that this run knows of.

    Attributes:
        heartbeat: asks the other ranks; ``None`` before :meth:`start`, for a single rank, and where ranks can't
            connect to each other. Without it, errors that another rank caused pass as they are.
    """

    def __init__(self, newest_checkpoint: NewestCheckpoint) -> None:
        self._newest_checkpoint = newest_checkpoint
        self.heartbeat: Heartbeat | None = None

    def start(self) -> None:
        """Begin to watch; collective over all ranks. Again when there are fewer of them."""
        self.heartbeat = start_heartbeat()
        wait_at_exit()

    def forget(self, ranks: Collection[int]) -> None:
        """Who leaves now is not lost."""
        if self.heartbeat is not None:
            self.heartbeat.forget(ranks)

    def stop(self) -> None:
        """Watch no more."""
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def naming_lost_ranks(self, doing: str) -> AbstractContextManager[None]:
        """Name whoever was lost, and the newest complete checkpoint, if communication breaks down inside.

        Args:
            doing: what goes on inside, for the message: ``"batch 12 was trained"``.

        Raises:
            FatalError: if some rank failed where nothing can be undone, here or elsewhere, now or earlier.
            RankLostError: if communication broke down inside because another rank was lost.
        """
        return self._watching(doing, ends_all=False)

    def no_way_back(self, doing: str) -> AbstractContextManager[None]:
        """End all ranks if anything fails inside, since nothing there can be undone.

        Args:
            doing: what goes on inside, for the message: ``"layers were moved"``.

        Raises:
            FatalError: if anything raised inside, on this rank or on another one.
            RankLostError: if it was because another rank was lost.
        """
        return self._watching(doing, ends_all=True)

    def unless_undone(self, doing: str, undone: type[Exception]) -> AbstractContextManager[None]:
        """End all ranks if something fails inside, except by an error that says that all is as before."""
        return self._watching(doing, ends_all=True, passing=undone)

    @contextmanager
    def _watching(self, doing: str, *, ends_all: bool, passing: type[Exception] = FatalError) -> Iterator[None]:
        earlier, heartbeat = fatal.held(), self.heartbeat  # re-packing makes another one on the way, with other numbers
        if earlier is not None:
            raise earlier.error()
        with heartbeat.watching(doing, self._newest_checkpoint) if heartbeat is not None else nullcontext():
            try:
                yield
            except (FatalError, passing):
                raise
            except Exception as error:
                verdict = self._others_fault(heartbeat, error, doing)
                if verdict is None and ends_all:
                    verdict = self._own_fault(heartbeat, error, doing)
                if verdict is None:
                    raise
                raise verdict.error() from error

    def _others_fault(self, heartbeat: Heartbeat | None, error: Exception, doing: str) -> Verdict | None:
        if fatal.held() is None and heartbeat is not None and fatal.broke_connection(error):
            return heartbeat.find_lost(doing, self._newest_checkpoint)
        return fatal.held()

    def _own_fault(self, heartbeat: Heartbeat | None, error: Exception, doing: str) -> Verdict:
        """Told to all; or the first verdict, which may be another rank's."""
        if heartbeat is not None:
            rank = heartbeat.rank
        else:
            rank = dist.get_rank() if dist.is_initialized() else 0
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        happened = f"failed while {doing} ({reason}), which can't be undone, so every rank stops; "
        verdict = fatal.verdict([rank], happened, self._newest_checkpoint, lost=False)
        return fatal.hold(verdict) if heartbeat is None else heartbeat.settle(verdict)


@contextmanager
def explaining_lost_ranks(doing: str, newest_checkpoint: NewestCheckpoint | None = None) -> Iterator[None]:
    """Around collective calls of your own: a broken connection becomes an error that says which rank was lost.

    The engine does this around its own. Entering is collective over all ranks before the first engine is made, and
    local from then on, so ``except RuntimeError: with explaining_lost_ranks(...): raise`` is possible, too.

    Args:
        doing: what goes on inside, for the message: ``"the model was evaluated"``.
        newest_checkpoint: returns the newest complete checkpoint, for the message; ``None`` where there is none.

    Returns:
        A context manager.

    Raises:
        FatalError: if some rank failed where nothing can be undone, here or elsewhere, now or earlier.
        RankLostError: if communication broke down inside because another rank was lost.
    """
    guard = Guard(newest_checkpoint or (lambda: None))
    guard.start()
    with guard.naming_lost_ranks(doing):
        yield
