"""Reading memory of other processes, here of this one; how ranks find whose they can read."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds.ranks import cross_memory as tested
from dynpipe_ds.ranks.cross_memory import CrossMemory, Piece, cross_memory, split
from tests.distributed.ranks import run_ranks

ME = CrossMemory({0: os.getpid()})


@pytest.mark.parametrize("most_bytes", [2**30, 100, 7])
def test_pieces_arrive_however_many_calls_they_take(most_bytes: int) -> None:
    source = torch.arange(3000, dtype=torch.int16)
    target = torch.zeros_like(source)
    with patch.object(tested, "_MOST_BYTES", most_bytes):
        ME.read(0, [Piece(source.data_ptr() + 2 * i, target.data_ptr() + 2 * i, 2) for i in range(3000)])
    assert torch.equal(source, target)
    target.zero_()
    with patch.object(tested, "_MOST_BYTES", most_bytes):
        ME.read(0, [Piece(source.data_ptr(), target.data_ptr(), 6000)])
    assert torch.equal(source, target)


def test_pieces_are_cut_to_what_one_call_takes() -> None:
    pieces = [Piece(10 * i, 10 * i, 10) for i in range(1500)]
    assert [len(part) for part in split(pieces, 2**30)] == [1024, 476]
    parts = list(split([Piece(0, 100, 60), Piece(70, 200, 0), Piece(80, 300, 5)], 25))
    assert parts == [[(0, 100, 25)], [(25, 125, 25)], [(50, 150, 10), (80, 300, 5)]]
    assert list(split([], 25)) == []


def test_memory_that_is_not_there_can_not_be_read() -> None:
    target = torch.zeros(2**20, dtype=torch.uint8)
    with pytest.raises(OSError, match=rf"the memory of process {os.getpid()} can.t be read .*Bad address"):
        ME.read(0, [Piece(4096, target.data_ptr(), 8)])
    with pytest.raises(OSError, match=r"of 16 bytes in the memory of process \d+ only 8 can be read"):
        ME.read(0, [Piece(target.data_ptr(), target.data_ptr(), 8), Piece(4096, target.data_ptr() + 8, 8)])
    with pytest.raises(OSError, match="No such process"):
        CrossMemory({0: 2**22 + 1}).read(0, [Piece(target.data_ptr(), target.data_ptr(), 8)])


def tries(rank: int, kind: str) -> list[bool]:
    """Whether the other ranks read this one's memory, if something is special of the first."""
    if kind == "not allowed":
        memory = cross_memory(is_allowed=rank > 0)
    if kind == "no longer allowed":
        cross_memory()
        memory = cross_memory(is_allowed=rank > 0)
    if kind in ("not allowed", "no longer allowed"):
        return [memory.is_read_by(reader) for reader in range(3)]
    special: dict[str, tuple[str, Any]] = {
        "usual": ("_read", tested._read),
        "another machine": ("_machine", lambda: "elsewhere"),
        "no such call": ("_machine", lambda: ""),
        "another process by that number": ("_holds", lambda _: False),
    }
    name, value = special[kind]
    with patch.object(tested, name, value if rank == 0 else getattr(tested, name)):
        memory = cross_memory()
    return [memory.is_read_by(reader) for reader in range(3)]


@pytest.mark.parametrize(
    ("kind", "of_first", "of_second"),
    [
        ("usual", [False, True, True], [True, False, True]),
        ("another machine", [False, False, False], [False, False, True]),
        ("no such call", [False, False, False], [False, False, True]),
        ("not allowed", [False, False, False], [False, False, True]),
        ("no longer allowed", [False, False, False], [True, False, True]),
        ("another process by that number", [False, True, True], [False, False, True]),  # what the first one finds
    ],
)
def test_ranks_find_whose_memory_they_can_read(kind: str, of_first: list[bool], of_second: list[bool]) -> None:
    first, second, _ = run_ranks(tries, 3, kind)
    assert (first, second) == (of_first, of_second)


def test_a_secret_tells_the_process_from_another_one_of_that_number() -> None:
    kept = ctypes.create_string_buffer(b"here", 4)
    seen = tested._Seen("this", os.getpid(), ctypes.addressof(kept), b"here")
    assert tested._holds(seen)
    assert not tested._holds(seen._replace(secret=b"else"))
    assert not tested._holds(seen._replace(address=4096))


@pytest.mark.parametrize(("scope", "calls"), [("0", 0), ("1", 1), ("2", 0), ("?", 0), (None, 0)])
def test_where_yama_allows_ancestors_alone_the_launchers_processes_are_allowed(
    tmp_path: Path, scope: str | None, calls: int
) -> None:
    path = tmp_path / "ptrace_scope"
    if scope is not None:
        path.write_text(scope)
    with patch.object(tested, "_YAMA", path), patch.object(tested.ctypes, "CDLL") as library:
        tested._let_siblings_read()
    made = library.return_value.prctl.call_args_list
    assert len(made) == calls
    assert not made or (made[0].args[0], made[0].args[1].value) == (0x59616D61, os.getppid())
