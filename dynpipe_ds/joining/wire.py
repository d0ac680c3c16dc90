"""Lines of JSON between two processes, which first prove to each other that they know the same token.

The token itself is never sent: each side signs what the other has drawn. What comes from who has not proved it is
parsed as two short texts and nothing else; what comes later is plain JSON, never code.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
from contextlib import suppress
from typing import Any

_LONGEST_LINE = 1 << 24
_LONGEST_PROOF = 1 << 10


class WireError(RuntimeError):
    """The other side said what it should not, or is gone."""


class Wire:
    """A connection over which lines go.

    Args:
        connection: open; closed with :meth:`close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._unread = b""

    def send(self, **content: Any) -> None:
        """Say something.

        Raises:
            WireError: if the other side is gone.
        """
        try:
            self._socket.sendall(json.dumps(content).encode() + b"\n")
        except OSError as error:
            raise WireError(f"the connection is gone ({error})") from error

    def receive(self, patience_s: float | None, longest: int = _LONGEST_LINE) -> dict[str, Any]:
        """Wait for a line.

        Args:
            patience_s: longest time; ``None``: as long as the other side lives.
            longest: most bytes of it.

        Raises:
            WireError: if the other side is gone, too slow, or says what is no line of ours.
        """
        try:
            self._socket.settimeout(patience_s)
            while b"\n" not in self._unread:
                piece = self._socket.recv(1 << 16)
                if not piece:
                    raise WireError("the other side has closed the connection")
                self._unread += piece
                if len(self._unread) > longest:
                    raise WireError(f"a line of more than {longest} bytes")
        except TimeoutError as error:
            raise WireError(f"no answer in {patience_s:g} s") from error
        except OSError as error:
            raise WireError(f"the connection is gone ({error})") from error
        finally:
            with suppress(OSError):
                self._socket.settimeout(None)
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            content = json.loads(line)
        except ValueError as error:
            raise WireError("not a line of ours") from error
        if not isinstance(content, dict):
            raise WireError("not a line of ours")
        return content

    def has_said(self, patience_s: float) -> bool:
        """Whether the other side says something, or closes the connection, before so many seconds are over."""
        return bool(self._unread) or bool(select.select([self._socket], [], [], patience_s)[0])

    @property
    def is_open(self) -> bool:
        """Whether the other side still holds the connection, as far as the kernel knows; asks nobody."""
        if self._unread:
            return True
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # -- proofs -------------------------------------------------------------------------------

    def admit(self, token: str, patience_s: float) -> None:
        """As who is called: let the other side prove that it knows the token.

        Raises:
            WireError: if it does not.
        """
        theirs, ours = self._drawn(patience_s), secrets.token_hex(16)
        self.send(drawn=ours, proof=_proof(token, "called", theirs, ours))
        said = self.receive(patience_s, _LONGEST_PROOF).get("proof")
        if not isinstance(said, str) or not hmac.compare_digest(said, _proof(token, "caller", theirs, ours)):
            raise WireError("the token is another one")

    def introduce(self, token: str, patience_s: float) -> None:
        """As who calls: prove that this side knows the token, and that the other one does.

        Raises:
            WireError: if it does not.
        """
        ours = secrets.token_hex(16)
        self.send(drawn=ours)
        answer = self.receive(patience_s, _LONGEST_PROOF)
        theirs, said = answer.get("drawn"), answer.get("proof")
        if not isinstance(theirs, str) or not isinstance(said, str):
            raise WireError("not a door of dynpipe_ds")
        if not hmac.compare_digest(said, _proof(token, "called", ours, theirs)):
            raise WireError("the token is another one")
        self.send(proof=_proof(token, "caller", ours, theirs))

    def _drawn(self, patience_s: float) -> str:
        drawn = self.receive(patience_s, _LONGEST_PROOF).get("drawn")
        if not isinstance(drawn, str):
            raise WireError("not a newcomer of dynpipe_ds")
        return drawn


def _proof(token: str, who: str, caller: str, called: str) -> str:
    return hmac.new(token.encode(), f"{who} {caller} {called}".encode(), hashlib.sha256).hexdigest()
