"""Ports that are kept for ranks."""

from __future__ import annotations

import socket

import pytest
from torch import distributed as dist

from dynpipe_ds.ranks import reserved_port


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_a_reserved_port_is_given_to_nobody_else(address: str) -> None:
    with reserved_port() as port, socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind((address, port))


def test_stores_listen_on_a_reserved_port_one_after_the_other() -> None:
    with reserved_port() as port:
        for _ in range(2):
            store = dist.TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False)
            store.set("key", "value")
            del store
