"""Transfers in all directions at once: everything arrives, in order, through small buffers."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds.migration.transport import (
    DIRECT_BYTES,
    FIRST_BYTES,
    Transfer,
    _Stream,
    exchange,
    exchange_bytes,
)
from dynpipe_ds.ranks.agreement import gather
from dynpipe_ds.ranks.cross_memory import CrossMemory, cross_memory, give_up_cross_memory
from tests.distributed.ranks import run_ranks

CPU = torch.device("cpu")
BUFFER = 64  # bytes

# Bytes of the tensors that one rank sends to another: nothing, less than a buffer, exactly one, one byte
# more, several, and lists whose pieces straddle the buffers' ends.
SIZES: list[list[int]] = [
    [], [0], [1], [BUFFER - 1], [BUFFER], [BUFFER + 1], [3 * BUFFER], [5, 0, BUFFER, 7], [40] * 9,
]


def exchange_tensors(sends: dict[int, list[Tensor]], into: dict[int, list[Tensor]], **options: Any) -> None:
    transfer = Transfer(sends, {}, device=CPU, **options)
    reads = options.get("memory") is not None
    offers = gather({rank: transfer.offers(rank) for rank in sends}) if reads else []
    transfer.receive(into, {rank: offers[rank][dist.get_rank()] for rank in into if reads})
    transfer.start()
    transfer.finish()
    assert transfer.reading_failure() is None
    if reads:
        dist.barrier()  # a vote, after which what was offered may change


def sizes_from(source: int, destination: int, turn: int) -> list[int]:
    return SIZES[(source * 4 + destination + turn) % len(SIZES)]


def filled(source: int, destination: int, turn: int) -> list[Tensor]:
    """Tensors that tell where they come from and where they go."""
    identity = 64 * source + 16 * destination + turn
    return [
        ((torch.arange(size) + identity + 3 * i) % 251).to(torch.uint8)
        for i, size in enumerate(sizes_from(source, destination, turn))
    ]


def send_to_all(rank: int, direct_bytes: int, memory: CrossMemory | None = None) -> None:
    """Every rank sends to every other at once, in as many turns as there are size lists."""
    others = [r for r in range(dist.get_world_size()) if r != rank]
    for turn in range(len(SIZES)):
        sends = {r: filled(rank, r, turn) for r in others}
        wanted = {r: filled(r, rank, turn) for r in others}
        into = {r: [torch.full_like(t, 255) for t in tensors] for r, tensors in wanted.items()}
        exchange_tensors(sends, into, buffer_bytes=BUFFER, direct_bytes=direct_bytes, memory=memory)
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
    exchange_tensors({after: [payload(rank)]}, {before: [into]}, buffer_bytes=1000)
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
        buffer_bytes=100,
    )
    assert rank != last or all(torch.equal(a, b) for a, b in zip(tensors, into, strict=True))


def send_bytes(rank: int) -> None:
    world = dist.get_world_size()
    others = [r for r in range(world) if r != rank]
    received = exchange_bytes({r: bytes([rank]) * (100 * rank + r) for r in others}, others, CPU)
    assert received == {r: bytes([r]) * (100 * r + rank) for r in others}
    assert exchange_bytes({}, [], CPU) == {}
    for size in (FIRST_BYTES - 9, FIRST_BYTES - 8, FIRST_BYTES - 7, 3 * FIRST_BYTES):  # its end and around it
        data = bytes(range(256)) * (size // 256) + bytes(size % 256)
        received = exchange_bytes({r: data + bytes([rank]) for r in others}, others, CPU)
        assert received == {r: data + bytes([r]) for r in others}
    received = exchange_bytes({(rank + 1) % world: b""}, [(rank - 1) % world], CPU)
    assert received == {(rank - 1) % world: b""}


def send_single(rank: int) -> None:
    others = [r for r in range(dist.get_world_size()) if r != rank]
    into = {r: torch.empty(2, dtype=torch.int64) for r in others}
    exchange({r: [torch.tensor([rank, r])] for r in others}, {r: [t] for r, t in into.items()})
    assert {r: t.tolist() for r, t in into.items()} == {r: [r, rank] for r in others}
    exchange({}, {})


def send_in_order(rank: int) -> None:
    """Messages of one size between the same two ranks, all under way at once, keep their order."""
    parts = [torch.full((DIRECT_BYTES,), i, dtype=torch.uint8) for i in range(20)]
    into = [torch.full_like(part, 255) for part in parts]
    exchange_tensors(
        {1: parts} if rank == 0 else {}, {0: into} if rank == 1 else {}, buffer_bytes=2**30
    )
    assert rank != 1 or all(torch.equal(a, b) for a, b in zip(parts, into, strict=True))


def everything(rank: int) -> None:
    for direct_bytes in (1, 8, 50, BUFFER + 1):  # all, some and none in messages of their own
        send_to_all(rank, direct_bytes)
    for check in (send_round, send_one_way, send_in_order, send_bytes, send_single):
        check(rank)


def read_from_some(rank: int) -> list[list[int]]:
    """Every rank reads every other's memory, then only that of ranks before it, the others send; then none does."""
    memory, others = cross_memory(), [r for r in range(dist.get_world_size()) if r != rank]
    assert all(memory.is_read_by(r) for r in others), "these are processes of one user on one machine"
    send_to_all(rank, 8, memory)
    with patch.object(CrossMemory, "is_read_by", lambda _, reader: reader > rank):
        sends = {r: [torch.zeros(9), torch.zeros(0), torch.zeros(2)] for r in others}
        offers = [Transfer(sends, {}, buffer_bytes=BUFFER, device=CPU, memory=memory).offers(r) for r in others]
        send_to_all(rank, 8, memory)
    assert cross_memory() is memory
    give_up_cross_memory()
    assert not any(cross_memory().is_read_by(r) for r in others)
    send_to_all(rank, 8, cross_memory())
    return [[address > 0 for address in addresses] for addresses in offers]


