"""The interface of release back-ends, and what they may demand of a decision."""

from __future__ import annotations

import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

T = TypeVar("T")

_RETRY_S = 0.5


class ReleaseError(RuntimeError):
    """Workers could not be given back; the message has the value, the rule and the remedy."""


@dataclass(frozen=True)
class Constraints:
    """What a back-end demands of the choice of workers.

    Args:
        ranks_stay: global ranks that must stay.
        nodes_stay: nodes all of whose ranks must stay, by :meth:`ReleaseBackend.node_name`.
        whole_nodes: whether a node is freed with all its ranks or not at all.
        lowest_stay: whether those who stay must be the lowest, without a gap: by :meth:`ReleaseBackend.position`.
    """

    ranks_stay: frozenset[int] = frozenset()
    nodes_stay: frozenset[str] = frozenset()
    whole_nodes: bool = False
    lowest_stay: bool = False


class ReleaseBackend(ABC):
    """Gives workers back to whoever lent them.

    The engine calls, in this order: :meth:`check`, :meth:`node_name` and :meth:`position` on every rank at start; for
    each re-packing :meth:`constraints` and :meth:`prepare` on rank 0 before anything changes; :meth:`leave` on every
    worker that is freed, once no other rank needs it; :meth:`release` and :meth:`verify` on rank 0. Ranks are
    those of the world before this shrink.

    An error in ``check`` refuses the start on every rank; one in ``constraints`` or ``prepare`` leaves training
    unshrunk; later ones can't be taken back: training goes on shrunk, with a warning.

    Attributes:
        workers_leave_first: whether :meth:`release` is to be called after the freed workers have left; false for
            a scheduler that would start again a worker that leaves by itself.
        workers_stay: whether a freed worker waits at the job's door, to be taken in again, instead of :meth:`leave`.
    """

    workers_leave_first: bool = True
    workers_stay: bool = False

    def check(self) -> None:  # noqa: B027 - a back-end without needs is a good one
        """Look for what the back-end needs; called on every rank before training.

        Raises:
            ReleaseError: it can't work here.
        """

    def node_name(self) -> str:
        """Name of this rank's node, as the back-end knows it; called on every rank."""
        return socket.gethostname()

    def position(self) -> int | None:
        """Where this worker stands in the order in which the scheduler takes workers back; called on every rank.

        Workers that joined may have any rank. ``None``: by rank.
        """
        return None

    def constraints(self) -> Constraints:
        """What is demanded of the choice of workers now; called on rank 0.

        Raises:
            ReleaseError: the scheduler can't be asked.
        """
        return Constraints()

    def prepare(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:  # noqa: B027
        """Make sure, without changing anything, that :meth:`release` will be granted; called on rank 0.

        Args:
            ranks: global ranks that are to leave, ascending.
            nodes: nodes that become free entirely.

        Raises:
            ReleaseError: it would be refused; training goes on unshrunk.
        """

    @abstractmethod
    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Give workers back; called on rank 0.

        Args:
            ranks: global ranks that leave, ascending.
            nodes: nodes that become free entirely.

        Raises:
            ReleaseError: the scheduler refused; training goes on shrunk, with a warning.
        """

    def verify(self) -> None:  # noqa: B027
        """Make sure that the last :meth:`release` took effect; called on rank 0 after it.

        Raises:
            ReleaseError: the workers still count as this job's; training goes on shrunk, with a warning.
        """

    def leave(self) -> NoReturn:
        """End this worker; the last call on a worker that is freed.

        It ends without cleaning up, since destructors of the process group would wait for peers.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def poll(look: Callable[[], T], is_settled: Callable[[T], bool], timeout_s: float) -> T:
    """Ask a scheduler again and again, until its answer is settled or the time is up.

    Args:
        look: asks it once.
        is_settled: whether the answer is a last one.
        timeout_s: longest that this may take.

    Returns:
        The last answer.
    """
    deadline = time.monotonic() + timeout_s
    while not is_settled(answer := look()) and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    return answer
