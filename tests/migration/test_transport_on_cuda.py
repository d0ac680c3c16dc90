"""Transfers between two processes that share a device: large tensors, small ones, and some on the host."""

from __future__ import annotations

import torch

from dynpipe_ds.migration.transport import DIRECT_BYTES, FIRST_BYTES, Transfer, exchange_bytes
from tests.devices import ON_DEVICES, device_of
from tests.distributed.ranks import run_ranks

SIZES = (3, DIRECT_BYTES, 17, DIRECT_BYTES + 5, 0, 64)


def send_both_ways(rank: int, kind: str) -> None:
    device = torch.device(kind)

    def numbered(source: int) -> list[torch.Tensor]:
        where = [device if i % 3 else torch.device("cpu") for i in range(len(SIZES))]
        return [
            (torch.arange(size, device=at) + 7 * source + i).to(torch.uint8)
            for i, (size, at) in enumerate(zip(SIZES, where, strict=True))
        ]

    rooms = [torch.empty_like(tensor) for tensor in numbered(1 - rank)]
    transfer = Transfer({1 - rank: numbered(rank)}, {1 - rank: rooms}, buffer_bytes=DIRECT_BYTES + 100, device=device)
    transfer.start()
    transfer.finish()
    assert all(torch.equal(a, b) for a, b in zip(rooms, numbered(1 - rank), strict=True))
    for text in (b"", b"short", bytes(range(256)) * (FIRST_BYTES // 100)):
        got = exchange_bytes({1 - rank: text + bytes([rank])}, [1 - rank], device)
        assert got == {1 - rank: text + bytes([1 - rank])}


@ON_DEVICES
def test_both_ways_at_once(kind: str) -> None:
    device_of(kind)
    run_ranks(send_both_ways, 2, kind, shares_device=True)
