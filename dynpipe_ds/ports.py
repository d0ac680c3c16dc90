"""Ports for ranks on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

ANY_PORT = 0
"""For a rank that is alone: nobody else has to be told where its store listens."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on this machine for those who are told of it: the system gives it to nobody else until the end.

    Who listens there sets ``SO_REUSEADDR``, as torch's store does; it may do so again and again.

    Yields:
        The port's number.

    Raises:
        OSError: if no port is free.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # A store listens on all addresses. Were only one bound, the system could give the port to a socket on another.
        bound.bind(("0.0.0.0", 0))
        yield int(bound.getsockname()[1])
