"""Asking other processes whether they live: each answers on a socket of its own, from a thread of its own.

There are three answers. A process that lives replies. One that has ended refuses, since the kernel closes its
socket with it. One that is stopped, or whose machine is gone, is silent; the kernel keeps what it is told until it
goes on. Question and reply are the same line: a secret, and as JSON the verdict that the sender holds, if any.

Who wants to know of a process's end at once stays connected (:class:`Standing`): the kernel ends the connection then.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

from dynpipe_ds.ranks import fatal
from dynpipe_ds.ranks.fatal import Verdict

_LONGEST_LINE = 1 << 16
_READ_S = 1.0  # who connects and says nothing is not waited for any longer
_BACKLOG = 4096  # as many ranks as may ask at the same time; the kernel has a limit of its own
_MOST_OPEN = 200
_PAUSE_S = 0.02
_STEP_S = 1.0
_STAY = "stay"
_CONNECT_S = 5.0


class RunningClock:
    """Seconds that passed while this process ran: if it is stopped, or gets no core, that counts as one second."""

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self.passed_s = 0.0

    def tick(self) -> float:
        """Note the time; to be called several times a second.

        Returns:
            Seconds since the clock was made.
        """
        now_s = time.monotonic()
        self.passed_s += min(now_s - self._last_s, _STEP_S)
        self._last_s = now_s
        return self.passed_s


class Answer(Enum):
    """What asking a process came to."""

    LIVES = "lives"
    ENDED = "ended"
    SILENT = "silent"


class Address(NamedTuple):
    """Where a process can be asked.

    Attributes:
        host: name or number, to be resolved where it is used.
        port: its socket's.
        secret: what a message must carry to be read.
    """

    host: str
    port: int
    secret: str


def _line(secret: str, verdict: Verdict | str | None) -> bytes:
    return f"{secret} {json.dumps(verdict, default=vars)}\n".encode()


def _read(line: bytes, secret: str) -> Verdict | str | None:
    """The verdict that a line tells, or that the sender stays connected.

    Raises:
        ValueError: if it is not one of ours.
    """
    said, _, text = line.partition(b" ")
    if not hmac.compare_digest(said, secret.encode()):
        raise ValueError("a line without the secret")
    told: Any = json.loads(text)
    if told is None or told == _STAY:
        return told  # type: ignore[no-any-return]
    try:
        return Verdict(tuple(int(rank) for rank in told["ranks"]), str(told["text"]), bool(told["lost"]))
    except (KeyError, TypeError) as error:
        raise ValueError("a verdict without its parts") from error


def own_address() -> tuple[socket.AddressFamily, str, str]:
    """Where to listen: family, what the others are told, what to bind to."""
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; finds the address by which this machine reaches the master's
        own = str(probe.getsockname()[0])
    if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
        return family, own, own
    if _is_loopback(master):
        return family, str(target[0]), str(target[0])
    return family, master, ""  # the master's own machine: its name stands for loopback here, not for the others


@lru_cache
def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, target


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Listener:
    """Answers whoever asks this process, for one world, until the process ends.

    Args:
        beside: listener of an earlier world of this process, which still answers: it shares its socket and its thread.

    Attributes:
        address: where it is asked.
        last_words: the verdict after which the others went on in another world: whoever still asks here is told it,
            and what he tells counts no more.

    Raises:
        OSError: if no socket can be had.
    """

    def __init__(self, beside: Listener | None = None) -> None:
        self._server: _Server = _Server() if beside is None or beside.is_closed else beside._server
        host, port = self._server.end
        self.address = Address(host, port, secrets.token_hex(16))
        self.last_words: Verdict | None = None
        self._server.listeners[self.address.secret] = self

    @property
    def is_closed(self) -> bool:
        """Whether nobody answers any more."""
        return self._server.socket.fileno() < 0

    def close(self) -> None:
        """Answer no more."""
        self._server.listeners.pop(self.address.secret, None)
        if all(listener.last_words is not None for listener in self._server.listeners.values()):
            self._server.close()


class _Server:
    """The socket and the thread of a process's listeners.

    Attributes:
        socket: of this process.
        end: where it is reached.
        listeners: by their secrets.
    """

    def __init__(self) -> None:
        family, advertised, bound = own_address()
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((bound, 0))
        self.socket.listen(_BACKLOG)
        self.end: tuple[str, int] = advertised, int(self.socket.getsockname()[1])
        self.listeners: dict[str, Listener] = {}
        self._staying: list[socket.socket] = []
        # A worker of a data loader must not keep the sockets of a process that has ended.
        os.register_at_fork(after_in_child=self._let_go)
        threading.Thread(target=self._serve, name="dynpipe_ds listener", daemon=True).start()

    def close(self) -> None:
        """Answer no more."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._let_go()

    def _let_go(self) -> None:
        self.socket.close()
        for connection in self._staying:
            connection.close()

    def _serve(self) -> None:
        # One after the other, in the order in which they came: who asks itself knows all that came before.
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError as error:
                if error.errno in (errno.ECONNABORTED, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(_PAUSE_S)
                    continue
                return  # closed
            with suppress(OSError, ValueError):
                line = _receive(connection)
                listener = self._asked(line)
                told = _read(line, listener.address.secret)
                if told == _STAY:
                    self._stay(connection)
                    continue
                if isinstance(told, Verdict) and listener.last_words is None:
                    fatal.hold(told)
                connection.sendall(_line(listener.address.secret, listener.last_words or fatal.held()))
            connection.close()

    def _asked(self, line: bytes) -> Listener:
        said = line.partition(b" ")[0]
        for listener in list(self.listeners.values()):
            if hmac.compare_digest(said, listener.address.secret.encode()):
                return listener
        raise ValueError("a line without a secret")

    def _stay(self, connection: socket.socket) -> None:
        """Keep a connection, and none whose other end is closed: every world has connections of its own."""
        for one in [one for one in self._staying if _has_ended(one)]:
            self._staying.remove(one)
            one.close()
        self._staying.append(connection)


def _receive(connection: socket.socket) -> bytes:
    """The line that somebody says."""
    received, clock = b"", RunningClock()
    while not received.endswith(b"\n"):
        left_s = _READ_S - clock.tick()
        if left_s <= 0 or len(received) > _LONGEST_LINE:
            raise ValueError("not a line")
        connection.settimeout(left_s)
        piece = connection.recv(4096)
        if not piece:
            raise ValueError("cut short")
        received += piece
    return received


def _has_ended(connection: socket.socket) -> bool:
    try:
        connection.setblocking(False)
        return not connection.recv(1)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


class _Call:
    """One question to one process, in small steps that never block."""

    def __init__(self, address: Address, verdict: Verdict | None) -> None:
        self._address, self._line = address, _line(address.secret, verdict)
        self._socket: socket.socket | None = None
        self._unsent = self._received = b""
        self.answer: Answer | None = None

    def step(self) -> None:
        """Get on with it as far as possible now."""
        try:
            self._step()
        except (BlockingIOError, InterruptedError):
            pass  # not yet
        except (ConnectionRefusedError, ValueError):  # ValueError: another program has the port by now
            self.answer = Answer.ENDED
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # how some systems say "not yet"
                self.close()  # reset, no route, no more sockets: the next step tries again
        if self.answer is not None:
            self.close()

    def _step(self) -> None:
        if self._socket is None:
            family, target = _resolve(self._address.host, self._address.port)
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._unsent, self._received = self._line, b""
            self._socket.connect(target)
        if self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
            return
        piece = self._socket.recv(4096)
        self._received += piece
        if self._received.endswith(b"\n"):
            told = _read(self._received, self._address.secret)
            if isinstance(told, Verdict):
                fatal.hold(told)
            self.answer = Answer.LIVES
        elif not piece:
            self.close()  # it had no time to reply, or ends just now: ask again
        elif len(self._received) > _LONGEST_LINE:
            raise ValueError("not a line")

    def close(self) -> None:
        """Give up the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def ask(
    addresses: Mapping[int, Address], patience_s: float, verdict: Verdict | None = None
) -> dict[int, Answer]:
    """Ask processes whether they live, all at the same time.

    Args:
        addresses: by rank.
        patience_s: longest time to wait for a reply, in seconds that this process runs.
        verdict: what to tell them; by default the one that this process holds.

    Returns:
        What each answered; the first verdict that one of them held is held here then.
    """
    calls = {rank: _Call(address, verdict or fatal.held()) for rank, address in addresses.items()}
    clock = RunningClock()
    waiting = list(calls.values())
    while waiting and clock.tick() < patience_s:
        for call in waiting[:_MOST_OPEN]:
            call.step()
        still = [call for call in waiting if call.answer is None]
        if len(still) == len(waiting):
            time.sleep(_PAUSE_S)
        waiting = still
    for call in waiting:
        call.close()
    return {rank: call.answer or Answer.SILENT for rank, call in calls.items()}


class Standing:
    """A connection to a process that stays until that process ends.

    Args:
        address: where the process is asked.

    Raises:
        OSError: if it can't be had.
    """

    def __init__(self, address: Address) -> None:
        family, target = _resolve(address.host, address.port)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_CONNECT_S)
            self._socket.connect(target)
            self._socket.sendall(_line(address.secret, _STAY))
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise

    @property
    def is_broken(self) -> bool:
        """Whether the process has ended, or its system has."""
        return _has_ended(self._socket)

    def fileno(self) -> int:
        """For ``select``."""
        return self._socket.fileno()

    def close(self) -> None:
        """Want to know no more."""
        self._socket.close()