def test_memory_is_read_where_that_is_possible() -> None:
    read = [True, False, True]  # no tensor without elements
    assert run_ranks(read_from_some, 3) == [[read, read], [[], read], [[], []]]


def read_what_is_gone(rank: int) -> list[str]:
    """The first rank offers memory that it has not, to the second one; the third knows nothing of it."""
    tensors = [torch.arange(100)]
    transfer = Transfer({1: tensors} if rank == 0 else {}, {}, buffer_bytes=BUFFER, device=CPU, memory=cross_memory())
    if rank == 1:
        transfer.receive({0: [torch.empty(100, dtype=torch.int64)]}, {0: [4096]})
    transfer.start()
    transfer.send_rest()
    failure = transfer.reading_failure()
    transfer.finish()
    assert transfer.num_bytes == ((800, 0), (0, 800), (0, 0))[rank]
    return [] if failure is None else [str(failure)]


def test_memory_that_can_not_be_read_is_said() -> None:
    first, [said], third = run_ranks(read_what_is_gone, 3)
    assert first == third == [] and "the memory of process" in said and "Bad address" in said


def read_of_a_parameter(rank: int) -> list[float]:
    """A parameter gets other memory on both sides while its weights travel."""
    parameter = torch.nn.Parameter(torch.full((4,), 1.0 + rank))
    before = parameter.detach()
    memory = cross_memory()
    transfer = Transfer({1 - rank: [parameter]}, {}, buffer_bytes=BUFFER, device=CPU, memory=memory)
    arrived = torch.nn.Parameter(torch.zeros(4))
    expected = arrived.detach()
    transfer.receive({1 - rank: [arrived]}, {1 - rank: gather(transfer.offers(1 - rank))[1 - rank]})
    del before
    parameter.data = torch.full((4,), 7.0)
    arrived.data = torch.full((4,), 8.0)
    dist.barrier()
    transfer.start()
    transfer.finish()
    dist.barrier()
    return expected.tolist()


def test_what_is_read_is_as_it_was_when_it_was_offered() -> None:
    assert run_ranks(read_of_a_parameter, 2) == [[2.0] * 4, [1.0] * 4]


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_all_directions_at_once(num_ranks: int) -> None:
    run_ranks(everything, num_ranks)


def test_large_tensors_are_never_copied() -> None:
    """A tensor of its own message is what is sent; only small ones go through a buffer, as large as they are."""
    large, small = torch.zeros(100, dtype=torch.uint8), torch.arange(10, dtype=torch.uint8)
    stream = _Stream([small, large, small + 10], round_bytes=200, direct_bytes=50, device=CPU)
    stream.fill(0)
    [shared], [own] = stream.shared(0), stream.direct(0)
    assert own.data_ptr() == large.data_ptr() and own.numel() == 100
    assert shared.tolist() == list(range(20)) and len(stream.sizes) == 1


def test_what_comes_goes_where_its_tensor_was_when_it_was_expected() -> None:
    """An optimizer that is told of a parameter may give it other memory while its weights travel."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    expected = parameter.detach()
    stream = _Stream([parameter], round_bytes=200, direct_bytes=50, device=CPU)
    parameter.data = torch.full((4,), 7.0)
    stream.shared(0)[0].copy_(torch.ones(4).view(torch.uint8))
    stream.take(0)
    assert expected.tolist() == [1.0] * 4 and parameter.tolist() == [7.0] * 4


def test_rounds_are_bounded() -> None:
    stream = _Stream([torch.zeros(25, dtype=torch.uint8)] * 3, round_bytes=30, direct_bytes=10, device=CPU)
    sizes = [[m.numel() for m in stream.shared(i) + stream.direct(i)] for i in range(len(stream.sizes))]
    assert sizes == [[5, 25], [20, 10], [15]]


def drain_from_one(rank: int) -> list[list[int]]:
    """The first rank promises and sends; the second keeps what comes, the third does not, and both go on."""
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (30, 7, 90, 5)]
    sends = {1: tensors, 2: tensors} if rank == 0 else {}
    transfer = Transfer(sends, {}, buffer_bytes=BUFFER, device=CPU, direct_bytes=20)
    promised = [transfer.message_sizes(2)] if rank == 0 else [[]]
    dist.broadcast_object_list(promised)
    rooms = [torch.zeros_like(tensor) for tensor in tensors]
    if rank == 1:
        transfer.receive({0: rooms})
    if rank == 2:
        transfer.drain({0: promised[0]})
    transfer.start()
    transfer.send_rest()
    transfer.finish()
    assert rank != 1 or all(torch.equal(room, tensor) for room, tensor in zip(rooms, tensors, strict=True))
    exchange_tensors({(rank + 1) % 3: tensors}, {(rank - 1) % 3: rooms}, buffer_bytes=BUFFER)
    return [room.tolist() for room in rooms]


def test_what_is_not_wanted_any_more_is_received_all_the_same() -> None:
    for rooms in run_ranks(drain_from_one, 3):
        assert rooms == [list(range(size)) for size in (30, 7, 90, 5)]
