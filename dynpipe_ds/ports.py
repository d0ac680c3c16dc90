"""Ports for ranks on this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

ANY_PORT = 0
"""For a rank that is alone: nobody else has to be told where its store listens."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on this machine for those who are told of it: bound until the end, so the system gives it to nobody else.

    Who listens there sets ``SO_REUSEADDR``, as torch's store does; it may do so again and again.

    Yields:
        The port's number.

    Raises:
        OSError: if no port is free.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # On all addresses, as a store listens: were it bound on one, the system could give the port to a socket on
        # another, and the store would find its address in use.
        bound.bind(("0.0.0.0", 0))
        yield int(bound.getsockname()[1])
