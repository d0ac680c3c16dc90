"""Which rank was lost, when communication breaks down or does not come back.

A process that is killed closes its connections, so its neighbours fail at once, with an error that names a socket;
*their* neighbours fail when they have ended, and so on. To name the first cause, every process can be asked whether
it lives (``answering.py``), and whoever finds the cause tells all others before it ends itself. While all is well
nothing is sent. Where ranks go on without others (``survive/``), each also stays connected to some, and asks as soon as
such a connection ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.ranks.answering import Address, Answer, Listener, RunningClock, Standing, ask
from dynpipe_ds.ranks.connections import break_off, listening
from dynpipe_ds.ranks.fatal import NewestCheckpoint, Verdict
from dynpipe_ds.ranks.meeting import Person
from dynpipe_ds.ranks.place import Place
from dynpipe_ds.telling import warn

PATIENCE_S = 5.0
"""A process that does not answer for this long is stopped, or its machine is gone."""

MARGIN_S = 3.0
"""How much longer than the process group's own timeout a call may take before the others are asked."""

_TOLD_S = 0.5  # a silent process gets the verdict when it goes on; nobody waits for its reply
_AGAIN_S = 0.1
_WATCH_EVERY_S = 0.5
_LOOK_EVERY_S = 0.05
_NUM_STANDING = 16
"""So many ranks are watched by each one; whoever watches a lost one while it waits for anybody tells all."""


class Heartbeat:
    """Knows how to ask the other ranks of a world, and watches how long this one waits for them.

    Args:
        listener: answers for this process.
        rank: this process.
        addresses: of all ranks, by rank.
        timeout_s: the process group's.

    Attributes:
        listener: the same.
        rank: the same, as the world counted when this was made.
        people: all ranks, after :meth:`stay_connected`.
    """

    def __init__(self, listener: Listener, rank: int, addresses: list[Address], *, timeout_s: float) -> None:
        self.listener = listener
        self.rank, self._timeout_s = rank, timeout_s
        self._addresses = dict(enumerate(addresses))
        self._sections: list[tuple[str, NewestCheckpoint]] = []
        self._standing: dict[int, Standing] = {}
        self._others: list[tuple[str, int]] = []
        self.people: list[Person] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dynpipe_ds watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer nobody, and watch no more."""
        self.stop_watching()
        self.listener.close()

    def stop_watching(self) -> None:
        """Leave waiting unbounded; this process still answers."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for standing in self._standing.values():
            standing.close()

    def forget(self, ranks: Collection[int]) -> None:
        """Miss some ranks no more: they end on purpose."""
        self._addresses = {rank: address for rank, address in self._addresses.items() if rank not in ranks}

    def misses(self, rank: int) -> bool:
        """Whether a rank is one that would be missed.

        Args:
            rank: of this world.
        """
        return rank in self._addresses

    def be_patient(self, seconds: float) -> None:
        """Ask for the others when something takes longer than this, rather than the process group's timeout.

        Args:
            seconds: before ``MARGIN_S``.
        """
        self._timeout_s = seconds

    def unreachable(self) -> list[int]:
        """Ranks that this one can't ask; takes up to ``PATIENCE_S``."""
        return [rank for rank, answer in self._ask_all().items() if answer is not Answer.LIVES]

    # -- finding the cause --------------------------------------------------------------------

    def find_lost(self, doing: str, newest_checkpoint: NewestCheckpoint) -> Verdict | None:
        """Find out who was lost, and tell all others; takes up to ``PATIENCE_S``.

        Those that ended are the lost ones. Silent ones are only if nobody ended: they may be stopped for a while.

        Args:
            doing: what went on, for the message.
            newest_checkpoint: finds it.

        Returns:
            The first verdict of all ranks; ``None`` if everybody lives.
        """
        happened = {
            Answer.ENDED: f"ended while {doing}, so every rank stops; ",
            Answer.SILENT: f"did not answer while {doing} (stopped, or the machine is gone), so every rank stops; ",
        }
        clock = RunningClock()
        while True:
            answers = self._ask_all()
            if fatal.held() is not None:
                return fatal.held()
            for answer, what in happened.items():
                ranks = [rank for rank, given in answers.items() if given is answer]
                if ranks:
                    return self._tell(fatal.verdict(ranks, what, newest_checkpoint), answers)
            if clock.tick() > PATIENCE_S:
                return None
            time.sleep(_AGAIN_S)  # its connections may be closed before its process has ended

    def settle(self, verdict: Verdict) -> Verdict:
        """Tell all ranks why they stop.

        Args:
            verdict: of this rank.

        Returns:
            The first one, which may be another rank's.
        """
        return self._tell(verdict, self._ask_all())

    def _ask_all(self) -> dict[int, Answer]:
        """This process is asked as well: what was told it before is read by then."""
        return ask(self._addresses, PATIENCE_S)

    def _tell(self, verdict: Verdict, answers: dict[int, Answer]) -> Verdict:
        """Which verdict was first is for the lowest rank that answers to say."""
        living, silent = (
            {rank: address for rank, address in self._addresses.items() if answers.get(rank) is answer}
            for answer in (Answer.LIVES, Answer.SILENT)
        )
        first = min(living, default=self.rank)
        if first != self.rank:
            ask({first: living[first]}, PATIENCE_S, verdict)
        held = fatal.hold(verdict)
        ask(living, PATIENCE_S)
        ask(silent, _TOLD_S)
        return held

    # -- bounding the waiting -----------------------------------------------------------------

    @contextmanager
    def watching(self, doing: str, newest_checkpoint: NewestCheckpoint) -> Iterator[None]:
        """Ask for the others, from another thread, if what is inside takes longer than the process group's timeout.

        Nothing bounds a call into a store whose process is stopped, for example. If all others live it goes on.

        Args:
            doing: what goes on inside, for the message.
            newest_checkpoint: finds it.
        """
        self._sections.append((doing, newest_checkpoint))
        try:
            yield
        finally:
            self._sections.pop()

    # -- going on without others --------------------------------------------------------------

    def stay_connected(self, identity: str, place: Place) -> None:
        """Hear of the end of others at once, and be able to break off; collective over all ranks.

        Args:
            identity: of this process.
            place: that it holds.
        """
        own = [(self.listener.address.host, port) for port in listening() - {self.listener.address.port}]
        everyone = gather((own, identity, place))
        self.people = [
            Person(name, Place(*there), self._addresses[rank]) for rank, (_, name, there) in enumerate(everyone)
        ]
        self._others = [end for rank, (ends, _, _) in enumerate(everyone) if rank != self.rank for end in ends]
        size = len(everyone)
        for step in range(1, min(size, _NUM_STANDING + 1)):
            other = (self.rank + step) % size
            with suppress(OSError):  # who ends just now is found by the first call that needs it
                self._standing[other] = Standing(self._addresses[other])

    def stay_silent(self, last_words: Verdict) -> None:
        """Watch no more, in a world that is left; who still asks in it is told why, and what he tells counts no more.

        Args:
            last_words: why it was left.
        """
        self.listener.last_words = last_words
        self.stop_watching()

    def break_off(self) -> int:
        """Shut down the connections to all other ranks but those by which they ask each other.

        Returns:
            How many there were.
        """
        return break_off(self._others, {self.listener.address.port})

    def _is_somebody_gone(self) -> bool:
        gone = [rank for rank, standing in self._standing.items() if standing.is_broken]
        return any(rank in self._addresses for rank in gone)

    def _watch(self) -> None:
        clock, outermost, since_s = RunningClock(), None, 0.0
        while not self._stopped.wait(_LOOK_EVERY_S if self._standing else _WATCH_EVERY_S):
            now_s, sections = clock.tick(), tuple(self._sections)
            if sections and fatal.held() is None and self._is_somebody_gone():
                self.find_lost(*sections[-1])
            if not sections or sections[0] is not outermost:
                outermost, since_s = sections[0] if sections else None, now_s
            elif now_s - since_s > self._timeout_s + MARGIN_S:
                since_s = now_s - MARGIN_S
                if self.find_lost(*sections[-1]) is not None and not self._standing:
                    return


