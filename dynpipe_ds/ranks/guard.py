"""What stands around everything that ranks do together: who was lost is named, and who can't go back ends all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from dynpipe_ds.ranks.fatal import naming_lost_ranks, no_way_back
from dynpipe_ds.ranks.heartbeat import Heartbeat, start_heartbeat


class Guard:
    """Knows whether the other ranks live, and from where a run can go on when they don't.

    Args:
        newest_checkpoint: finds the newest complete checkpoint that this run knows of.
    """

    def __init__(self, newest_checkpoint: Callable[[], str | None]) -> None:
        self._newest_checkpoint = newest_checkpoint
        self.heartbeat: Heartbeat | None = None

    def start(self) -> None:
        """Begin to watch; collective over all ranks. Again when there are fewer of them."""
        self.heartbeat = start_heartbeat()

    def forget(self, ranks: Collection[int]) -> None:
        """Who leaves now is not lost.

        Args:
            ranks: that leave.
        """
        if self.heartbeat is not None:
            self.heartbeat.forget(ranks)

    def stop(self) -> None:
        """Watch no more."""
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def naming_lost_ranks(self, doing: str) -> AbstractContextManager[None]:
        """Name whoever ended, and the newest complete checkpoint, if communication breaks down inside.

        Args:
            doing: what goes on inside, for the message.
        """
        return naming_lost_ranks(self.heartbeat, doing, self._newest_checkpoint)

    def no_way_back(self, doing: str) -> AbstractContextManager[None]:
        """End all ranks if something fails inside that can't be undone.

        Args:
            doing: what goes on inside, for the message.
        """
        return no_way_back(self.heartbeat, doing, self._newest_checkpoint)

    @contextmanager
    def unless_undone(self, doing: str, undone: type[Exception]) -> Iterator[None]:
        """End all ranks if something fails inside, except by an error that says that all is as before.

        Args:
            doing: what goes on inside, for the message.
            undone: that error; it passes.
        """
        refused: Exception | None = None
        with self.no_way_back(doing):
            try:
                yield
            except undone as error:
                refused = error
        if refused is not None:
            raise refused
