"""Ports that are kept for ranks."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from torch import distributed as dist

import scenarios.ports
from dynpipe_ds.ranks.ports import reserved_port


@pytest.mark.parametrize("reserved", [reserved_port, scenarios.ports.reserved_port], ids=["package", "scenarios"])
def test_a_reserved_port_is_free_for_a_store_and_for_nobody_else(
    reserved: Callable[[], AbstractContextManager[int]],
) -> None:
    with reserved() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        for _ in range(2):
            store = dist.TCPStore("127.0.0.1", port, 1, True, wait_for_workers=False)
            store.set("key", "value")
            del store