# -- one for each process group ---------------------------------------------------------------


_heartbeat: tuple[Any, Heartbeat | None] = (None, None)


def start_heartbeat() -> Heartbeat | None:
    """Let the ranks ask each other from now on, once a process group; collective over all ranks.

    Returns:
        The heartbeat; ``None`` for a single rank, or, with a warning, where ranks can't connect to each other.
    """
    global _heartbeat
    group, earlier = _heartbeat
    if group is not dist.group.WORLD:
        several = dist.get_world_size() > 1
        fatal.apply_to_this_process(several)
        made = _start(lambda: Listener() if earlier is None else earlier.listener) if several else None
        if earlier is not None:
            earlier.stop_watching()
            if made is None:
                earlier.listener.close()
        _heartbeat = dist.group.WORLD, made
    return _heartbeat[1]


def make_heartbeat() -> Heartbeat | None:
    """A heartbeat of the present world with a secret of its own, besides that of an earlier world; collective.

    Returns:
        As :func:`start_heartbeat`; it counts once :func:`adopt_heartbeat` was told.
    """
    earlier = _heartbeat[1]
    beside = None if earlier is None else earlier.listener
    return _start(lambda: Listener(beside)) if dist.get_world_size() > 1 else None


def adopt_heartbeat(made: Heartbeat | None) -> Heartbeat | None:
    """Let a heartbeat be that of the present world.

    Args:
        made: by :func:`make_heartbeat`.

    Returns:
        The same.
    """
    global _heartbeat
    fatal.apply_to_this_process(made is not None)
    _heartbeat = dist.group.WORLD, made
    return made


def _start(make: Callable[[], Listener]) -> Heartbeat | None:
    listener = why = None
    try:
        listener = make()
    except OSError as error:
        why = f"no socket to listen on ({error})"
    addresses = [address for address in gather(None if listener is None else listener.address) if address is not None]
    made = None
    if listener is not None and len(addresses) == dist.get_world_size():
        made = Heartbeat(listener, dist.get_rank(), addresses, timeout_s=group_timeout().total_seconds())
        missing = made.unreachable()
        why = f"no connection to {fatal.names(missing)}" if missing else None
    reasons = {rank: reason for rank, reason in enumerate(gather(why)) if reason is not None}
    if not reasons:
        return made
    if made is not None:
        made.stop_watching()
    if listener is not None:
        listener.close()
    if dist.get_rank() == 0:
        rank, reason = next(iter(reasons.items()))
        warn(
            f"the ranks can't ask each other (rank {rank}: {reason}), so a rank that fails, ends or "
            f"is stopped is not named, and the others may wait for it for the process group's {group_timeout()} "
            "or longer; let the job's machines connect to each other on every port"
        )
    return None


def group_timeout() -> timedelta:
    """The timeout of the world's process group, as far as torch tells it."""
    for device in dist.group.WORLD._device_types:  # type: ignore[union-attr]
        options = getattr(dist.group.WORLD._get_backend(device), "options", None)  # type: ignore[union-attr]
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return dist.constants.default_pg_timeout
