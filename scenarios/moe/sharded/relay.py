"""A thread that passes weights and sums on while the batch goes on, one job after the other.

Collectives of one group must come in the same order on all ranks, so all jobs of a group are one queue, and who posts
them does so at the same places of a batch on every rank. What a job raises is raised where it is waited for.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """Something that runs, or will run, on the thread.

    Args:
        run: what.

    Attributes:
        seconds: that it took; 0 before it is over.
        waited_s: seconds for which others have waited for it.
    """

    def __init__(self, run: Callable[[], T]) -> None:
        self._run: Callable[[], T] | None = run
        self._over = threading.Event()
        self._result: T
        self._error: BaseException | None = None
        self.seconds = 0.0
        self.waited_s = 0.0

    def work(self) -> None:
        """Run it, on the thread."""
        began, run = time.perf_counter(), self._run
        self._run = None  # what it holds may be large
        assert run is not None
        try:
            self._result = run()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        self.seconds = time.perf_counter() - began
        self._over.set()

    @property
    def hidden_s(self) -> float:
        """Seconds of it for which nobody waited."""
        return max(0.0, self.seconds - self.waited_s)

    def wait(self, limit_s: float) -> T:
        """Wait until it is over.

        Args:
            limit_s: how long.

        Returns:
            What it returned.

        Raises:
            RuntimeError: if it is not over in time.
            Exception: what it has raised.
        """
        began = time.perf_counter()
        is_over = self._over.wait(limit_s)
        self.waited_s += time.perf_counter() - began
        if not is_over:
            raise RuntimeError(
                f"weights or sums of experts were still under way after {limit_s:.0f} s: Connection timed out; some "
                "rank that shares the experts is lost or far behind"
            )
        if self._error is not None:
            raise self._error
        return self._result


class Relay:
    """The thread; it begins with the first job, and ends when the relay is closed or forgotten."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def post(self, run: Callable[[], T]) -> Job[T]:
        """Run something after all that was posted before.

        Args:
            run: what.

        Returns:
            The job.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name="experts", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        job: Job[T] = Job(run)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread when all jobs are done."""
        self._jobs.put(None)
        self._thread = None


def _work(jobs: queue.SimpleQueue[Job[object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.work()
        del job  # or the last one's result lives until the next one comes
