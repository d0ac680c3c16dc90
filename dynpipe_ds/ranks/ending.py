"""A process ends with the exit code of its training, whatever gloo's threads still have to tidy up.

A thread of gloo frees the tensors of a collective just after it has let the main thread go on. Freeing one that Python
knows takes Python's lock. Before Python 3.14, a thread that asks for the lock while Python shuts down is ended on the
spot, which C++ answers with "terminate called without an active exception" and exit code 134. A script that ends right
after its last batch, on a busy machine, can be that quick. So the end of a process waits until these threads have
nothing to do.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_THREADS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"
_LONGEST_S = 2.0
_PAUSE_S = 0.002
"""Long enough for a thread that waits for Python's lock to take it, since the main thread sleeps."""


def wait_at_exit() -> None:
    """Let the end of this process wait for gloo's threads; to be said once or more often."""
    atexit.unregister(wait_for_gloo)
    atexit.register(wait_for_gloo)


def wait_for_gloo() -> None:
    """Wait until no thread of gloo computes, 2 s at most; not where the system does not show a process its threads."""
    until = time.monotonic() + _LONGEST_S
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < until:
        time.sleep(_PAUSE_S)
        num_quiet = 0 if "R" in _states() else num_quiet + 1


def _states() -> Iterator[str]:
    """Of each thread of gloo: ``R`` if it computes or waits for a core, else another letter."""
    for thread in _THREADS.glob("*"):
        with suppress(OSError):  # it has just ended
            name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME:
                yield rest.split()[0]
