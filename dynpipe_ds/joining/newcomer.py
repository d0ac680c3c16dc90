"""A process that is to join a running job: it knocks at the job's doors, shows what it has, and waits.

What makes a process one is the environment variable ``DYNPIPE_JOIN``, which ``dynpipe join`` and ``dynpipe run
--spares`` set: ``HOST:PORT`` of a door (the token is then in ``DYNPIPE_TOKEN``), or the file that holds both.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynpipe_ds.joining.address import JOIN, LEFT, TOKEN, Address, find_door
from dynpipe_ds.joining.door import ANSWER_S
from dynpipe_ds.joining.wire import Wire, WireError
from dynpipe_ds.ranks.answering import RunningClock
from dynpipe_ds.telling import log

KNOCKING_S = 600.0
"""How long to knock at a door that is not there yet: a job may start later than its spares."""

AGAIN_S = 30.0
"""How long to look for another door when the one at which this process waited is gone."""

_PAUSE_S = 0.2
_LOOK_S = 0.5  # how often to look for a warning
_WELCOME_S = 60.0


class RefusedError(RuntimeError):
    """This process does not fit the job that it was to join; the text names every difference."""


class OverError(RuntimeError):
    """The job ended before it needed this process."""


class Newcomer:
    """This process before it is a rank of the job.

    Args:
        where: as :func:`~dynpipe_ds.joining.address.find_door` takes it; a file may appear later.
        identity: what names this process.

    Attributes:
        identity: as given.
        job: what the job tells before anything is built.
    """

    def __init__(self, where: str, identity: str) -> None:
        self.identity = identity
        self.job: dict[str, Any] = {}
        self._where = where
        self._doors: list[Address] = []
        self._token = ""
        self._wire: Wire | None = None
        self._papers: Mapping[str, Any] = {}

    @property
    def owned(self) -> dict[int, tuple[str, ...]]:
        """What single replicas of the job own, by layer."""
        return {int(layer): tuple(names) for layer, names in self.job["owned"]}

    def begin(self) -> None:
        """Hear of the job, before anything is built; ends the process if it was a rank of it, and the job is over.

        Raises:
            RefusedError: if the token is another one.
            OverError: if no door answers in time.
        """
        if not os.environ.get(LEFT):
            self.knock()
            return
        try:
            self.knock(AGAIN_S)
        except OverError as error:
            log.info("dynamic_pipeline: this worker had no place in the job any more, which is over: %s", error)
            raise SystemExit(0) from None

    def knock(self, patience_s: float = KNOCKING_S) -> None:
        """Find the door and hear of the job.

        Args:
            patience_s: how long to try.

        Raises:
            RefusedError: if the token is another one.
            OverError: if no door answers in time.
        """
        clock, problem = RunningClock(), ""
        while clock.tick() < patience_s:
            for address in self._known_doors():
                try:
                    if self._knock_at(address):
                        return
                except WireError as error:
                    problem = f"{address.host}:{address.port}: {error}"
                    if "token" in str(error):
                        raise RefusedError(f"refused at {problem}; set {TOKEN} to the job's") from error
                except OSError as error:
                    problem = f"{address.host}:{address.port}: {error}"
            time.sleep(_PAUSE_S)
        raise OverError(f"no door of the job answered in {patience_s:g} s ({problem or f'no {self._where}'})")

    def _known_doors(self) -> list[Address]:
        """Those that doors have named, and the one that this process was told of at first."""
        token = self._token
        try:
            named = self._named_doors()
        except ValueError:  # its file is gone
            if not self._doors:
                raise
            named = []
        if self._doors and self._token != token:  # its file is another job's now
            self._token, named = token, []
        return list(dict.fromkeys([*self._doors, *named]))

    def _named_doors(self) -> list[Address]:
        if not Path(self._where).is_file() and os.sep in self._where:
            return []  # to be written
        address, self._token = find_door(self._where)
        return [address]

    def _knock_at(self, address: Address) -> bool:
        wire = Wire(socket.create_connection(address, timeout=ANSWER_S))
        try:
            wire.introduce(self._token, ANSWER_S)
            said = wire.receive(ANSWER_S)
            if "job" not in said:
                self._turn_to(said.get("elsewhere"))
                wire.close()
                return False
        except BaseException:
            wire.close()
            raise
        self.job, self._wire = said["job"], wire
        # Its own world was on this machine alone; by the job's address it finds the interface that is the job's.
        os.environ["MASTER_ADDR"] = address.host
        self._doors = [Address(*door) for door in self.job.get("doors", [])] or [address]
        return True

    def _turn_to(self, elsewhere: list[Any] | None) -> None:
        """Knock there first; the others stay known, since a door may name one that has just been lost."""
        if elsewhere:
            self._doors = list(dict.fromkeys([Address(*elsewhere), *self._doors]))

    def show(self, papers: Mapping[str, Any]) -> None:
        """Prove that this process fits.

        Raises:
            RefusedError: if it does not, with every difference.
            WireError: if the door is gone.
        """
        assert self._wire is not None, "knock first"
        self._papers = papers
        self._wire.send(papers=papers, identity=self.identity)
        said = self._wire.receive(_WELCOME_S)
        if "refused" in said:
            raise RefusedError("this worker does not fit the job: " + "; ".join(map(str, said["refused"])))

    def wait(self, is_warned: Callable[[], bool] = bool) -> dict[str, Any]:
        """Wait for the invitation, as long as there is a door.

        Args:
            is_warned: whether this process is about to be taken away.

        Returns:
            What the job sent.

        Raises:
            OverError: if the job ended, or this process was warned.
            RefusedError: if the job has another door now, and this process does not fit there.
        """
        while True:
            try:
                assert self._wire is not None, "knock first"
                while not self._wire.has_said(_LOOK_S):
                    if is_warned():
                        raise OverError("it is about to be taken away")
                said = self._wire.receive(None)
                if said.get("over"):
                    raise OverError("the job has ended")
                if "invited" in said:
                    invited: dict[str, Any] = said["invited"]
                    return invited
                self._turn_to(said.get("elsewhere"))
            except WireError:
                log.info("dynamic_pipeline: the door at which this worker waited is gone; looking for another")
            self.knock_again()

    def answer(self, problem: str) -> None:
        """Answer an invitation.

        Args:
            problem: why this process can't come; empty if it comes.
        """
        assert self._wire is not None, "knock first"
        with suppress(WireError):
            self._wire.send(coming=not problem, problem=problem)

    def show_again(self, papers: Mapping[str, Any]) -> None:
        """As :meth:`show`, at another door if the one that was knocked at is gone by now.

        Raises:
            RefusedError: if this process does not fit.
            OverError: if the job has no door any more.
        """
        try:
            self.show(papers)
        except WireError:
            self.knock_again()

    def knock_again(self) -> None:
        """Wait at a door once more: this one is gone, or joining has failed.

        Raises:
            OverError: if there is none.
            RefusedError: if this process does not fit there.
        """
        self.hang_up()
        clock = RunningClock()
        while True:
            self.knock(AGAIN_S)
            with suppress(WireError):
                self.show(self._papers)
                return
            if clock.tick() > AGAIN_S:
                raise OverError("the job has no door any more")

    def hang_up(self) -> None:
        """Let go of the door: this process is in, or ends."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


_newcomer: tuple[int, Newcomer | None] = 0, None


def newcomer(identity: str) -> Newcomer | None:
    """What this process is until it has joined; ``None`` for a rank of a job.

    Args:
        identity: what names this process.
    """
    global _newcomer
    where = os.environ.get(JOIN)
    if where and (_newcomer[0] != os.getpid() or _newcomer[1] is None):
        _newcomer = os.getpid(), Newcomer(where, identity)
    return _newcomer[1] if where and _newcomer[0] == os.getpid() else None


def is_in() -> None:
    """This process is a rank of the job now, and further engines are ordinary ones."""
    global _newcomer
    os.environ.pop(JOIN, None)
    _newcomer = 0, None
