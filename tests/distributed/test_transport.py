"""Transfers in all directions at once: everything arrives, in order, through small buffers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds.migration.transport import exchange, exchange_bytes, exchange_tensors
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
BUFFER = 64  # bytes

# Bytes of the tensors that one rank sends to another: nothing, less than a buffer, exactly one, one byte
# more, several, and lists whose pieces straddle the buffers' ends.
SIZES: list[list[int]] = [
    [], [0], [1], [BUFFER - 1], [BUFFER], [BUFFER + 1], [3 * BUFFER], [5, 0, BUFFER, 7], [40] * 9,
]


def sizes_from(source: int, destination: int, turn: int) -> list[int]:
    return SIZES[(source * 4 + destination + turn) % len(SIZES)]


def filled(source: int, destination: int, turn: int) -> list[Tensor]:
    """Tensors that tell where they come from and where they go."""
    identity = 64 * source + 16 * destination + turn
    return [
        ((torch.arange(size) + identity + 3 * i) % 251).to(torch.uint8)
        for i, size in enumerate(sizes_from(source, destination, turn))
    ]


def send_to_all(rank: int) -> None:
    """Every rank sends to every other at once, in as many turns as there are size lists."""
    others = [r for r in range(dist.get_world_size()) if r != rank]
    for turn in range(len(SIZES)):
        sends = {r: filled(rank, r, turn) for r in others}
        wanted = {r: filled(r, rank, turn) for r in others}
        into = {r: [torch.full_like(t, 255) for t in tensors] for r, tensors in wanted.items()}
        exchange_tensors(sends, into, buffer_bytes=BUFFER, device=CPU)
        assert all(torch.equal(a, b) for r in others for a, b in zip(into[r], wanted[r], strict=True))
        for r in others:
            assert all(torch.equal(a, b) for a, b in zip(sends[r], filled(rank, r, turn), strict=True))


def send_round(rank: int) -> None:
    """A ring in which each rank sends 100 times what it gets to the next one."""
    world = dist.get_world_size()
    after, before = (rank + 1) % world, (rank - 1) % world

    def payload(source: int) -> Tensor:
        return torch.arange(100**source if source < 3 else 1, dtype=torch.float32) + source

    into = torch.empty_like(payload(before))
    exchange_tensors({after: [payload(rank)]}, {before: [into]}, buffer_bytes=1000, device=CPU)
    assert torch.equal(into, payload(before))


def send_one_way(rank: int) -> None:
    """The first rank sends to the last; those between have nothing to do and don't wait."""
    last = dist.get_world_size() - 1
    image = torch.rand(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    channels_last = image.to(memory_format=torch.channels_last)
    tensors = [image, channels_last, image.bfloat16(), image > 0.5, image.long()]
    into = [torch.empty_like(t).fill_(1) for t in tensors]
    exchange_tensors(
        {last: tensors} if rank == 0 else {}, {0: into} if rank == last else {},
        buffer_bytes=100, device=CPU,
    )
    assert rank != last or all(torch.equal(a, b) for a, b in zip(tensors, into, strict=True))


def send_bytes(rank: int) -> None:
    world = dist.get_world_size()
    others = [r for r in range(world) if r != rank]
    received = exchange_bytes({r: bytes([rank]) * (100 * rank + r) for r in others}, others, CPU)
    assert received == {r: bytes([r]) * (100 * r + rank) for r in others}
    assert exchange_bytes({}, [], CPU) == {}
    received = exchange_bytes({(rank + 1) % world: b""}, [(rank - 1) % world], CPU)
    assert received == {(rank - 1) % world: b""}


def send_single(rank: int) -> None:
    others = [r for r in range(dist.get_world_size()) if r != rank]
    into = {r: torch.empty(2, dtype=torch.int64) for r in others}
    exchange({r: torch.tensor([rank, r]) for r in others}, into)
    assert {r: t.tolist() for r, t in into.items()} == {r: [r, rank] for r in others}
    exchange({}, {})


def everything(rank: int) -> None:
    for check in (send_to_all, send_round, send_one_way, send_bytes, send_single):
        check(rank)


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_all_directions_at_once(num_ranks: int) -> None:
    run_ranks(everything, num_ranks, timeout_s=60)
