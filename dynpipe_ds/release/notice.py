"""A warning that this worker is about to be taken away: by a signal, as schedulers give it."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from dynpipe_ds.release.base import ReleaseError


class Notice:
    """Listens for a signal, which then ends nothing.

    Args:
        name: of the signal, such as ``SIGUSR1``.

    Attributes:
        has_come: whether this process was warned.

    Raises:
        ReleaseError: this is not the main thread, where alone Python takes signals.
    """

    def __init__(self, name: str) -> None:
        self.has_come = False
        self._number = signal.Signals[name]
        if threading.current_thread() is not threading.main_thread():
            raise ReleaseError(
                f"repack.leave_on = {name!r}: the engine was made in the thread {threading.current_thread().name!r}, "
                "and only the main thread can listen for signals; make it there, or remove repack.leave_on"
            )
        self._before = signal.signal(self._number, self._hear)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        self.has_come = True

    def stop(self) -> None:
        """Let the signal do what it did before."""
        if self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(self._number, self._before)
            self._before = None
