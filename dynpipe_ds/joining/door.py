"""The door of a job: a socket where newcomers knock, prove who they are and what they have, and wait.

Every worker has one, on the job's address alone; all but the first rank's send newcomers there. Threads serve who
knocks until it waits; who waits costs an open connection and no thread. Nothing here touches training: what a newcomer
does, or does not do, is seen when the job asks for who waits.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dynpipe_ds.joining.address import Address
from dynpipe_ds.joining.papers import differences
from dynpipe_ds.joining.wire import Wire, WireError
from dynpipe_ds.ranks.answering import own_address

ANSWER_S = 5.0
"""Longest time that a newcomer has for an answer."""

_BUILDING_S = 3600.0  # from the first knock to the papers: it loads and builds meanwhile
_MOST_AT_ONCE = 256
_BACKLOG = 128
_PAUSE_S = 0.05

Papers = Mapping[str, Any]


class Waiting(NamedTuple):
    """A newcomer that fits and waits.

    Attributes:
        identity: what names its process.
        wire: open connection to it.
    """

    identity: str
    wire: Wire


class Door:
    """Where newcomers knock.

    Args:
        papers: what they must have.
        token: what they must know.
        port: 0 for a free one.

    Attributes:
        address: where it is.

    Raises:
        OSError: if no socket can be had.
    """

    def __init__(self, papers: Papers, token: str, port: int = 0) -> None:
        self._papers, self._token = papers, token
        family, advertised, bound = own_address()
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((bound, port))
        self._socket.listen(_BACKLOG)
        self.address = Address(advertised, int(self._socket.getsockname()[1]))
        self._told: dict[str, Any] = {}
        self._elsewhere: Address | None = None
        self._lock = threading.Lock()
        self._waiting: list[Waiting] = []
        self._serving: set[Wire] = set()
        os.register_at_fork(after_in_child=self._socket.close)
        self._thread = threading.Thread(target=self._serve, name="dynpipe_ds door", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # -- what the job says --------------------------------------------------------------------

    def lead(self, told: Mapping[str, Any]) -> None:
        """Let newcomers wait here.

        Args:
            told: what they need to know of the job before they can build anything.
        """
        self._told, self._elsewhere = dict(told), None

    def send_to(self, address: Address) -> None:
        """Send who knocks, and who waits, to the first rank's door."""
        self._elsewhere = address
        for newcomer in self._take_all():
            with suppress(WireError):
                newcomer.wire.send(elsewhere=list(address))
            newcomer.wire.close()

    def waiting(self) -> list[str]:
        """Who waits, and lives, in the order of coming."""
        with self._lock:
            for newcomer in [one for one in self._waiting if not one.wire.is_open]:
                self._waiting.remove(newcomer)
                newcomer.wire.close()
            return [newcomer.identity for newcomer in self._waiting]

    def invite(self, identities: Sequence[str], invitation: Mapping[str, Any]) -> None:
        """Tell some who wait that it is their turn; they wait no more.

        Args:
            identities: as :meth:`waiting` gave them.
            invitation: plain values.

        Raises:
            WireError: if one of them is gone, or does not say in time that it comes.
        """
        with self._lock:
            invited = {one.identity: one.wire for one in self._waiting if one.identity in identities}
        missing = [name for name in identities if name not in invited]
        if missing:
            raise WireError(f"newcomers {', '.join(missing)} are gone")
        for wire in invited.values():
            wire.send(invited=dict(invitation))
        for wire in invited.values():
            said = wire.receive(ANSWER_S)
            if said.get("coming") is not True:
                raise WireError(f"a newcomer can't come: {said.get('problem')}")

    def lost(self, identities: Collection[str]) -> str:
        """Which of those who were invited have hung up, as a text; empty if none has."""
        with self._lock:
            wires = {one.identity: one.wire for one in self._waiting}
        gone = [name for name in identities if name not in wires or not wires[name].is_open]
        return f"newcomer {', '.join(gone)} ended while joining" if gone else ""

    def forget(self, identities: Collection[str]) -> None:
        """Hang up on some: they are in, or must knock again."""
        with self._lock:
            for newcomer in [one for one in self._waiting if one.identity in identities]:
                self._waiting.remove(newcomer)
                newcomer.wire.close()

    def close(self) -> None:
        """Tell all who wait that the job is over, and listen no more."""
        atexit.unregister(self.close)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        with self._lock:
            serving = list(self._serving)
        for newcomer in self._take_all():
            with suppress(WireError):
                newcomer.wire.send(over=True)
            newcomer.wire.close()
        for wire in serving:
            wire.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _take_all(self) -> list[Waiting]:
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

    # -- serving ------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return  # closed
                time.sleep(_PAUSE_S)
                continue
            wire = Wire(connection)
            with self._lock:
                is_full = len(self._serving) >= _MOST_AT_ONCE
                self._serving |= set() if is_full else {wire}
            if is_full:
                wire.close()
                continue
            threading.Thread(target=self._receive, args=(wire,), name="dynpipe_ds newcomer", daemon=True).start()

    def _receive(self, wire: Wire) -> None:
        """One newcomer, until it waits or is sent away."""
        newcomer: Waiting | None = None
        try:
            newcomer = self._examine(wire)
        except (WireError, KeyError, TypeError, ValueError):
            pass  # gone, or none of ours
        finally:
            with self._lock:
                self._serving.discard(wire)
                if newcomer is not None:
                    self._waiting.append(newcomer)
            if newcomer is None:
                wire.close()

    def _examine(self, wire: Wire) -> Waiting | None:
        wire.admit(self._token, ANSWER_S)
        if self._elsewhere is not None or not self._told:
            wire.send(elsewhere=list(self._elsewhere or ()))
            return None
        wire.send(job=self._told)
        said = wire.receive(_BUILDING_S)
        problems = differences(self._papers, said["papers"])
        if problems:
            wire.send(refused=problems)
            return None
        wire.send(welcome=True)
        return Waiting(str(said["identity"]), wire)
