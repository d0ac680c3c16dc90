"""What is stored can be read back: as it is, as a plain value, or it is refused by its path."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from dynpipe_ds import CheckpointError
from dynpipe_ds.checkpoint.plain import plain
from tests.steps import lines_run

Point = collections.namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


class Own:
    """Can be pickled, and is read only if it is allowed."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


def read_back(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


STAYS = [
    None, True, 7, -(10**30), 1.5, float("inf"), 1 + 2j, "text", b"bytes", bytearray(b"x"), (), (1, (2, 3)), [1, [2]],
    {1, 2}, {"a": {1: (None, "b")}}, collections.OrderedDict(b=1, a=2), collections.Counter("aab"), torch.Size([1, 2]),
    torch.float32, torch.device("cpu"), torch.strided,
]  # fmt: skip


@pytest.mark.parametrize("value", STAYS, ids=repr)
def test_what_is_plain_stays(value: Any) -> None:
    found = plain({"v": value}, "client_state")["v"]
    assert found == value and type(found) is type(value)
    back = read_back(found)
    assert back == value and type(back) is type(value)


CONVERTED = [
    (numpy.float64(0.1), 0.1), (numpy.float32(0.1), float(numpy.float32(0.1))), (numpy.int64(-3), -3),
    (numpy.uint8(200), 200),
    (numpy.bool_(True), True), (numpy.complex64(1j), 1j), (numpy.str_("a"), "a"), (numpy.bytes_(b"a"), b"a"),
    (Path("a/b"), "a/b"), ({numpy.int64(1): Path("x")}, {1: "x"}), ((numpy.float64(1.0), [numpy.int32(2)]), (1.0, [2])),
    (collections.OrderedDict(a=numpy.float64(2)), collections.OrderedDict(a=2.0)), ({numpy.int64(5)}, {5}),
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected"), CONVERTED, ids=repr)
def test_numpy_numbers_and_paths_become_plain(value: Any, expected: Any) -> None:
    found = plain(value, "client_state")
    assert found == expected and type(found) is type(expected)
    assert repr(found) == repr(expected), "keys and entries have become plain, too"
    assert read_back(found) == expected


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool", "complex64", "uint32"])
def test_arrays_become_tensors_without_a_copy(dtype: str) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(dtype)
    found = plain([array, array, array[::-1], numpy.array(3.0)], "client_state")
    assert found[0] is found[1] and found[0].data_ptr() == array.ctypes.data
    assert numpy.array_equal(found[0].numpy(), array) and numpy.array_equal(found[2].numpy(), array[::-1])
    assert found[3].shape == () and torch.equal(read_back(found)[0], found[0])
    array.setflags(write=False)
    assert numpy.array_equal(plain(array, "x").numpy(), array)


REFUSED = [
    (decimal.Decimal("0.1"), "of class decimal.Decimal", "store str(value)"),
    (datetime.datetime(2026, 1, 2), "of class datetime.datetime", "store value.isoformat()"),
    (datetime.timedelta(1), "of class datetime.timedelta", "store value.total_seconds()"),
    (argparse.Namespace(lr=0.1), "of class argparse.Namespace", "store vars(value)"),
    (Settings(), "of class tests.checkpoint.test_plain.Settings", "store vars(value)"),
    (Colour.RED, "of class tests.checkpoint.test_plain.Colour", "store its .value"),
    (frozenset([1]), "of class builtins.frozenset", "store list(value)"),
    (collections.defaultdict(int), "of class collections.defaultdict", "store dict(value)"),
    (collections.deque([1]), "of class collections.deque", "store list(value)"),
    (Point(1, 2), "of class tests.checkpoint.test_plain.Point", "store tuple(value)"),
    (10**700, "of class builtins.int", "store str(value)"),
    (numpy.datetime64("2026-01-02"), "of class numpy.datetime64", "store what is plain of it"),
    (numpy.array(["a"]), "of class numpy.ndarray", "store value.tolist()"),
    (numpy.longdouble(1), "of class numpy.longdouble", "store "),
    (Own(), "of class tests.checkpoint.test_plain.Own", "store what is plain of it"),
    (lambda: 1, "of class builtins.function", "store what is plain of it"),
    (nn.Linear(1, 1), "of class torch.nn.modules.linear.Linear", "store what is plain of it"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "instead"), REFUSED, ids=lambda v: str(v).partition(" at 0x")[0][:40])
def test_what_could_not_be_read_is_refused_by_its_path(value: Any, kind: str, instead: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plain({"fine": 1, "args": [0, {"deep": value}]}, "client_state")
    text = str(caught.value)
    assert text.startswith(f"client_state['args'][1]['deep'] is {kind} (") and instead in text
    assert "or allow the class with torch.serialization.add_safe_globals([...]) before saving and loading" in text


def test_every_refused_path_is_named_up_to_three() -> None:
    with pytest.raises(CheckpointError, match=r"x\[0\] is .*x\[2\] is .*x\[3\] is [^;]*, and 2 more, and could"):
        plain([Own(), 1, Own(), Own(), Own(), Own()], "x")
    with pytest.raises(CheckpointError, match=r"x\[\(1, Decimal\('2'\)\)\]\[1\] is of class decimal.Decimal"):
        plain({(1, decimal.Decimal(2)): 1}, "x")


def test_classes_that_the_caller_allows_stay() -> None:
    own = Own(torch.ones(2))
    with torch.serialization.safe_globals([Own]):
        assert plain({"own": own}, "x")["own"] is own
        with pytest.raises(CheckpointError, match="own"):
            plain({"own": Own(decimal.Decimal(1)), "other": decimal.Decimal(1)}, "x")


def test_tensors_are_shared_and_what_hangs_on_them_is_checked() -> None:
    tensor, weight = torch.ones(3), nn.Parameter(torch.ones(2))
    assert plain([tensor, weight], "x")[0] is tensor
    weight.note = "plain"  # type: ignore[attr-defined]
    assert plain([weight], "x")[0] is weight
    weight.note = decimal.Decimal(1)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"x\[0\]"):
        plain([weight], "x")


def test_shared_references_and_cycles_stay() -> None:
    shared = {"lr": numpy.float64(0.1)}
    cycle: list[Any] = [shared, shared]
    cycle.append(cycle)
    found = plain(cycle, "x")
    assert found[0] is found[1] and found[2] is found and type(found[0]["lr"]) is float
    back = read_back(found)
    assert back[0] is back[1] and back[2] is back
    assert type(shared["lr"]) is numpy.float64, "the caller's own is as it was"
    own = ([],)
    own[0].append(own)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"x is of class builtins.tuple \(.*[Uu]nsupported"):
        plain(own, "x")


def test_depth_that_can_be_stored_is_not_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    assert read_back(plain(deep, "x")) == deep
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="x is nested too deeply"):
        plain(deep, "x")


def test_metadata_of_a_state_dict_stays() -> None:
    state = nn.Linear(2, 2).state_dict()
    assert plain(state, "x")._metadata == state._metadata  # type: ignore[attr-defined]


def test_a_large_state_costs_little() -> None:
    state = {i: {"step": torch.tensor(1.0), "exp_avg": torch.ones(1), "betas": (0.9, 0.99)} for i in range(3_000)}
    assert lines_run(lambda: plain({"state": state}, "optimizer")) < 100 * len(state), "much less than writing it"
